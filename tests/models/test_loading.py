"""Weights on their way into memory: chunks of files, blocks of GGUF, new weights, the line that shows it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from graft.models.decoder import Decoder
from graft.models.device import without_memory
from graft.models.io import progress, stream
from graft.models.io.gguf_blocks import BLOCKS, PLAIN, dequantise
from graft.models.io.gguf_head import read_head
from graft.models.io.load import find_places, load_model, open_model
from graft.models.io.progress import LoadProgress
from graft.models.io.save import save_model
from graft.models.io.stream import StoredTensor, split_chunks
from graft.models.io.tensors import ModelFileError
from graft.models.shape import Experts, ModelShape

DENSE = ModelShape(
    family="qwen3", vocab_size=11, width=8, layers=2, heads=4, kv_heads=2, head_dim=6, ff=10
)
EXPERTS = replace(DENSE, family="qwen3_moe", experts=Experts(count=5, top_k=2, ff=6), tied=False)
CPU = torch.device("cpu")


def assert_equal(one: Decoder, other: Decoder) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


# GGUF


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore:(invalid value|overflow)")  # numpy's, of scales of random bits
@pytest.mark.parametrize("kind", [*BLOCKS, *PLAIN])
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 9))
def test_blocks_have_the_bits_of_the_gguf_package(kind: str, seed: int, rows: int) -> None:
    gguf = pytest.importorskip("gguf")
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, 4 * size), dtype=np.uint8)
    theirs = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]).copy())
    ours = torch.empty(theirs.shape)
    dequantise(torch.from_numpy(raw).flatten(), kind, ours)
    is_equal = ours.view(torch.int32) == theirs.view(torch.int32)
    assert (is_equal | (ours.isnan() & theirs.isnan())).all()
    rounded = torch.empty(theirs.shape, dtype=torch.bfloat16)
    dequantise(torch.from_numpy(raw).flatten(), kind, rounded)
    assert torch.equal(rounded.nan_to_num(), theirs.bfloat16().nan_to_num())


def test_blocks_are_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.randint(0, 100, (144 * 7,), dtype=torch.uint8)
    whole, parts = torch.empty(256 * 7), torch.empty(256 * 7)
    dequantise(raw, "Q4_K", whole)
    monkeypatch.setattr("graft.models.io.gguf_blocks.CACHED", 512)
    dequantise(raw, "Q4_K", parts)
    assert torch.equal(whole, parts) and whole.unique().numel() > 100


@pytest.mark.peer
def test_a_head_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_array("texts", ["a", "é", "", "\u2581x"])
    writer.add_array("scores", [0.5, -1.25, 3.0])
    writer.add_float64("wide", math.pi)
    writer.add_bool("yes", True)
    writer.add_int64("below", -(2**40))
    writer.add_custom_alignment(64)
    writer.add_tensor("first", np.ones((3, 5), np.float32))
    writer.add_tensor(
        "second", np.ones((2, 3, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    head, reader = read_head(tmp_path / "a.gguf"), gguf.GGUFReader(tmp_path / "a.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert head.entries == {name: v for name, v in fields.items() if not name.startswith("GGUF.")}
    for tensor in reader.tensors:
        sizes = tuple(int(size) for size in tensor.shape[::-1])
        assert head.tensors[tensor.name] == (sizes, int(tensor.tensor_type), tensor.data_offset)
    assert head.tensors["second"].start % 64 == 0


# folders


@pytest.mark.parametrize("shape", [DENSE, EXPERTS])
@pytest.mark.parametrize(("chunk", "shard_bytes"), [(1, 1000), (700, 1000), (1 << 26, 10**9)])
def test_chunks_of_any_size_give_the_same_weights(
    shape: ModelShape, chunk: int, shard_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder(shape).initialise(4)
    save_model(decoder, tmp_path, shard_bytes=shard_bytes)
    monkeypatch.setattr(stream, "CHUNK", chunk)
    assert_equal(load_model(tmp_path), decoder)
    assert_equal(load_model(tmp_path, dtype=torch.bfloat16), decoder.bfloat16())


def test_chunks_hold_neighbours_of_one_file() -> None:
    one, two = Path("a"), Path("b")
    places = {
        "late": StoredTensor(one, 90, 95, "F32", ()),
        "other": StoredTensor(two, 0, 5, "F32", ()),
        "first": StoredTensor(one, 0, 60, "F32", ()),
        "next": StoredTensor(one, 60, 90, "F32", ()),
    }
    assert [*split_chunks(places)] == [["first", "next", "late"], ["other"]]


def test_few_chunks_are_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(range(200)))
    places = {f"{at:03}": StoredTensor(tmp_path / "a", at, at + 1, "U8", (1,)) for at in range(200)}
    monkeypatch.setattr(stream, "CHUNK", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    starts: list[int] = []
    read = stream._ChunkReader.read

    def counted(self: stream._ChunkReader, file: Path, start: int, stop: int) -> torch.Tensor:
        starts.append(start)
        return read(self, file, start, stop)

    monkeypatch.setattr(stream._ChunkReader, "read", counted)
    for number, (name, raw) in enumerate(stream.stream(places, CPU, "a")):
        assert int(name) == int(raw) == number
        assert len(starts) <= number + 3


def test_tensors_at_odd_places_are_read(tmp_path: Path) -> None:
    save_model(Decoder(DENSE).initialise(0), tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    head = json.loads(content[8 : 8 + length])
    head.pop("__metadata__", None)
    for facts in head.values():  # the format allows it: two bytes of another tensor come first
        facts["data_offsets"] = [at + 2 for at in facts["data_offsets"]]
    head["model.layers.0.self_attn.rotary_emb.inv_freq"] = {
        "dtype": "F16", "shape": [1], "data_offsets": [0, 2],
    }  # fmt: skip
    packed = json.dumps(head).encode()
    odd = len(packed).to_bytes(8, "little") + packed + b"\0\0" + content[8 + length :]
    (tmp_path / "model.safetensors").write_bytes(odd)
    assert_equal(load_model(tmp_path), Decoder(DENSE).initialise(0))


def test_a_tensor_without_a_place_is_read_by_its_name(tmp_path: Path) -> None:
    decoder = Decoder(EXPERTS).initialise(1)
    save_model(decoder, tmp_path)
    with open_model(tmp_path) as stored:
        assert stored.places.keys() == stored.sizes.keys() == find_places(tmp_path).keys()
        few = {name: place for name, place in stored.places.items() if ".experts." not in name}
        assert 0 < len(few) < len(stored.places)
        assert_equal(replace(stored, places=few).load(torch.float32, "cpu"), decoder)


def test_a_file_that_was_cut_meanwhile_is_named(tmp_path: Path) -> None:
    save_model(Decoder(DENSE).initialise(1), tmp_path)
    with open_model(tmp_path) as stored:
        file = tmp_path / "model.safetensors"
        os.truncate(file, file.stat().st_size - 9)
        with pytest.raises(ModelFileError, match=r"model\.safetensors' ends 9 bytes too early"):
            stored.load(torch.float32, "cpu")


def test_fp64_is_rounded_to_fp32(tmp_path: Path) -> None:
    decoder = Decoder(DENSE).initialise(2)
    save_model(decoder, tmp_path)
    with open_model(tmp_path) as stored:
        tensors = {name: stored.read(name).double() for name in stored.sizes}
    tensors["model.norm.weight"] += 1e-12
    save_file(tensors, tmp_path / "model.safetensors")
    assert_equal(load_model(tmp_path), decoder)


# new weights


@pytest.mark.parametrize("shape", [DENSE, EXPERTS, replace(DENSE, extra=3, extra_bias=True)])
@pytest.mark.usefixtures("poison")
def test_new_weights_are_those_of_the_seed_in_any_memory(shape: ModelShape) -> None:
    built, empty = Decoder(shape).initialise(7), Decoder.empty(shape, torch.float32, "cpu")
    assert_equal(empty.initialise(7), built)
    drawn = torch.randn(11, 8, generator=torch.Generator().manual_seed(7))
    scale = 1 / math.sqrt(8) if shape.tied else 1.0
    assert torch.equal(built.embed.weight[:11], drawn * scale)
    rounded = Decoder.empty(shape, torch.bfloat16, "cpu").initialise(7)
    assert_equal(rounded, built.bfloat16())


def test_models_without_memory_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: torch.Tensor, *_: object, **__: object) -> None:
        raise AssertionError("drawn on the meta device, which imports torch's compiler")

    for name in ("normal_", "uniform_"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    with without_memory():
        decoder = Decoder(EXPERTS)
    assert {parameter.device.type for parameter in decoder.parameters()} == {"meta"}


# progress


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("is_terminal", [False, True])
def test_only_long_loads_are_shown(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    line = LoadProgress("'a'", 20 * 10**9)
    for clock.now in (0.5, 1.9):
        line.advance(10**9)
    assert capsys.readouterr().err == ""
    for clock.now in (2.0, 4.0, 8.0, 12.5):
        line.advance(10**9)
    line.close()
    shown = capsys.readouterr().err
    assert shown.count("loading 'a'") == (4 if is_terminal else 2)
    assert "3.0 of 20.0 GB, 1.5 GB/s" in shown
    assert shown.endswith("\r\x1b[2K" if is_terminal else "\n")

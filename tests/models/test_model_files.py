"""Folders in and out: the name map, shards, configs, and the error of every broken folder."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from graft.models.decoder import Decoder
from graft.models.io import save
from graft.models.io.load import load_model, read_config
from graft.models.io.save import save_model, split_shards
from graft.models.io.tensor_names import hf_names, hf_rows
from graft.models.io.tensors import ModelFileError
from graft.models.shape import ModelShape, UnsupportedModel

SHAPE = ModelShape(
    family="qwen3", vocab_size=11, width=8, layers=2, heads=4, kv_heads=2, head_dim=6, ff=10
)
BIASED = ModelShape(
    family="llama",
    vocab_size=11,
    width=8,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=4,
    ff=10,
    tied=False,
    qk_norm=False,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
)


def random_decoder(shape: ModelShape = SHAPE, seed: int = 0) -> Decoder:
    decoder = Decoder(shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(generator=generator)
    return decoder


def assert_equal(one: Decoder, other: Decoder) -> None:
    assert one.shape == other.shape
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good model folder, for a test to break."""
    save_model(random_decoder(), tmp_path / "model", special={"eos_token_id": 3})
    return tmp_path / "model"


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# names


def test_names_are_views_of_the_fused_rows() -> None:
    decoder = random_decoder()
    names, ours = hf_names(decoder), decoder.state_dict()
    prefix = "model.layers.1.self_attn."
    qkv = ours["blocks.1.attention.qkv.weight"]  # 4 heads of 6, then 2 and 2 KV heads of 6
    assert torch.equal(names[prefix + "q_proj.weight"], qkv[:24])
    assert torch.equal(names[prefix + "k_proj.weight"], qkv[24:36])
    assert torch.equal(names[prefix + "v_proj.weight"], qkv[36:48])
    names["model.layers.1.mlp.up_proj.weight"].fill_(5.0)
    gate, up = ours["blocks.1.mlp.gate_up.weight"].chunk(2)
    assert (up == 5.0).all() and not (gate == 5.0).any()


@pytest.mark.parametrize("shape", [SHAPE, BIASED])
def test_names_cover_every_parameter_exactly_once(shape: ModelShape) -> None:
    decoder = random_decoder(shape)
    for view in hf_names(decoder).values():
        view.mul_(0)
        view.add_(1)  # a row named twice would still read 1, so its count is compared too
    assert all((parameter == 1).all() for parameter in decoder.parameters())
    named = sum(view.numel() for view in hf_names(decoder).values())
    assert named == sum(parameter.numel() for parameter in decoder.parameters())
    assert ("lm_head.weight" in hf_rows(shape)) is not shape.tied


# save and load


@pytest.mark.parametrize("shape", [SHAPE, BIASED])
@pytest.mark.parametrize("shard_bytes", [10**9, 500, 1])
def test_a_saved_model_comes_back_to_the_bit(
    shape: ModelShape, shard_bytes: int, tmp_path: Path
) -> None:
    decoder = random_decoder(shape)
    save_model(decoder, tmp_path, shard_bytes=shard_bytes)
    assert (tmp_path / "model.safetensors").exists() is (shard_bytes == 10**9)
    assert_equal(load_model(tmp_path), decoder)
    assert not list(tmp_path.glob("*.partial"))


def test_rope_scaling_survives_the_round_trip(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    shape = ModelShape(rope_theta=5e5, rope_scaling=scaling, layers=1, max_positions=256)
    save_model(Decoder(shape), tmp_path)
    assert load_model(tmp_path).shape == shape


def test_a_smaller_dtype_is_written_and_named(tmp_path: Path) -> None:
    decoder = random_decoder()
    save_model(decoder, tmp_path, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert decoder.dtype == torch.float32  # what is in memory keeps its precision
    assert_equal(load_model(tmp_path, dtype=torch.bfloat16), decoder.bfloat16())


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 60))
def test_shards_keep_order_and_size(sizes: list[int], limit: int) -> None:
    named = {str(i): size for i, size in enumerate(sizes)}
    shards = split_shards(named, limit)
    assert [name for shard in shards for name in shard] == list(named)
    totals = [sum(named[name] for name in shard) for shard in shards]
    assert all(
        total <= limit or len(shard) == 1 for total, shard in zip(totals, shards, strict=True)
    )
    # no shard could have taken the first tensor of the next
    for total, following in zip(totals, shards[1:], strict=False):
        assert total + named[following[0]] > limit


def test_saving_again_removes_the_weights_of_the_last_save(tmp_path: Path) -> None:
    first, second = random_decoder(seed=1), random_decoder(seed=2)
    save_model(first, tmp_path)
    save_model(second, tmp_path, shard_bytes=500)
    assert not (tmp_path / "model.safetensors").exists()
    assert_equal(load_model(tmp_path), second)
    save_model(first, tmp_path)
    assert sorted(file.name for file in tmp_path.glob("model*")) == ["model.safetensors"]
    assert_equal(load_model(tmp_path), first)


def test_the_index_holds_files_and_the_total_size(tmp_path: Path) -> None:
    decoder = random_decoder()
    save_model(decoder, tmp_path, shard_bytes=500)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    numbers = sum(parameter.numel() for parameter in decoder.parameters())
    assert index["metadata"]["total_size"] == 4 * numbers
    assert set(index["weight_map"]) == set(hf_names(decoder))
    shards = {file.name for file in tmp_path.glob("model-*.safetensors")}
    assert set(index["weight_map"].values()) == shards
    assert f"model-00001-of-{len(shards):05d}.safetensors" in shards


def test_special_ids_reach_both_configs_and_absent_ones_are_null(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["eos_token_id"] == 3
    assert config["bos_token_id"] is None and config["pad_token_id"] is None
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": 3}


def test_a_source_gives_the_config_what_the_shape_does_not_set(
    folder: Path, tmp_path: Path
) -> None:
    edit_config(
        folder,
        attention_dropout=0.25,
        quantization_config=None,
        auto_map={"AutoConfig": "code.py"},
        bos_token_id=1,
        vocab_size=99,
    )
    generation = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [3, 4]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_model(random_decoder(), tmp_path / "kept", source=folder)
    config = json.loads((tmp_path / "kept" / "config.json").read_text())
    assert config["attention_dropout"] == 0.25 and config["bos_token_id"] == 1
    assert config["vocab_size"] == 11  # from the shape
    assert "auto_map" not in config and "quantization_config" not in config
    kept = json.loads((tmp_path / "kept" / "generation_config.json").read_text())
    assert kept == generation  # the whole file, as it was

    save_model(random_decoder(), tmp_path / "new", source=folder, special={"eos_token_id": 7})
    assert json.loads((tmp_path / "new" / "config.json").read_text())["eos_token_id"] == [3, 7]
    extended = json.loads((tmp_path / "new" / "generation_config.json").read_text())
    assert extended == {**generation, "eos_token_id": [3, 4, 7]}


def test_wrong_arguments_to_save_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown entries \['eos'\]; known: bos_token_id, eos_"):
        save_model(random_decoder(), tmp_path, special={"eos": 3})
    with pytest.raises(ValueError, match="shard_bytes=0: must be 1 or more"):
        save_model(random_decoder(), tmp_path, shard_bytes=0)
    with pytest.raises(ModelFileError, match=r"source '.*nowhere' is not a folder"):
        save_model(random_decoder(), tmp_path, source=tmp_path / "nowhere")


# harmless extras


def test_rotary_buffers_and_a_tied_head_stored_twice_are_ignored(folder: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_weights(folder, add)
    assert_equal(load_model(folder), random_decoder())


def test_a_tied_head_that_differs_is_refused(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(11, 8)}))
    with pytest.raises(ModelFileError, match=r"lm_head.weight differs from model\.embed_tokens"):
        load_model(folder)


# broken folders


Spoil = Callable[[Path], object]


def config(text: str) -> Spoil:
    return lambda folder: (folder / "config.json").write_text(text)


def entries(**changes: Any) -> Spoil:
    return lambda folder: edit_config(folder, **changes)


def without(name: str, *instead: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        for other in instead:
            (folder / other).touch()

    return spoil


def weights(change: Callable[[bytes], bytes]) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return spoil


def norm_of(dtype: torch.dtype) -> Spoil:
    norm = {"model.norm.weight": torch.ones(8, dtype=dtype)}
    return lambda folder: edit_weights(folder, lambda tensors: tensors.update(norm))


def first_alone(folder: Path) -> None:
    edit_weights(folder, lambda tensors: [tensors.pop(name) for name in list(tensors)[1:]])


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
LONG_ROPE = {"rope_type": "longrope", "factor": 2.0}
BROKEN: list[tuple[Spoil, type[Exception], str]] = [
    (without("config.json"), ModelFileError, r"no config\.json"),
    (without("config.json", "tiny.gguf"), ModelFileError, r"tiny\.gguf"),
    (without("config.json", "config.yaml"), ModelFileError, "a run without a complete checkpoint"),
    (config('{"model_type": '), ModelFileError, r"config\.json' is not valid JSON"),
    (config("[1]"), ModelFileError, r"config\.json' holds a list"),
    (config('{"model_type": "llama", "num_attention_heads": 2}'), ModelFileError, "'vocab_size'"),
    (entries(model_type="mamba"), UnsupportedModel, r"config\.json'.*model_type 'mamba'"),
    (entries(use_sliding_window=True, max_window_layers=1), UnsupportedModel, "full attention"),
    (entries(hidden_act="gelu"), UnsupportedModel, "hidden_act='gelu'"),
    (entries(partial_rotary_factor=0.5), UnsupportedModel, r"partial_rotary_factor=0\.5"),
    (entries(rope_parameters=LONG_ROPE), UnsupportedModel, "rope_type='longrope'"),
    (entries(quantization_config={"quant_method": "awq"}), UnsupportedModel, "awq"),
    (first_alone, ModelFileError, "and 18 more"),  # 2 x 11 + 2 - 1 missing, 5 named
    (norm_of(torch.int8), UnsupportedModel, r"model\.norm\.weight in .* I8"),
    (weights(lambda data: data[:-4]), ModelFileError, "is not a whole safetensors file"),
    (weights(lambda data: POINTER), ModelFileError, "git-lfs"),
    (without("model.safetensors"), ModelFileError, r"config\.json, generation_config\.json$"),
    (without("model.safetensors", "pytorch_model.bin"), ModelFileError, r"pytorch_model\.bin"),
]


@pytest.mark.parametrize(("spoil", "kind", "words"), BROKEN, ids=[words for *_, words in BROKEN])
def test_a_broken_folder_is_refused_with_what_is_wrong(
    folder: Path, spoil: Spoil, kind: type[Exception], words: str
) -> None:
    spoil(folder)
    with pytest.raises(kind, match=words):
        load_model(folder)


def test_a_name_of_the_hub_a_file_and_nothing_are_no_folders(folder: Path) -> None:
    with pytest.raises(ModelFileError, match=r"'Qwen/Qwen3-0\.6B'.*hub\.find_model\("):
        load_model("Qwen/Qwen3-0.6B")
    with pytest.raises(ModelFileError, match=r"is a file; .*\.gguf"):
        load_model(folder / "model.safetensors")
    with pytest.raises(ModelFileError, match="no such folder or file"):
        read_config(folder / "nothing")


def test_a_full_disk_keeps_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(save, "save_file", full)
    with pytest.raises(OSError, match="could not write a") as stopped:
        save.save_tensors({}, tmp_path / "a")
    assert stopped.value.errno == errno.ENOSPC


def test_missing_unexpected_and_misshaped_tensors_are_all_named(folder: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.2.mlp.gate_proj.weight"] = torch.ones(10, 8)
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.ones(24, 8)

    edit_weights(folder, spoil)
    with pytest.raises(ModelFileError) as caught:
        load_model(folder)
    text = str(caught.value)
    assert "missing: model.norm.weight;" in text
    assert "unexpected: model.layers.2.mlp.gate_proj.weight;" in text
    k_proj = "model.layers.0.self_attn.k_proj.weight"
    assert f"of the wrong size: {k_proj} [24, 8], config says [12, 8]" in text


def test_shards_must_agree_with_their_index(tmp_path: Path) -> None:
    save_model(random_decoder(), tmp_path / "a", shard_bytes=2000)
    shards = sorted(file.name for file in (tmp_path / "a").glob("model-*"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / shards[1]).unlink()
    with pytest.raises(ModelFileError, match=f"{shards[1]}' is listed in .* finish the download"):
        load_model(tmp_path / "b")
    shutil.copy(tmp_path / "a" / shards[0], tmp_path / "b" / shards[1])
    with pytest.raises(ModelFileError, match=f"{shards[1]}' lacks model.*different downloads"):
        load_model(tmp_path / "b")

"""Weights in mxfp4 are unpacked as transformers unpacks them, and written in bfloat16."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graft.models.decoder import Decoder
from graft.models.io import mxfp4
from graft.models.io.load import load_model
from graft.models.io.mxfp4 import unpack_mxfp4
from graft.models.io.save import save_model
from graft.models.io.tensor_names import hf_names
from graft.models.io.tensors import ModelFileError
from graft.models.shape import UnsupportedModel
from tests.models.test_families import common, gpt_oss

WIDTH, FF, EXPERTS = 64, 32, 3
PACKED = {"gate_up_proj": (2 * FF, WIDTH), "down_proj": (WIDTH, FF)}


def packed(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, [EXPERTS, rows, columns // 32, 16], generator=generator)
    scales = torch.randint(118, 126, blocks.shape[:-1], generator=generator)
    return blocks.to(torch.uint8), scales.to(torch.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A gpt-oss with experts in mxfp4, the rest in bfloat16."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    draw = random.Random(1)
    entries = common(draw) | gpt_oss(draw) | {"hidden_size": WIDTH, "intermediate_size": FF}
    entries |= {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    config = AutoConfig.for_model("gpt_oss", **entries)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in list(tensors):
        if sizes := PACKED.get(name.rpartition(".")[2]):
            del tensors[name]
            pair = packed(*sizes, len(tensors))
            tensors |= {f"{name}_blocks": pair[0], f"{name}_scales": pair[1]}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    edit(tmp_path, {"quantization_config": {"quant_method": "mxfp4"}})
    return tmp_path


def edit(folder: Path, entries: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def test_the_worked_case() -> None:
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, :2] = torch.tensor([0x21, 0xF0])
    found = unpack_mxfp4(blocks, torch.tensor([[128]], dtype=torch.uint8))
    assert found.dtype == torch.bfloat16 and found.shape == (1, 32)
    assert found[0, :6].tolist() == [1, 2, 0, -12, 0, 0]


@pytest.mark.parametrize("chunk", [1, 100, mxfp4.CHUNK])
def test_numbers_are_transformers(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    monkeypatch.setattr(mxfp4, "CHUNK", chunk)
    blocks, scales = packed(6, 96, seed=3)
    scales.flatten()[:2] = torch.tensor([0, 254])  # the smallest and the largest
    wanted = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(unpack_mxfp4(blocks, scales).transpose(1, 2), wanted)


def test_a_folder_is_read_as_transformers_reads_it_and_written_in_bfloat16(
    folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    unpacked = Mxfp4Config(dequantize=True)
    wanted = AutoModelForCausalLM.from_pretrained(folder, quantization_config=unpacked)
    decoder = load_model(folder, dtype=torch.bfloat16)
    assert_equal(decoder, wanted)
    save_model(decoder, tmp_path / "ours", source=folder)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    assert_equal(decoder, again)


def assert_equal(decoder: Decoder, model: Any) -> None:
    theirs = model.state_dict()
    for name, tensor in hf_names(decoder).items():
        assert torch.equal(tensor, theirs[name].to(torch.bfloat16)), name


def test_scales_that_are_no_numbers_or_missing_are_refused(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file, name = folder / "model.safetensors", "model.layers.0.mlp.experts.down_proj_scales"
    tensors = load_file(file)
    save_file(tensors | {name: torch.full_like(tensors[name], 255)}, file)
    with pytest.raises(ModelFileError, match=name.removesuffix("_scales")):
        load_model(folder)
    save_file(tensors | {name: tensors[name].to(torch.int16)}, file)
    with pytest.raises(UnsupportedModel, match="I16"):
        load_model(folder)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ModelFileError, match="down_proj_blocks"):
        load_model(folder)


def test_other_quantised_weights_are_refused(folder: Path) -> None:
    edit(folder, {"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(UnsupportedModel, match="fp8"):
        load_model(folder)

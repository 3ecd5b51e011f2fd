"""Folders of Qwen3.5 as they are published: the text part of a model that also reads pictures."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import CPU, common, deltas, deltas_with_experts
from torch import Tensor

from graft.models.decoder import Decoder, causal
from graft.models.families.table import read_shape, why_not_native
from graft.models.families.text_part import text_part
from graft.models.io import stored_names
from graft.models.io.export import open_source
from graft.models.io.load import load_model, open_model
from graft.models.io.save import save_model
from graft.models.io.stored_names import stem_of
from graft.models.io.tensor_names import hf_names
from graft.models.io.tensors import ModelFileError
from graft.models.shape import UnsupportedModel

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_position_embeddings": 16,
}
TOKENS_T = torch.arange(40) % 37
FURTHER = {"mtp.fc.weight": torch.ones(4, 8), "mtp.layers.0.mlp.gate.weight": torch.ones(2, 4)}


def peer(number: int, has_experts: bool) -> Any:
    """A random model that reads pictures and texts."""
    import transformers

    draw = random.Random(f"{number} {has_experts}")
    own = deltas_with_experts(draw) if has_experts else deltas(draw)
    text = common(draw) | own
    text["rope_parameters"] |= {
        "mrope_section": draw.choice([[1, 1, 0], [2, 1, 1]]),
        "mrope_interleaved": True,
        "partial_rotary_factor": text.pop("partial_rotary_factor"),
    }
    name = "Qwen3_5Moe" if has_experts else "Qwen3_5"
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config=VISION | {"out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=text["tie_word_embeddings"],
        **{f"{kind}_token_id": 47 + i for i, kind in enumerate(("image", "video"))},
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25, generator=generator)
    return model


def fuse(tensors: dict[str, Tensor], text: dict[str, Any]) -> dict[str, Tensor]:
    """The matrices of the experts of a layer in two tensors, as in the published folders."""
    fused = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for layer in range(text["num_hidden_layers"]):
        start = f"model.language_model.layers.{layer}.mlp.experts"

        def all_of(*names: str, start: str = start) -> Tensor:
            return torch.stack(
                [
                    torch.cat([tensors[f"{start}.{i}.{name}_proj.weight"] for name in names])
                    for i in range(text["num_experts"])
                ]
            )

        fused[f"{start}.gate_up_proj"] = all_of("gate", "up")
        fused[f"{start}.down_proj"] = all_of("down")
    return fused


def logits_of(decoder: Decoder) -> Tensor:
    return decoder.logits(decoder(TOKENS_T, torch.arange(len(TOKENS_T)), causal))


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("kind", ["dense", "split", "fused"])
def test_the_text_part_computes_what_the_whole_model_does(
    kind: str, number: int, tmp_path: Path
) -> None:
    """From a folder with further layers, and once more from what is saved of it."""
    from transformers import AutoModelForCausalLM

    model = peer(number, has_experts=kind != "dense")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in tensors)
    assert all(name.startswith(("model.", "lm_head.")) for name in tensors)
    if kind == "fused":
        tensors = fuse(tensors, model.config.text_config.to_dict())
    save_file(tensors | FURTHER, tmp_path / "model.safetensors")
    theirs_TV = model(TOKENS_T[None]).logits[0]

    decoder = load_model(tmp_path)
    torch.testing.assert_close(logits_of(decoder), theirs_TV, atol=2e-4, rtol=2e-4)
    with open_source(tmp_path) as stored:
        assert set(stored.sizes) == set(hf_names(decoder))
        for name, tensor in hf_names(decoder).items():
            assert torch.equal(stored.read(name), tensor), name

    save_model(decoder, tmp_path / "ours", source=tmp_path)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["model_type"] == model.config.text_config.model_type
    assert not {"text_config", "vision_config", "image_token_id"} & set(config)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again).__name__.endswith("ForCausalLM")
    torch.testing.assert_close(again(TOKENS_T[None]).logits[0], theirs_TV, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits_of(load_model(tmp_path / "ours")), logits_of(decoder))


def test_what_is_left_out_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    peer(0, has_experts=False).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | FURTHER, tmp_path / "model.safetensors")
    num_visual = sum(name.startswith("model.visual.") for name in tensors)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            load_model(tmp_path)
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"{num_visual + 2} tensors" in said and "model.visual" in said and "mtp" in said


def test_names_of_what_is_left_out() -> None:
    names = "model.visual.blocks.0.norm1.weight", "mtp.norm.weight", "model.layers.46.enorm.weight"
    assert [stem_of(name) for name in names] == ["model.visual", "mtp", "model.layers.46"]


def test_further_layers_of_qwen3_next_are_left_out(tmp_path: Path) -> None:
    from test_families import peer as text_peer

    model = text_peer("qwen3_next", 0)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(name.endswith("mlp.experts.1.up_proj.weight") for name in tensors)
    save_file(tensors | FURTHER, tmp_path / "model.safetensors")
    theirs_TV = model(TOKENS_T[None]).logits[0]
    torch.testing.assert_close(logits_of(load_model(tmp_path)), theirs_TV, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("family", "number", "prefix", "matrix"),
    [
        ("lfm2_moe", 3, "model", "feed_forward.experts.1.w3.weight"),
        ("nemotron_h", 2, "backbone", "mixer.experts.1.up_proj.weight"),
    ],
)
def test_fused_experts_are_split_under_their_familys_names(
    family: str, number: int, prefix: str, matrix: str, tmp_path: Path
) -> None:
    from test_families import peer as text_peer

    model = text_peer(family, number)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    split = {name: tensor for name, tensor in stored.items() if ".experts." in name}
    fused = {
        f"{prefix}.{name}": parameter.detach().clone()
        for name, parameter in model.model.named_parameters()
        if ".experts." in name
    }
    assert fused and any(name.endswith(matrix) for name in split)
    wanted = hf_names(load_model(tmp_path))
    others = {name: tensor for name, tensor in stored.items() if name not in split}
    save_file(others | fused, tmp_path / "model.safetensors")
    for name, tensor in hf_names(load_model(tmp_path)).items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize(
    ("beside", "inside", "tied"),
    [(True, True, True), (True, False, True), (False, True, False), (None, True, True)],
)
def test_the_whole_model_decides_whether_the_head_is_tied(
    beside: bool | None, inside: bool, tied: bool
) -> None:
    whole = {"model_type": "qwen3_5", "text_config": {"tie_word_embeddings": inside}}
    config = text_part(whole if beside is None else whole | {"tie_word_embeddings": beside})
    assert config == {"model_type": "qwen3_5_text", "tie_word_embeddings": tied}


def test_the_rules_for_entries_hold_for_the_text_part() -> None:
    config = peer(0, has_experts=False).config.to_dict()
    assert read_shape(config).family == "qwen3_5_text" and not why_not_native(config, CPU)
    for changes in ({"quantization_config": {"quant_method": "fp8"}}, {"is_causal": False}):
        (entry,) = changes
        for whole in (config | changes, config | {"text_config": config["text_config"] | changes}):
            with pytest.raises(UnsupportedModel, match=entry):
                read_shape(whole)
    with pytest.raises(UnsupportedModel, match="text_config=None"):
        read_shape(config | {"text_config": None})


def test_a_tensor_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    peer(0, has_experts=False).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "language_model.norm.weight"
    twice = tensors | {"model.norm.weight": tensors[f"model.{name}"].clone()}
    save_file(twice, tmp_path / "model.safetensors")
    with (
        pytest.raises(ModelFileError, match=f"model.norm.weight twice.*{name}"),
        open_model(tmp_path),
    ):
        pass


def test_experts_of_another_size_are_named(tmp_path: Path) -> None:
    model = peer(1, has_experts=True)
    model.save_pretrained(tmp_path)
    tensors = fuse(load_file(tmp_path / "model.safetensors"), model.config.text_config.to_dict())
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"experts\.0\.down_proj\.weight"):
        load_model(tmp_path)


@pytest.mark.parametrize("fault", ["odd rows", "more experts", "no rows"])
def test_experts_in_one_tensor_are_those_of_the_config(fault: str, tmp_path: Path) -> None:
    """A last row of neither matrix would be lost; a size of millions beside an empty one costs no byte."""
    model = peer(1, has_experts=True)
    model.save_pretrained(tmp_path)
    tensors = fuse(load_file(tmp_path / "model.safetensors"), model.config.text_config.to_dict())
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    whole = tensors[name]
    tensors[name] = {
        "odd rows": torch.cat([whole, whole[:, :1]], dim=1),
        "more experts": torch.cat([whole, whole[:1]]),
        "no rows": torch.zeros(1 << 40, 0, whole.shape[2]),
    }[fault]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=name):
        load_model(tmp_path)


def test_prefixes_are_those_of_transformers() -> None:
    from transformers import Qwen3_5ForCausalLM

    ignored = Qwen3_5ForCausalLM._keys_to_ignore_on_load_unexpected
    assert ignored == [r"^mtp.*", r"^model.visual.*"]
    assert stored_names.OTHERS.match("model.visual.x") and stored_names.OTHERS.match("mtp.x")

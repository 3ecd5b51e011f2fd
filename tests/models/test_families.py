"""Every family computes what transformers computes: logits and gradients of 30 random configs, in fp32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graft.models.decoder import Decoder, causal
from graft.models.families.table import FAMILIES, config_of, read_shape
from graft.models.io.load import load_model
from graft.models.io.save import save_model

CONFIGS = range(30)
VOCABULARY, LENGTH = 53, 24


def common(draw: random.Random) -> dict[str, Any]:
    """Sizes that every family has."""
    kv_heads = draw.choice([1, 2, 3])
    heads = kv_heads * draw.choice([1, 2, 3])
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * draw.choice([4, 8]),
        "intermediate_size": draw.choice([20, 32]),
        "num_hidden_layers": draw.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": draw.choice([4, 8, 12]),
        "max_position_embeddings": 128,
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": draw.choice([1e-5, 1e-6]),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice([100.0, 10_000.0])},
    }


def biased(draw: random.Random) -> dict[str, Any]:
    return {"attention_bias": draw.random() < 0.5, "mlp_bias": draw.random() < 0.5}


def softmax_experts(draw: random.Random) -> dict[str, Any]:
    count = draw.choice([2, 5, 8])
    return {
        "attention_bias": draw.random() < 0.5,
        "num_experts": count,
        "num_experts_per_tok": draw.randint(1, count),
        "moe_intermediate_size": draw.choice([8, 12]),
        "norm_topk_prob": draw.random() < 0.5,
        "mlp_only_layers": draw.choice([[], [0]]),
        "decoder_sparse_step": draw.choice([1, 2]),
    }


OWN = {
    "llama": biased,
    "qwen2": lambda draw: {},
    "qwen3": lambda draw: {"attention_bias": draw.random() < 0.5},
    "qwen3_moe": softmax_experts,
}
"""The entries of each family, drawn at random."""


def peer(family: str, number: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    draw = random.Random(f"{family} {number}")
    config = AutoConfig.for_model(family, **common(draw) | OWN[family](draw))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
    return model


def gradients_by_name(decoder: Decoder) -> dict[str, Tensor]:
    """Gradients under the names that transformers' modules have: experts as one tensor each."""
    from graft.models.io.tensor_names import hf_rows

    found: dict[str, Tensor] = {}
    parameters = dict(decoder.named_parameters())
    for name, where in hf_rows(decoder.shape).items():
        grad = parameters[where.parameter].grad
        assert grad is not None, name
        before, is_expert, after = name.partition(".experts.")
        if is_expert:
            kind = after.split(".")[1]
            joined = "down_proj" if kind == "down_proj" else "gate_up_proj"
            experts = decoder.shape.experts
            assert experts is not None
            found[f"{before}.experts.{joined}"] = grad.unflatten(0, (experts.count, -1))
        else:
            found[name] = grad[where.start : where.stop]
    return found


def test_every_family_is_drawn() -> None:
    assert set(OWN) == set(FAMILIES)


@pytest.mark.parametrize("number", CONFIGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_transformers(family: str, number: int, tmp_path: Path) -> None:
    model = peer(family, number)
    model.save_pretrained(tmp_path)
    decoder = load_model(tmp_path)
    assert read_shape(config_of(decoder.shape)) == decoder.shape

    generator = torch.Generator().manual_seed(number)
    tokens_T = torch.randint(0, VOCABULARY, [LENGTH], generator=generator)
    weight_TV = torch.randn(LENGTH, VOCABULARY, generator=generator)
    theirs_TV = model(tokens_T[None]).logits[0]
    ours_TV = decoder.logits(decoder(tokens_T, torch.arange(LENGTH), causal))
    torch.testing.assert_close(ours_TV, theirs_TV, atol=2e-4, rtol=2e-4)

    (theirs_TV.log_softmax(-1) * weight_TV).sum().backward()
    (ours_TV.log_softmax(-1) * weight_TV).sum().backward()
    ours = gradients_by_name(decoder)
    for name, parameter in model.named_parameters():
        scale = float(parameter.grad.abs().max()) + 0.02  # some are 0 but for rounding
        torch.testing.assert_close(ours[name], parameter.grad, atol=2e-4 * scale, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_files_load_in_transformers_to_the_bit(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = peer(family, 0)
    model.save_pretrained(tmp_path / "theirs")
    save_model(load_model(tmp_path / "theirs"), tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for name, parameter in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], parameter), name

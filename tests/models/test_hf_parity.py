"""Our decoder computes what transformers computes, from transformers' own files and into them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graft.models.decoder import Decoder, causal
from graft.models.io.load import load_model
from graft.models.io.save import save_model
from graft.models.io.tensor_names import hf_names

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, every head its own": ("llama", {"num_key_value_heads": 4}),
    "llama, wide heads": ("llama", {"head_dim": 12}),
    "llama, attention_bias": ("llama", {"attention_bias": True}),
    "llama, mlp_bias": ("llama", {"mlp_bias": True}),
    "llama, rope linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5}},
    ),
    "llama, rope llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, rope yarn": ("llama", {"rope_parameters": YARN}),
    "llama, rope yarn, all set": (
        "llama",  # a window in which the ramp begins and ends between two pairs
        {
            "head_dim": 32,
            "max_position_embeddings": 16_384,
            "rope_parameters": YARN
            | {"original_max_position_embeddings": 4096, "beta_fast": 16.0, "beta_slow": 2.0}
            | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2, tied, rope yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, head size by default": ("qwen3", {}),
    "qwen3, tied, attention_bias": (
        "qwen3",
        {"head_dim": 6, "attention_bias": True, "tie_word_embeddings": True},
    ),
}


def peer(case: str) -> Any:
    """A transformers model, every parameter random: unit norms and zero biases prove nothing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, changes = CASES[case]
    config = AutoConfig.for_model(family, **(SMALL | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model


def tokens(length: int = 160) -> Tensor:
    return torch.randint(0, 61, [length], generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def our_logits(decoder: Decoder, tokens_T: Tensor) -> Tensor:
    hidden_TD = decoder(tokens_T, torch.arange(len(tokens_T)), causal)
    return hidden_TD @ decoder.head_weight.T


@torch.no_grad()
def peer_logits(model: Any, tokens_T: Tensor) -> Tensor:
    return model(tokens_T[None]).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_in_both_directions(case: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, tokens_T = peer(case), tokens()
    model.save_pretrained(tmp_path / "theirs")
    decoder = load_model(tmp_path / "theirs")
    want_TV = peer_logits(model, tokens_T)
    torch.testing.assert_close(our_logits(decoder, tokens_T), want_TV, atol=1e-5, rtol=1e-5)

    save_model(decoder, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert again.dtype == torch.float32
    torch.testing.assert_close(peer_logits(again, tokens_T), want_TV, atol=0, rtol=0)


def test_positions_far_into_the_window_still_agree(tmp_path: Path) -> None:
    model, tokens_T = peer("qwen3"), tokens()
    model.save_pretrained(tmp_path)
    decoder = load_model(tmp_path)
    positions_T = torch.arange(160) * 200  # up to 31,800
    with torch.no_grad():
        want_TV = model(tokens_T[None], position_ids=positions_T[None]).logits[0]
        seen_TV = decoder(tokens_T, positions_T, causal) @ decoder.head_weight.T
    torch.testing.assert_close(seen_TV, want_TV, atol=1e-5, rtol=1e-5)


def test_what_a_short_config_leaves_out_is_transformers_default(tmp_path: Path) -> None:
    model = peer("qwen3, head size by default")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("head_dim", "rope_parameters", "rms_norm_eps", "attention_bias", "hidden_act"):
        del config[name]
    config["mlp_bias"] = True  # Qwen3 has no such switch, and transformers ignores it
    (tmp_path / "config.json").write_text(json.dumps(config))
    decoder = load_model(tmp_path)
    assert decoder.shape.head_dim == 128
    torch.testing.assert_close(
        our_logits(decoder, tokens()), peer_logits(model, tokens()), atol=1e-5, rtol=1e-5
    )


def test_a_config_in_the_older_format_is_read_alike(tmp_path: Path) -> None:
    """rope_theta and rope_scaling beside each other, scaling named by `type`; torch_dtype."""
    model = peer("llama, rope linear")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.5}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    seen_TV = our_logits(load_model(tmp_path), tokens())
    torch.testing.assert_close(seen_TV, peer_logits(model, tokens()), atol=1e-5, rtol=1e-5)


def test_half_precision_files_are_read_as_fp32_without_a_rounding(tmp_path: Path) -> None:
    model = peer("qwen2").bfloat16()
    model.save_pretrained(tmp_path)
    decoder = load_model(tmp_path)
    assert decoder.dtype == torch.float32
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(hf_names(decoder)[name], parameter.float(), atol=0, rtol=0)


def test_shards_by_transformers_are_read(tmp_path: Path) -> None:
    model = peer("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    seen_TV = our_logits(load_model(tmp_path), tokens())
    torch.testing.assert_close(seen_TV, peer_logits(model, tokens()), atol=1e-5, rtol=1e-5)


def test_shards_by_us_are_read_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = peer("llama, attention_bias")
    model.save_pretrained(tmp_path / "theirs")
    save_model(load_model(tmp_path / "theirs"), tmp_path / "ours", shard_bytes=10_000)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(
        peer_logits(again, tokens()), peer_logits(model, tokens()), atol=0, rtol=0
    )

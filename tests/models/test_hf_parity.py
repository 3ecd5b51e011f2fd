"""Our decoder computes what transformers computes, from transformers' own files and into them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graft.config import Config, ConfigError
from graft.models.decoder import Decoder, causal
from graft.models.families.table import FAMILIES
from graft.models.io.load import load_model
from graft.models.io.save import save_model
from graft.models.io.tensor_names import hf_names
from graft.models.shape import UnsupportedModel
from graft.text.tokenizer import FastTokenizer
from graft.train.model import new_shape

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


RECIPES: dict[str, dict[str, Any]] = {
    **{f"{name} alone": {"family": name} for name in FAMILIES if not FAMILIES[name].has_experts},
    "qwen3_moe": {"family": "qwen3_moe", "experts": {"count": 5, "top_k": 2, "ff": 16}},
    "qwen3_moe, a plain layer": {
        "family": "qwen3_moe",
        "experts": {"count": 4, "top_k": 2, "ff": 16, "renormalise": True},
        "dense_layers": [0],
    },
    "llama, biases": {"family": "llama", "qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "qwen2, own head": {"family": "qwen2", "tied": False, "head_dim": 12},
    "qwen3, biases": {"family": "qwen3", "qkv_bias": True, "out_bias": True},
    "no family": {"rope_theta": 500, "rope_scaling": {"rope_type": "linear", "factor": 2}},
}


def config_with(shape: dict[str, Any]) -> Config:
    small = {"width": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ff": 48, "max_positions": 256}
    return Config(model={"shape": small | shape, "alphabet": "bytes"}, task={"env": "calculator"})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RECIPES)
def test_a_shape_of_a_recipe_is_saved_as_what_graft_and_transformers_load(
    name: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    decoder = Decoder(new_shape(config_with(RECIPES[name]), FastTokenizer.bytes())).initialise(3)
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():  # new biases are zero, new norms one
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=numbers))
    save_model(decoder, tmp_path)
    want_TV = our_logits(decoder, tokens())
    torch.testing.assert_close(our_logits(load_model(tmp_path), tokens()), want_TV, atol=0, rtol=0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    # an entry that is read otherwise moves logits by tenths; a delta rule in fp32 rounds by up to 5e-4
    torch.testing.assert_close(peer_logits(theirs, tokens()), want_TV, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "qk_norm", True),
        ("llama", "qkv_bias", True),  # without out_bias
        ("qwen2", "qk_norm", True),
        ("qwen2", "qkv_bias", False),
        ("qwen2", "mlp_bias", True),
        ("qwen3", "qk_norm", False),
        ("qwen3", "mlp_bias", True),
    ],
)
def test_a_shape_that_its_family_cannot_describe_is_refused_before_training_and_saving(
    family: str, key: str, value: bool, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"model\.shape: (\w+)=.*{family!r}"):
        new_shape(config_with({"family": family, key: value}), FastTokenizer.bytes())
    shape = new_shape(config_with({"family": family}), FastTokenizer.bytes())
    with pytest.raises(UnsupportedModel, match=rf"config\.json of the family {family!r}"):
        save_model(Decoder(replace(shape, **{key: value})), tmp_path)
    assert not (tmp_path / "config.json").exists()


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

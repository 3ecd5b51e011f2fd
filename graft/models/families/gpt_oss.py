"""gpt-oss: windows in every other layer, attention sinks, experts with biases and a clamped gate; its
weights may be stored in mxfp4 (`io/mxfp4.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graft.models.families.entries import (
    layer_types_of,
    read_count,
    read_number,
    read_switch,
    read_windows,
    wrong_entry,
)
from graft.models.families.family import Config, Family
from graft.models.shape import Experts, ModelShape

WINDOW, THETA = 128, 150_000.0
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEFAULTS = {"head_dim": 64, "num_key_value_heads": 8, "rope_theta": THETA}
# a softmax over the logits of the chosen experts is that over all, renormalised
EXPERTS: dict[str, Any] = {"renormalise": True, "biased": True}
LIMIT, ALPHA = 7.0, 1.702


def prepare(config: Config) -> Config:
    """The defaults of this family, without entries that `read` reads and weights that loading unpacks."""
    others = {name: value for name, value in config.items() if name != "layer_types"}
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        others["rope_scaling"] = YARN
    how = config.get("quantization_config")
    if isinstance(how, Mapping) and how.get("quant_method") == "mxfp4":
        del others["quantization_config"]
    return {**DEFAULTS, **others}


def read(config: Config) -> dict[str, Any]:
    is_biased = read_switch(config, "attention_bias", True)
    limit = float(read_number(config, "swiglu_limit", LIMIT))
    if not limit:
        raise wrong_entry("swiglu_limit", limit, "need a number above 0")
    # transformers reads either name
    count = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return {
        "windows": read_windows(config, WINDOW, every=2),
        "sinks": True,
        "qk_norm": False,
        "qkv_bias": is_biased,
        "out_bias": is_biased,
        "experts": Experts(
            count=read_count(config, count, 128),
            top_k=read_count(config, "num_experts_per_tok", 4),
            ff=read_count(config, "intermediate_size"),
            swiglu_limit=limit,
            swiglu_alpha=float(read_number(config, "swiglu_alpha", ALPHA)),
            **EXPERTS,
        ),
    }


def write(shape: ModelShape) -> dict[str, Any]:
    experts = shape.experts
    assert experts is not None
    return {
        "attention_bias": shape.qkv_bias,
        "layer_types": layer_types_of(shape),
        "sliding_window": max(shape.windows, default=0) or WINDOW,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "swiglu_limit": experts.swiglu_limit,
        "swiglu_alpha": experts.swiglu_alpha,
    }


FAMILY = Family(
    read,
    write,
    prepare=prepare,
    has_experts=True,
    experts={**EXPERTS, "swiglu_limit": LIMIT},
    ff_is_of_experts=True,
    norm_eps=1e-5,
    positions=131_072,
    switches={"qk_norm": False, "qkv_bias": True, "out_bias": True, "sinks": True},
)

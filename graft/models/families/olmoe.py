"""OLMoE: a softmax router, experts in every layer, norms of queries and keys over all heads together."""

from __future__ import annotations

from typing import Any

from graft.models.families.entries import read_count, read_switch, refuse_window, wrong_entry
from graft.models.families.family import Config, Family
from graft.models.shape import Experts, ModelShape

POSITIONS = 4096


def read(config: Config) -> dict[str, Any]:
    refuse_window(config, POSITIONS)
    if config.get("clip_qkv") is not None:
        why = "queries, keys and values are not clipped"
        raise wrong_entry("clip_qkv", config["clip_qkv"], why)
    width, heads = read_count(config, "hidden_size"), read_count(config, "num_attention_heads")
    head_dim = read_count(config, "head_dim", width // heads)
    if head_dim * heads != width:
        raise wrong_entry(
            "head_dim", head_dim, f"{heads} heads must have a width of {width} together"
        )
    # transformers reads either name
    count = "num_local_experts" if "num_local_experts" in config else "num_experts"
    is_biased = read_switch(config, "attention_bias")
    return {
        "qk_norm": True,
        "joint_norm": True,
        "qkv_bias": is_biased,
        "out_bias": is_biased,
        "experts": Experts(
            count=read_count(config, count, 64),
            top_k=read_count(config, "num_experts_per_tok", 8),
            ff=read_count(config, "intermediate_size"),
            renormalise=read_switch(config, "norm_topk_prob"),
        ),
    }


def write(shape: ModelShape) -> dict[str, Any]:
    experts = shape.experts
    assert experts is not None
    return {
        "attention_bias": shape.qkv_bias,
        "clip_qkv": None,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.renormalise,
    }


FAMILY = Family(
    read,
    write,
    has_experts=True,
    ff_is_of_experts=True,
    norm_eps=1e-5,
    positions=POSITIONS,
    switches={"joint_norm": True},
)

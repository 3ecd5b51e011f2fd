"""Granite with experts (3.0 1B-A400M, 3B-A800M): factors on embeddings, scores, sublayers and logits."""

from __future__ import annotations

import math
from typing import Any

from graft.models.families.entries import (
    read_count,
    read_number,
    read_switch,
    refuse_window,
    wrong_entry,
)
from graft.models.families.family import Config, Family
from graft.models.shape import Experts, ModelShape

POSITIONS = 2048
MULTIPLIERS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logits_divisor",
}
SCORES = "attention_multiplier"
ROUTER: dict[str, Any] = {"renormalise": True}
"""Granite's softmax over the logits of the chosen experts is that over all, renormalised."""


def prepare(config: Config) -> Config:
    taken = (*MULTIPLIERS, SCORES)
    return {name: value for name, value in config.items() if name not in taken}


def read_common(config: Config) -> dict[str, Any]:
    """What every family of Granite has."""
    refuse_window(config, POSITIONS)
    is_biased = read_switch(config, "attention_bias")
    return {
        **{ours: _read_factor(config, name) for name, ours in MULTIPLIERS.items()},
        "query_scale": _query_scale(_read_factor(config, SCORES), _head_dim(config)),
        "qk_norm": False,
        "qkv_bias": is_biased,
        "out_bias": is_biased,
    }


def read_experts(config: Config, **more: Any) -> Experts:
    return Experts(
        count=read_count(config, "num_local_experts", 8),
        top_k=read_count(config, "num_experts_per_tok", 2),
        ff=read_count(config, "intermediate_size"),
        **ROUTER,
        **more,
    )


def read(config: Config) -> dict[str, Any]:
    return {**read_common(config), "experts": read_experts(config)}


def _read_factor(config: Config, name: str) -> float:
    factor = float(read_number(config, name, 1.0))
    if not factor:
        raise wrong_entry(name, factor, "need a number above 0")
    return factor


def _head_dim(config: Config) -> int:
    width, heads = read_count(config, "hidden_size"), read_count(config, "num_attention_heads")
    return read_count(config, "head_dim", width // heads)


def _query_scale(multiplier: float, head_dim: int) -> float:
    """The factor beside 1 / sqrt(head_dim), without the last digits, so that it survives both ways."""
    return float(f"{multiplier * math.sqrt(head_dim):.14g}")


def write_common(shape: ModelShape) -> dict[str, Any]:
    exact = shape.query_scale / math.sqrt(shape.head_dim)
    short = float(f"{exact:.12g}")  # 0.0078125 rather than 0.007812499999999996
    is_same = _query_scale(short, shape.head_dim) == shape.query_scale
    return {
        **{name: getattr(shape, ours) for name, ours in MULTIPLIERS.items()},
        SCORES: short if is_same else exact,
        "attention_bias": shape.qkv_bias,
    }


def write(shape: ModelShape) -> dict[str, Any]:
    experts = shape.experts
    assert experts is not None
    return {
        **write_common(shape),
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
    }


FAMILY = Family(
    read,
    write,
    prepare=prepare,
    has_experts=True,
    experts=ROUTER,
    ff_is_of_experts=True,
    positions=POSITIONS,
    switches={"qk_norm": False},
)

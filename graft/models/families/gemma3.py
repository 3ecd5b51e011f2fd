"""Gemma 3, the text part: most layers see a window and have a rotation of their own, norms are around every
sublayer, the embedding is scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from graft.models.families.entries import (
    FULL,
    SLIDING,
    layer_types_of,
    read_count,
    read_switch,
    read_windows,
    wrong_entry,
)
from graft.models.families.family import Config, Family
from graft.models.shape import ModelShape, is_number

POSITIONS, HEAD_DIM, SCALAR, WINDOW = 131_072, 256, 256, 4096
THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
ACTIVATION = "gelu_pytorch_tanh"


def prepare(config: Config) -> Config:
    """The rotation of layers without a window, and entries that `read` reads taken out."""
    ropes = config.get("rope_parameters") or {}
    rope = dict(ropes.get(FULL) or {}) if isinstance(ropes, Mapping) else {}
    rope.setdefault("rope_theta", config.get("rope_theta") or THETA)
    rope |= config.get("rope_scaling") or {}
    taken = ("rope_scaling", "rope_theta", "layer_types", "query_pre_attn_scalar")
    others = {name: value for name, value in config.items() if name not in taken}
    defaults = {"tie_word_embeddings": True, "head_dim": HEAD_DIM}
    return {**defaults, **others, "rope_parameters": rope, "hidden_act": "silu"}


def read(config: Config) -> dict[str, Any]:
    activation = config.get("hidden_activation") or config.get("hidden_act") or ACTIVATION
    if activation != ACTIVATION:
        raise wrong_entry("hidden_activation", activation, f"only {ACTIVATION} is computed")
    is_biased = read_switch(config, "attention_bias")
    head_dim = read_count(config, "head_dim", HEAD_DIM)
    every = read_count(config, "sliding_window_pattern", 6)
    scalar = read_count(config, "query_pre_attn_scalar", SCALAR)
    return {
        "windows": read_windows(config, WINDOW, every),
        "local_theta": _read_local_theta(config),
        "query_scale": math.sqrt(head_dim / scalar),
        "activation": "gelu_tanh",
        "norm_offset": True,
        "sandwich": True,
        "scales_embedding": True,
        "qk_norm": True,
        "qkv_bias": is_biased,
        "out_bias": is_biased,
    }


def _read_local_theta(config: Config) -> float:
    ropes = config.get("rope_parameters") or {}
    rope = ropes.get(SLIDING) or {} if isinstance(ropes, Mapping) else {}
    if rope.get("rope_type", "default") != "default":
        raise wrong_entry("rope_parameters", rope, "layers with a window are rotated unscaled")
    theta = rope.get("rope_theta") or config.get("rope_local_base_freq") or LOCAL_THETA
    if not is_number(theta) or theta <= 0:
        raise wrong_entry("rope_local_base_freq", theta, "need a number above 0")
    return float(theta)


def write(shape: ModelShape) -> dict[str, Any]:
    full = {"rope_type": "default", **shape.rope_scaling, "rope_theta": shape.rope_theta}
    local = {"rope_type": "default", "rope_theta": shape.local_theta}
    return {
        "hidden_act": ACTIVATION,
        "hidden_activation": ACTIVATION,
        "attention_bias": shape.qkv_bias,
        "layer_types": layer_types_of(shape),
        "sliding_window": max(shape.windows, default=0) or WINDOW,
        "query_pre_attn_scalar": round(shape.head_dim / shape.query_scale**2),
        "rope_parameters": {FULL: full, SLIDING: local},
        "rope_local_base_freq": shape.local_theta,
    }


FAMILY = Family(
    read,
    write,
    prepare=prepare,
    positions=POSITIONS,
    switches={
        "local_theta": LOCAL_THETA,
        "activation": "gelu_tanh",
        "norm_offset": True,
        "sandwich": True,
        "scales_embedding": True,
    },
)

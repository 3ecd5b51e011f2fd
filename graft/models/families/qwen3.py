"""Qwen3: a norm on every head of q and k."""

from __future__ import annotations

from typing import Any

from graft.models.families.entries import read_count, read_switch, refuse_late_windows
from graft.models.families.family import Config, Family
from graft.models.shape import ModelShape


def read(config: Config) -> dict[str, Any]:
    refuse_late_windows(config)
    is_biased = read_switch(config, "attention_bias")
    # absent, the head size is 128 whatever the width; other families divide the width
    return {
        "qk_norm": True,
        "qkv_bias": is_biased,
        "out_bias": is_biased,
        "head_dim": read_count(config, "head_dim", 128),
    }


def write(shape: ModelShape) -> dict[str, Any]:
    return {"attention_bias": shape.qkv_bias}


FAMILY = Family(read, write)

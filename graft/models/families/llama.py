"""Llama, and all models that say so of themselves: no head norms, biases on request."""

from __future__ import annotations

from typing import Any

from graft.models.families.entries import read_switch, refuse_window
from graft.models.families.family import Config, Family
from graft.models.shape import ModelShape

POSITIONS = 2048


def read(config: Config) -> dict[str, Any]:
    refuse_window(config, POSITIONS)
    is_biased = read_switch(config, "attention_bias")
    return {
        "qk_norm": False,
        "qkv_bias": is_biased,
        "out_bias": is_biased,
        "mlp_bias": read_switch(config, "mlp_bias"),
    }


def write(shape: ModelShape) -> dict[str, Any]:
    return {"attention_bias": shape.qkv_bias, "mlp_bias": shape.mlp_bias}


FAMILY = Family(read, write, positions=POSITIONS, switches={"qk_norm": False})

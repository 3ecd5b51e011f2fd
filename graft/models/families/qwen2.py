"""Qwen2 and Qwen2.5: biases of q, k and v, and no others."""

from __future__ import annotations

from typing import Any

from graft.models.families.entries import read_switch, refuse_late_windows
from graft.models.families.family import Config, Family
from graft.models.shape import ModelShape


def read(config: Config) -> dict[str, Any]:
    refuse_late_windows(config)
    read_switch(config, "attention_bias")  # has no effect here, but must be a switch
    return {"qk_norm": False, "qkv_bias": True}


def write(shape: ModelShape) -> dict[str, Any]:
    return {}


FAMILY = Family(read, write, switches={"qk_norm": False, "qkv_bias": True})

"""Mistral: Llama without biases; older models have a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from graft.models.families.entries import read_count
from graft.models.families.family import Config, Family
from graft.models.shape import ModelShape

POSITIONS = 131_072


def read(config: Config) -> dict[str, Any]:
    window = config.get("sliding_window", 4096)  # a number or null: read with the common entries
    positions = read_count(config, "max_position_embeddings", POSITIONS)
    is_shorter = window is not None and window < positions
    layers = read_count(config, "num_hidden_layers")
    return {"qk_norm": False, "windows": (window,) * layers if is_shorter else ()}


def write(shape: ModelShape) -> dict[str, Any]:
    return {"sliding_window": shape.windows[0] if shape.windows else None}


FAMILY = Family(read, write, positions=POSITIONS, switches={"qk_norm": False})

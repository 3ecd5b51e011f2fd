"""Mistral: Llama without biases. A window shorter than the context is refused; newer models have none."""

from __future__ import annotations

from typing import Any

from graft.models.families.entries import read_count, wrong_entry
from graft.models.families.family import Config, Family
from graft.models.shape import ModelShape

POSITIONS = 131_072


def read(config: Config) -> dict[str, Any]:
    window = config.get("sliding_window", 4096)
    if window is not None and window < read_count(config, "max_position_embeddings", POSITIONS):
        raise wrong_entry("sliding_window", window, "only full attention is computed")
    return {"qk_norm": False}


def write(shape: ModelShape) -> dict[str, Any]:
    return {"sliding_window": None}


FAMILY = Family(read, write, positions=POSITIONS, switches={"qk_norm": False})

"""Ministral 8B: Mistral, with a window in some layers and all positions in the others."""

from __future__ import annotations

from typing import Any

from graft.models.families.entries import (
    SLIDING,
    layer_types_of,
    read_count,
    read_windows,
    wrong_entry,
)
from graft.models.families.family import Config, Family
from graft.models.shape import ModelShape

WINDOW, POSITIONS = 4096, 131_072


def prepare(config: Config) -> Config:
    """The config without the entry that `read` reads."""
    return {name: value for name, value in config.items() if name != "layer_types"}


def read(config: Config) -> dict[str, Any]:
    if config.get("sliding_window", WINDOW) is None:
        if SLIDING in (config.get("layer_types") or ()):
            raise wrong_entry("sliding_window", None, f"layers of {SLIDING} need a number")
        return {"qk_norm": False}
    # without layer_types all layers have the window: the first full one would be the one after the last
    after_last = read_count(config, "num_hidden_layers") + 1
    return {"qk_norm": False, "windows": read_windows(config, WINDOW, every=after_last)}


def write(shape: ModelShape) -> dict[str, Any]:
    return {
        "layer_types": layer_types_of(shape),
        # also without windows: transformers computes the mask of both kinds
        "sliding_window": max(shape.windows, default=0) or WINDOW,
    }


FAMILY = Family(read, write, prepare=prepare, positions=POSITIONS, switches={"qk_norm": False})

"""Run a whole recipe inside a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from graft.config import Config, load_config
from graft.train.monitor.display import Display
from graft.train.session import Session


def train_recipe(
    recipe: str | Mapping[str, Any] | Config,
    *overrides: str,
    quiet: bool = True,
    stream: TextIO | None = None,
) -> dict[str, Any]:
    """Run a recipe to its end, or resume one that was interrupted; returns its summary."""
    config = recipe if isinstance(recipe, Config) else load_config(recipe, overrides)
    with Display(config.train.steps, quiet=quiet, stream=stream) as display:
        return Session(config, display).train()

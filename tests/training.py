"""Run a whole recipe inside a test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from graft.config import Config, load_config
from graft.train.monitor.display import Display
from graft.train.session import Session

TIMED = ("time", "seconds", "per_second", "drafts")


def metrics_of(run: Path, phase: str = "") -> list[dict[str, Any]]:
    """What a run logged, of one phase or of all, without what a clock measured."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in line.items() if not any(word in name for word in TIMED)}
        for line in lines
        if phase in ("", line["phase"])
    ]


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

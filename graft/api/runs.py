"""Whole runs from Python: the recipe that `graft train` takes, and what it leaves behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from graft.api.policy import Policy, load
from graft.api.progress import is_watched, run_display
from graft.config import Config, ConfigError, load_config
from graft.signatures import explain_arguments
from graft.user_code import describe_value

Recipe = str | PathLike[str] | Mapping[str, Any] | Config
"""The name of a bundled recipe, a YAML file, a dict of sections, or what `graft.load_recipe` gives."""

SETTINGS = "settings of the recipe are 'train.lr=1e-4' or {'train.lr': 1e-4}"


@explain_arguments
@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run leaves: its folder, with checkpoints, metrics and episodes, and its summary."""

    folder: Path
    summary: dict[str, Any] = field(repr=False)
    """Held-out scores before and after, seconds, checkpoint, versions: summary.json."""

    @property
    def before(self) -> dict[str, float]:
        """Held-out scores before RL: sampled, greedy, tool_rate; {} where nothing was scored."""
        return self.summary.get("before", {})

    @property
    def after(self) -> dict[str, float]:
        """Held-out scores at the end."""
        return self.summary.get("after", {})

    def load(self, **options: Any) -> Policy:
        """Its newest checkpoint, with the options of `graft.load`."""
        return load(self.folder, **options)


@partial(explain_arguments, hint=SETTINGS)
def train(
    recipe: Recipe,
    *overrides: str | Mapping[str, Any],
    progress: bool | None = None,
    trust: bool = False,
) -> RunResult:
    """Run a recipe to its end, or resume one that was interrupted.

    >>> run = graft.train("quickstart", "train.steps=20", {"run.name": "short"})
    >>> run.summary["after"]["greedy"], run.folder
    >>> policy = run.load()

    Ctrl-C saves a checkpoint and raises KeyboardInterrupt; the same call resumes from there.

    recipe     a bundled name, a YAML file, or a dict: {"model": {...}, "task": {"env": "calculator"}}
    overrides  changes of single keys: "train.lr=1e-4", or {"train.lr": 1e-4}
    progress   None: in a terminal or a notebook; True or False: always, never
    trust      train from the config.yaml of a run that you did not start
    """
    return _run(recipe, overrides, progress, trust)


@partial(explain_arguments, hint=SETTINGS)
def sft(
    recipe: Recipe,
    *overrides: str | Mapping[str, Any],
    progress: bool | None = None,
    trust: bool = False,
) -> RunResult:
    """Run only the supervised part of a recipe: imitate sft.data, or the environment's demonstrations.

    >>> run = graft.sft({"model": {"path": "Qwen/Qwen3-0.6B"}, "sft": {"data": "chats.jsonl", "epochs": 1}})

    Arguments and result are those of `graft.train`.
    """
    return _run(recipe, [*overrides, "train.steps=0"], progress, trust)


def _texts(overrides: Any) -> list[str]:
    texts: list[str] = []
    for override in overrides:
        if isinstance(override, Mapping):
            texts += [f"{key}={json.dumps(value)}" for key, value in override.items()]
        elif isinstance(override, str):
            texts.append(override)
        else:
            raise ConfigError(
                f"an override is {describe_value(override)}; write 'train.lr=1e-4' or {{'train.lr': 1e-4}}"
            )
    return texts


def _run(recipe: Recipe, overrides: Any, progress: bool | None, trust: bool) -> RunResult:
    from graft.train.session import Session
    from graft.trust.ownership import settings_from

    shown = is_watched() if progress is None else progress
    recipe, texts = str(recipe) if isinstance(recipe, PathLike) else recipe, _texts(overrides)
    file = recipe if isinstance(recipe, str) else None
    with settings_from(file, trust, texts, is_trained=True):
        config = load_config(recipe, texts)
        with run_display(config.train.steps, shown) as display:
            if config.cluster.address:
                from graft.cluster.supervisor import train_on_cluster

                summary = train_on_cluster(config, display).summary
            else:
                summary = Session(config, display).train()
    return RunResult(Path(config.run.dir) / config.run.name, summary)

"""From Python what the command line does: `graft.train("quickstart", "train.lr=1e-4")`."""

from __future__ import annotations

from typing import Any, TextIO

from graft.config import Config, check, load_config


def train(
    recipe: str | Config, *overrides: str, quiet: bool = True, stream: TextIO | None = None
) -> dict[str, Any]:
    """Run a recipe to its end, or go on with one that was interrupted; returns its summary."""
    from graft.train.display import Display
    from graft.train.run import Session

    config = load_config(recipe, overrides) if isinstance(recipe, str) else recipe
    with Display(config.train.steps, quiet=quiet, stream=stream) as display:
        return Session(config, display).train()


def only_sft(config: Config) -> Config:
    """The same recipe without its RL phase."""
    if not config.sft.steps:
        from graft.config import ConfigError

        raise ConfigError("sft.steps is 0: this recipe has no supervised part; give sft.steps=N")
    values = config.model_dump()
    values["train"]["steps"] = 0
    return check(values)

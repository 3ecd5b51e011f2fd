"""Keyword arguments as the sections of a recipe: one check of values for both ways in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from graft.config import Config, ConfigError
from graft.recipe.problems import explain_problems


def settings(base: Config | None = None, **sections: Mapping[str, Any]) -> Config:
    """`base` with these values in it, each checked as in a recipe.

    settings(train={"lr": 1e-4}, rollout={"samples": 4}).train.lr -> 1e-4
    settings(train={"lr": -1})  -> ConfigError: lr=-1: input should be greater than 0
    """
    checked: dict[str, Any] = {}
    for name, values in sections.items():
        before = getattr(base, name).model_dump() if base is not None else {}
        kind: Any = type(Config.model_fields[name].default)
        try:
            checked[name] = kind.model_validate({**before, **values})
        except ValidationError as error:
            raise ConfigError(explain_problems(error, Config)) from error
    if base is not None:
        return base.model_copy(update=checked)
    return Config.model_construct(**checked)  # rules between sections are those of whole runs

"""The recipe to sample from a model with: that of its run, with another environment where one is given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from graft.config import Config, load_config
from graft.envs import find
from graft.evaluate.candidates import recipe_of, run_behind
from graft.recipe.admission import NOT_OF_ATTEMPTS


def recipe_for(model: str, recipe: str) -> str:
    """The file with the settings: the named recipe, or that of the model's run; "": there is none."""
    return recipe or recipe_of(run_behind(Path(model)) if model else None)


def config_for(model: str, env: str, recipe: str, overrides: Sequence[str]) -> Config:
    """The named recipe, or that of the model's run, with this environment ("": its own).

    Arguments of the recipe's environment are kept where the other one takes them, or where an override
    sets them.
    """
    if recipe := recipe_for(model, recipe):
        config = load_config(recipe, overrides, unused=NOT_OF_ATTEMPTS)
    else:
        plain = {"model": {"path": model or "none"}, "task": {"env": env}}
        config = load_config(plain, overrides, "overrides")
    if not env:
        return config
    for alone in config.of_each_env():
        if env == alone.task.label:
            return alone
    given = {text.partition("=")[0] for text in overrides}
    entry = find(env)
    taken = entry.parameters().keys() - entry.args.keys()
    kept = {
        f"task.{section}": {
            key: value
            for key, value in getattr(config.task, section).items()
            if {f"task.{section}", f"task.{section}.{key}"} & given or key in taken
        }
        for section in ("args", "eval_args")
    }
    return config.changed({"task.env": env, **kept})

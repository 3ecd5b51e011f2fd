"""The recipe to sample from a model with: that of its run, with another environment where one is given."""

from __future__ import annotations

from graft.config import Config
from graft.envs import find
from graft.evaluate.model_source import ModelSource


def config_for(model: ModelSource, env: str) -> Config:
    """The named recipe, or that of the model's run, with this environment ("": its own).

    Arguments of the recipe's environment are kept where the other one takes them, or where an override
    sets them.
    """
    config = model.load_config({"task": {"env": env}})
    if not env:
        return config
    for alone in config.of_each_env():
        if env == alone.task.label:
            return alone
    given = {text.partition("=")[0] for text in model.overrides}
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

"""Attempts of a trained policy at one task, for reading: `graft rollout`.

    rollout = attempt(ModelSource("runs/quickstart"), RolloutOptions(seed=3))
    rollout.episode      task, policy, env, policy, ...: the same path as in a run

The task is a held-out task of the run, numbered as in its evaluation, or a text of the user.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graft.config import Config, ConfigError
from graft.datagen.model_recipe import config_for
from graft.envs.own_task import own_task
from graft.evaluate.candidates import check_readable
from graft.evaluate.model_source import ModelSource
from graft.protocols import Env
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.rollout.options import RolloutOptions
from graft.train.build import build_run, sampling_of
from graft.train.model import sampling_only
from graft.train.run_dir.checkpoint import latest_model
from graft.train.tasks import held_out_task
from graft.types import Episode, Leaf, Task


@dataclass(frozen=True, slots=True)
class SingleRollout:
    """One task and the attempts at it: the leaves of `episode`."""

    episode: Episode
    model: Path
    env: str
    temperature: float
    is_graded: bool
    """False for the user's own task, which has no reward."""
    notes: list[str]

    @property
    def errors(self) -> list[str]:
        """Errors of failed attempts, each with its status."""
        return [self._error(leaf) for leaf in self.episode.leaves if not leaf.status.is_trainable]

    def to_json(self) -> dict[str, Any]:
        task = self.episode.task
        return {
            "model": str(self.model),
            "env": self.env,
            "temperature": self.temperature,
            "task": {"id": task.id, "prompt": list(task.prompt), "answer": task.answer},
            "attempts": [self._attempt(leaf) for leaf in self.episode.leaves],
        }

    def _attempt(self, leaf: Leaf) -> dict[str, Any]:
        spans = [
            {"context": context, "author": str(span.author), "text": span.text}
            for context, tip in enumerate(leaf.tips)
            for span in (self.episode.spans[index] for index in self.episode.walk(tip))
        ]
        broken = {} if leaf.status.is_trainable else {"error": self._error(leaf)}
        return {
            "reward": leaf.reward if self.is_graded else None,
            "status": str(leaf.status),
            **broken,
            "metrics": leaf.metrics,
            "spans": spans,
        }

    def _error(self, leaf: Leaf) -> str:
        info = self.episode.spans[leaf.tips[-1]].info
        return f"{leaf.status}: {info.get('error', 'no reason was recorded')}"


def attempt(
    model: ModelSource, options: RolloutOptions, *, env: str = "", text: str = ""
) -> SingleRollout:
    """Let a run's newest checkpoint, or another model, attempt one task.

    options   `seed` is the number of the held-out task
    env       empty: the run's own; of several the first
    text      a task of one's own instead of the held-out one
    """
    model = model.locate()
    with model.use_settings(env):
        config = _config(model, env)
        temperature = options.choose_temperature(sampling_of(config, held_out=True).temperature)
        weights = latest_model(model.path)
        check_readable(weights)
        components = build_run(sampling_only(config, weights), weights=weights)
        setup = components.held_out
        [item] = config.task.envs
        task = held_out_task(item, options.seed or 0)
        if text:
            make_env = setup.make_env

            def with_text(task: Task) -> Env:
                return own_task(make_env(task), text)

            # an environment that takes no text is refused before the engine samples
            with_text(task).close()
            task = replace(task, id=f"{item.label}:own:{text}")
            setup = replace(setup, make_env=with_text, reward=None)
        sampling = replace(setup.sampling, temperature=temperature)
        try:
            [episode] = collect(
                [task], replace(setup, sampling=sampling), independent(options.samples or 1)
            )
        finally:
            setup.engine.close()
        return SingleRollout(episode, weights, item.label, temperature, not text, components.notes)


def _config(model: ModelSource, env: str) -> Config:
    """The recipe of the run, or a model's with `env`."""
    if not env and not model.recipe_file:
        raise ConfigError(
            f"'{model.path}' has no config.yaml of a run, so the environment is unknown; give "
            "--env ID, as `graft envs` lists them"
        )
    config = config_for(model, env)
    if not config.task.env:
        raise ConfigError(
            f"the recipe of '{model.path}' has no environment (task.env); give --env ID, as `graft envs` "
            "lists them, or use `graft generate` for plain text"
        )
    return config.of_each_env()[0]

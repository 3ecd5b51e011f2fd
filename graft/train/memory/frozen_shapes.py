"""Frozen models beside the policy, as far as memory is concerned.

rollout.frozen     players of a game: weights and a KV pool of their own
agent.models       frozen models that agents ask: the same
distill.teacher    teachers in this process: weights
"""

from __future__ import annotations

from pathlib import Path

from graft.config import Config
from graft.models.io.load import read_config, shape_of
from graft.models.io.tensors import ModelFileError
from graft.models.shape import ModelShape
from graft.train.run_dir.checkpoint import latest_model
from graft.train.teachers.paths import REFERENCE, teacher_paths


def frozen_shapes(config: Config, policy: ModelShape) -> dict[str, ModelShape]:
    """The shapes of the frozen models of this process, by seat or path; on a cluster workers hold them."""
    if config.cluster.address:
        return {}
    frozen = config.rollout.frozen.items()
    seats = {seat: _shape_of(name, policy, "rollout.frozen") for seat, name in frozen}
    models = dict.fromkeys(config.agent.frozen.values())
    return seats | {name: _shape_of(name, policy, "agent.models") for name in models}


def teacher_shapes(config: Config, policy: ModelShape) -> dict[str, ModelShape]:
    """Their shapes; a model that several names share is loaded once."""
    paths = teacher_paths(config)
    first = {value: name for name, value in reversed(paths.items())}
    return {name: _shape_of(value, policy, "distill.teacher") for value, name in first.items()}


def _shape_of(name: str, policy: ModelShape, key: str) -> ModelShape:
    if name == REFERENCE:
        return policy
    try:
        path = latest_model(name, weights=False)
        return shape_of(read_config(path), path / "config.json")
    except ModelFileError as error:
        if not Path(name).exists():
            raise ModelFileError(
                f"{key}: there is no folder '{name}' in {Path.cwd()}, nor a run of that name; give a run, a "
                "checkpoint or a hub name. A recipe that names a run needs that run first"
            ) from error
        raise ModelFileError(f"{key}: {error}; give a run, a checkpoint or a hub name") from error

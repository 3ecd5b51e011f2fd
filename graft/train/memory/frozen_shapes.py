"""The models of `rollout.frozen` as far as memory is concerned: each has weights and a KV pool of its own."""

from __future__ import annotations

from graft.config import Config
from graft.models.io.load import read_config, shape_of
from graft.models.shape import ModelShape
from graft.train.run_dir.checkpoint import latest_model

REFERENCE = "reference"
"""In `rollout.frozen`: the weights that RL starts from; also the name of their folder in the run."""


def frozen_shapes(config: Config, policy: ModelShape) -> dict[str, ModelShape]:
    """The shapes of the frozen models in this process, by seat; on a cluster its workers hold them."""
    if config.cluster.address:
        return {}
    return {seat: _shape_of(name, policy) for seat, name in config.rollout.frozen.items()}


def _shape_of(name: str, policy: ModelShape) -> ModelShape:
    if name == REFERENCE:
        return policy
    path = latest_model(name, weights=False)
    return shape_of(read_config(path), path / "config.json")

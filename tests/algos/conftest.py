"""Small batches for tests of the maths: give what matters, the rest is filled in."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graft.algos.batch import Batch
from graft.algos.losses.covariance import SelectiveLoss

LONG = {"actions", "modes", "turns", "spans", "versions", "group", "leaf", "role", "states"}


def make_batch(**given: Any) -> Batch:
    """Every token trained, one turn, one span and one leaf per row, one group, rewards on the last
    policy token; lists become tensors. Size: that of `mask` (or another [N, T] field), else of
    `reward` with two tokens per row."""
    cast = {
        name: torch.as_tensor(value, dtype=dtype_of(name))
        for name, value in given.items()
        if value is not None
    }
    grids = [tensor.shape for tensor in cast.values() if tensor.dim() == 2]
    rows, columns = grids[0] if grids else (cast["reward"].shape[0], 2)
    row_N = torch.arange(rows)
    row_NT = row_N[:, None].expand(rows, columns).contiguous()
    grid = torch.zeros(rows, columns)
    reward = cast.get("reward", torch.zeros(rows))
    turns = cast.get("turns", torch.zeros_like(row_NT))
    rewards = grid.clone()
    rewards[:, -1] = reward
    filled = {
        "actions": torch.zeros_like(row_NT),
        "mask": turns >= 0,
        "logprobs": grid - 1.0,
        "entropies": grid + 0.5,
        "modes": torch.zeros_like(row_NT),
        "rewards": rewards,
        "turns": turns,
        "spans": row_NT,
        "versions": torch.zeros_like(row_NT),
        "reward": reward,
        "group": torch.zeros_like(row_N),
        "leaf": row_N,
        "truncated": torch.zeros(rows, dtype=torch.bool),
        "teacher_logprobs": grid - 1.5,
        "divergences": grid + 0.1,
        "twin_reward": torch.full_like(row_N, torch.nan, dtype=torch.float32),
    }
    return Batch(**{**filled, **cast})


def selected(loss: Any, batch: Batch) -> Batch:
    """The batch with the tokens that a loss chooses on the whole of it, as `prepare_of` fills them."""
    return batch.replace(selected=loss.select(batch)) if isinstance(loss, SelectiveLoss) else batch


def dtype_of(name: str) -> torch.dtype:
    if name in ("mask", "truncated"):
        return torch.bool
    return torch.long if name in LONG else torch.float32


@pytest.fixture(scope="session")
def toy_batch() -> Callable[..., Batch]:
    return make_batch


@pytest.fixture(scope="session")
def full_batch() -> Callable[..., Batch]:
    """`toy_batch` with every optional field that a credit may need."""

    def make(**given: Any) -> Batch:
        batch = make_batch(**given)
        parts = torch.stack([batch.reward / 2, batch.reward.square()], 1)
        return batch.replace(
            greedy_reward=torch.where(batch.reward > 0, batch.reward / 2, torch.nan),
            role=batch.group % 2,
            part_rewards=parts,
            part_weights=torch.tensor([2.0, 0.5]).expand_as(parts).clone(),
            states=batch.turns.clamp(max=1),
            collisions=torch.full_like(batch.logprobs, 0.2),
            values=batch.zeros() if batch.values is None else batch.values,
        )

    return make


@pytest.fixture(scope="session")
def verl():
    """verl's losses and advantages; importing them takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("verl.trainer.ppo.core_algos")

"""Credits with a baseline from outside the group: a greedy attempt, or a running mean.

N rows, T tokens, L leaves, K roles
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.credits.credit import Credit, leaves, on_all_tokens
from graft.algos.masked import first_of


def remax() -> Credit:
    """The reward minus that of the greedy attempt at the same task (ReMax).

    Rewards 1, 0, 0 and 1 of the greedy one: 0, -1, -1. Where the greedy attempt failed, its reward
    counts as 0. Needs the branch `greedy_baseline`.
    """

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        greedy_N = batch.need(
            "greedy_reward",
            "the credit remax compares with a greedy attempt: set rollout.branch=greedy_baseline, which "
            "algo.name=remax has (or all greedy attempts of this step have failed)",
        )
        return on_all_tokens(batch.reward.float() - greedy_N.nan_to_num(nan=0.0), batch)

    return credit


class RoleBaseline:
    """The reward minus a running mean of the rewards of its role: the environment and the seat (RAE).

    A = r - b; after the step b becomes decay^n b + (1 - decay^n) times the mean of the step's n leaves
    of this role. With decay 0.5: b is 0 at first, rewards 1 and 0 have A 1 and 0, then b is
    0.25 * 0 + 0.75 * 0.5 = 0.375.

    A role of a game that wins more often by the rules needs a baseline of its own, and games of one
    attempt per task have no group. The baselines are saved in checkpoints.
    """

    def __init__(self, decay: float = 0.95) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"rae(decay={decay}): give a number from 0 to below 1")
        self.decay = decay
        self.baselines: dict[int, float] = {}

    def __call__(self, adv_NT: Tensor, batch: Batch) -> Tensor:
        known = torch.tensor([self.baselines.get(role, 0.0) for role in self._roles(batch)])
        return on_all_tokens(batch.reward.float() - known.to(batch.reward.device), batch)

    def settle(self, batch: Batch) -> None:
        """Take in the rewards of a step that was trained."""
        leaf_N, reward_L, _, _ = leaves(batch)
        roles, rows = self._roles(batch), first_of(leaf_N, reward_L.numel())
        earned: dict[int, list[float]] = {}
        for row, reward in zip(map(int, rows), map(float, reward_L), strict=True):
            earned.setdefault(roles[row], []).append(reward)
        for role, rewards in earned.items():
            kept = self.decay ** len(rewards)
            before = self.baselines.get(role, 0.0)
            self.baselines[role] = kept * before + (1 - kept) * fmean(rewards)

    @property
    def state(self) -> dict[str, Any]:
        return {"baselines": [list(entry) for entry in sorted(self.baselines.items())]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.baselines = {int(role): float(mean) for role, mean in state["baselines"]}

    @staticmethod
    def _roles(batch: Batch) -> list[int]:
        role_N = batch.need("role", "the credit rae needs the environment and seat of each row")
        return [int(role) for role in role_N]

"""A credit: a pure function advantages_NT -> advantages_NT, the value of each decision.

    N rows, T tokens, L leaves, G groups

A chain starts from zeros. Some credits write advantages from the rewards of the batch and ignore
what came before (reinforce, grpo, gae); others change what they are given (rebn, whiten). The table
says which. Tokens outside the mask stay 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.masked import keep, number

Credit = Callable[[Tensor, Batch], Tensor]
"""(adv_NT, batch) -> adv_NT"""


@runtime_checkable
class StatefulCredit(Protocol):
    """A credit with state from step to step. A call does not change it, so that a step can be computed
    again; `settle` does, after the update. `state` is plain JSON and is saved in checkpoints."""

    @property
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...
    def settle(self, batch: Batch) -> None: ...


@dataclass(frozen=True)
class Chain:
    """Credits that are applied in the given order."""

    credits: tuple[Credit, ...]

    def __call__(self, adv_NT: Tensor, batch: Batch) -> Tensor:
        for step in self.credits:
            adv_NT = step(adv_NT, batch)
        return keep(adv_NT, batch.mask)  # a user's credit may ignore the mask

    @property
    def stateful(self) -> list[StatefulCredit]:
        """Those with state."""
        parts = map(inspect.unwrap, self.credits)  # without the check of their results
        return [part for part in parts if isinstance(part, StatefulCredit)]

    @property
    def needs(self) -> set[str]:
        """Optional fields of the batch that the learner has to fill for them."""
        return {name for step in self.credits for name in getattr(step, "needs", ())}


def chain(*credits: Credit) -> Chain:
    """Apply credits in the given order."""
    return Chain(credits)


def on_all_tokens(value_N: Tensor, batch: Batch) -> Tensor:
    return keep(batch.zeros() + value_N[:, None], batch.mask)


def leaves(batch: Batch) -> tuple[Tensor, Tensor, Tensor, int]:
    """The leaf of each row, reward and group of each leaf, number of groups."""
    leaf_N, num_leaves = number(batch.leaf)
    group_N, num_groups = number(batch.group)
    reward_L = torch.zeros(num_leaves, device=leaf_N.device)
    reward_L[leaf_N] = batch.reward.float()  # all rows of a leaf have its total: any of them serves
    group_L = torch.zeros_like(reward_L, dtype=torch.long)
    group_L[leaf_N] = group_N
    return leaf_N, reward_L, group_L, num_groups

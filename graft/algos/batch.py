"""A Batch: trajectories as tensors. One row per leaf and context, one column per token.

    N rows, T tokens

    "2+3=" sampled twice; the second answer called a tool that wrote "5;"

    row  token    2  +  3  =  6        row  token    2  +  3  =  [  ]  5  ;  5
    0    mask     .  .  .  .  1        1    mask     .  .  .  .  1  1  .  .  1
         turns   -1 -1 -1 -1  0             turns   -1 -1 -1 -1  0  0 -1 -1  1
         rewards  0  0  0  0  0             rewards  0  0  0  0  0  0  0  0  1
         reward   0                         reward   1

Every [N, T] entry at column t speaks of the token in column t: the log-prob is that of choosing it,
the value is that of the state in which it was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graft.algos.masked import number
from graft.spelling import suggestion
from graft.transfer import transfer
from graft.types import Trajectory

_PER_ROW = (
    *("reward", "group", "leaf", "truncated", "twin_reward", "has_teacher"),
    *("greedy_reward", "role"),
)
_PER_PART = ("part_rewards", "part_weights")
_PER_CANDIDATE = ("teacher_top_ids", "teacher_top_logprobs")
_BOOLEAN = ("mask", "truncated", "is_vocab_token", "has_teacher", "observed", "selected")


@dataclass(frozen=True, slots=True)
class Batch:
    """Frozen; `replace` and `rows` return new ones. Rows of a leaf keep the order of its contexts."""

    actions: Tensor
    """[N, T] long: what was chosen, the label that is trained."""
    mask: Tensor
    """[N, T] bool: decisions that are trained."""
    logprobs: Tensor
    """[N, T] of the behaviour policy, as the engine sampled."""
    entropies: Tensor
    """[N, T] of the behaviour policy."""
    modes: Tensor
    """[N, T] long: the row of the action table that was allowed here."""
    rewards: Tensor
    """[N, T] each turn's reward, on the last policy token of that turn."""
    turns: Tensor
    """[N, T] long: turn number of a policy token, counted over the whole leaf; -1 elsewhere."""
    spans: Tensor
    """[N, T] long: the span a token belongs to, unique in the batch; -1 is padding."""
    versions: Tensor
    """[N, T] long: the weights that sampled the token."""

    reward: Tensor
    """[N] total of the leaf; the same in all its rows."""
    group: Tensor
    """[N] long: the same number for rows of the same task."""
    leaf: Tensor
    """[N] long: unique in the batch; several contexts of one leaf share it."""
    truncated: Tensor
    """[N] bool: a limit of the rollout ended it, not the environment."""
    twin_reward: Tensor
    """[N] the reward of the leaf of which this one is the counterfactual; NaN: it is not one."""

    trajectories: Sequence[Trajectory] = ()
    """[N] the walks through its forest, one per row, that a model reads; empty: of tensors alone."""

    observed: Tensor | None = None
    """[N, T] bool: tokens that the environment wrote, each once per leaf; None: not known."""
    greedy_reward: Tensor | None = None
    """[N] the reward of the greedy attempt at the row's task; NaN: it has none. None: no task has one."""
    role: Tensor | None = None
    """[N] long: the environment and the seat, the same number in every step of every run."""
    part_rewards: Tensor | None = None
    """[N, P] the rewards that the leaf's is the weighted sum of; NaN: not one of this leaf's."""
    part_weights: Tensor | None = None
    """[N, P] their weights."""
    states: Tensor | None = None
    """[N, T] long: the environment's state in which a policy token's turn began, as a number that is the
    same wherever the state is; -1: unknown."""

    advantages: Tensor | None = None
    """[N, T] from a credit."""
    returns: Tensor | None = None
    """[N, T] the targets of the critic."""
    values: Tensor | None = None
    """[N, T] the critic's values before the update."""
    collisions: Tensor | None = None
    """[N, T] of the learner before its first update: the chance that two draws are equal, sum of p^2."""
    old_logprobs: Tensor | None = None
    """[N, T] of the learner before its first update on this batch; None: there is only one update."""
    ref_logprobs: Tensor | None = None
    """[N, T] of the frozen reference."""
    weights: Tensor | None = None
    """[N, T] factor on the policy's loss, from weights that need the whole batch; None: 1."""
    selected: Tensor | None = None
    """[N, T] bool: tokens that the loss treats differently, chosen on the whole batch."""
    is_vocab_token: Tensor | None = None
    """[N, T] bool: a token was chosen, not an action beyond the vocabulary; None: everywhere."""
    vocab_logprobs: Tensor | None = None
    """[N, T] of the learner: log-prob that any token was chosen rather than an action beyond the
    vocabulary, in a loss with gradient; None: 0 everywhere."""
    teacher_logprobs: Tensor | None = None
    """[N, T] of the teacher, of the sampled tokens."""
    teacher_top_ids: Tensor | None = None
    """[N, T, K] long: the teacher's likeliest tokens, where a server gave them."""
    teacher_top_logprobs: Tensor | None = None
    """[N, T, K] their log-probs."""
    has_teacher: Tensor | None = None
    """[N] bool: rows that a teacher scored; None: all."""
    divergences: Tensor | None = None
    """[N, T] of the learner: divergence of its distribution from the teacher's, with gradient."""

    def __post_init__(self) -> None:
        grid = self.actions.shape
        if len(grid) != 2:
            raise ValueError(f"Batch.actions has shape {tuple(grid)}; it must be [rows, tokens]")
        if self.trajectories and len(self.trajectories) != grid[0]:
            raise ValueError(
                f"Batch.trajectories has {len(self.trajectories)} rows, but actions is {tuple(grid)}: "
                f"give it {grid[0]}, or none"
            )
        for name, tensor in self.tensors().items():
            want = grid[:1] if name in _PER_ROW else grid
            if name in _PER_CANDIDATE:
                want = (*grid, *tensor.shape[2:3])
            if name in _PER_PART:
                want = (grid[0], *tensor.shape[1:2])
            if tensor.shape != want:
                raise ValueError(
                    f"Batch.{name} has shape {tuple(tensor.shape)}, but actions is {tuple(grid)}: "
                    f"give it {tuple(want)}"
                )
            if name in _BOOLEAN and tensor.dtype != torch.bool:
                raise ValueError(f"Batch.{name} is {tensor.dtype}; give it torch.bool")

    if not TYPE_CHECKING:  # a type checker knows the fields

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # copy and pickle ask for methods that may not be there
                raise AttributeError(name)
            known = [one for one in dir(type(self)) if not one.startswith("_")]
            hint = suggestion(name, known)
            raise AttributeError(f"Batch has no {name!r};{hint} known: {', '.join(known)}")

    def tensors(self) -> dict[str, Tensor]:
        """Its fields that are filled, without the trajectories."""
        names = (field.name for field in fields(self) if field.name != "trajectories")
        named = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def num_rows(self) -> int:
        return self.actions.shape[0]

    @property
    def lengths(self) -> Tensor:
        """[N] trained tokens per row."""
        return self.mask.sum(dim=1)

    @property
    def num_tokens(self) -> int:
        """Trained tokens of all rows."""
        return int(self.mask.sum())

    def zeros(self) -> Tensor:
        """[N, T] the advantages every credit chain starts from."""
        return torch.zeros(self.actions.shape, device=self.actions.device)

    def turn_ids(self) -> Tensor:
        """[N, T] a number per leaf and turn, ascending with both."""
        leaf_N, _ = number(self.leaf)
        per_leaf = int(self.turns.max()) + 2 if self.turns.numel() else 0  # with -1, no turn
        return leaf_N[:, None] * per_leaf + self.turns + 1

    def replace(self, **changes: Any) -> Batch:
        return replace(self, **changes)

    def rows(self, index: slice | Tensor) -> Batch:
        """The Batch of some rows: a micro-batch, or the same rows in another order."""
        tensors = {name: tensor[index] for name, tensor in self.tensors().items()}
        walks = self.trajectories
        if walks:
            chosen = torch.arange(self.num_rows, device=self.actions.device)[index]
            numbers: list[int] = chosen.tolist()  # pyright: ignore
            walks = [walks[number] for number in numbers]
        return Batch(**tensors, trajectories=walks)

    def to(self, device: torch.device | str) -> Batch:
        tensors = transfer(self.tensors(), torch.device(device))
        return Batch(**tensors, trajectories=self.trajectories)

    def need(self, name: str, source: str) -> Tensor:
        """An optional tensor, or an error that says what should have filled it."""
        tensor = getattr(self, name)
        if tensor is None:
            raise ValueError(f"Batch.{name} is None, but {source}")
        return tensor

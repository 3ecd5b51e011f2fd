"""Experts of a sharded decoder: each process has some columns of every expert, and all of the router.

    2 processes, experts of width 768     gate and up: 384 rows of each expert, down: 384 columns

Parameters have the sizes of a checkpoint's tensors. They are joined in each pass, as the layer of one
process stores them, so that this layer computes with them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from graft.models.layers.experts import ExpertMLP
from graft.models.layers.sublayer import Norm
from graft.models.parallel.regions import TensorParallelGroup, enter, leave
from graft.models.parallel.shards import local_tensor
from graft.models.shape import Experts, ModelShape


class JoinedWeight(NamedTuple):
    """Takes the place of a linear layer during a pass."""

    weight: Tensor
    bias: None = None


class Projections(nn.Module):
    """The three matrices of one expert, under their names in a checkpoint."""

    def __init__(self, width: int, ff: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, ff, bias=False)
        self.up_proj = nn.Linear(width, ff, bias=False)
        self.down_proj = nn.Linear(ff, width, bias=False)


class ShardedExperts(ExpertMLP):
    """An `ExpertMLP` with this process's share of each expert's width."""

    def __init__(
        self, shape: ModelShape, experts: Experts, norm: Norm, tp: TensorParallelGroup
    ) -> None:
        super().__init__(shape, slice_experts(experts, tp.size))
        joined = [name for name, _ in self.named_children() if name not in ("norm", "post_norm")]
        for name in (*joined, *(["correction"] if experts.router == "sigmoid" else [])):
            delattr(self, name)
        self.norm, self.tp = norm, tp
        self.gate = nn.Linear(shape.width, experts.count, bias=False)
        if experts.router == "sigmoid":
            correction = nn.Parameter(torch.zeros(experts.count), requires_grad=False)
            self.gate.e_score_correction_bias = correction
        if experts.shared_ff:
            self.shared_experts = Projections(shape.width, experts.shared_ff)
        self.all_experts = nn.ModuleList(
            Projections(shape.width, experts.ff) for _ in range(experts.count)
        )

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | None]:
        joined = self._join()
        self.__dict__.update(joined)
        try:
            return super().forward(x, delta)
        finally:  # not kept: they are as large as the gathered weights
            for name in joined:
                del self.__dict__[name]

    def _join(self) -> dict[str, Tensor | JoinedWeight]:
        """What `ExpertMLP` computes with, by its names."""
        inside: list[Projections] = [*self.all_experts]  # type: ignore[list-item]
        joined: dict[str, Tensor | JoinedWeight] = {
            "router": JoinedWeight(local_tensor(self.gate.weight)),
            **_join("", inside),
        }
        if self.experts.router == "sigmoid":
            joined["correction"] = local_tensor(self.gate.e_score_correction_bias)  # type: ignore[arg-type]
        if self.experts.shared_ff:
            joined |= _join("shared_", [self.shared_experts])
        return joined

    def combine(self, x: Tensor, weights_Tk: Tensor, chosen_Tk: Tensor) -> Tensor:
        group = self.tp.group
        part = super().combine(enter(x, group), enter(weights_Tk, group), chosen_Tk)
        return leave(part, group)


def _join(prefix: str, experts: list[Projections]) -> dict[str, JoinedWeight]:
    halves = [half for expert in experts for half in (expert.gate_proj, expert.up_proj)]
    gate_up = torch.cat([local_tensor(half.weight) for half in halves])
    down = torch.cat([local_tensor(expert.down_proj.weight) for expert in experts])
    return {f"{prefix}gate_up": JoinedWeight(gate_up), f"{prefix}down": JoinedWeight(down)}


def slice_experts(experts: Experts, tp: int) -> Experts:
    """The part of all experts that one of `tp` processes holds."""
    return replace(experts, ff=experts.ff // tp, shared_ff=experts.shared_ff // tp)

"""The two ends of a tensor-parallel region.

Inside the region each process multiplies with its own rows of one matrix, then with its own columns of
the next; the sum over the group is the result. Two processes, each with one of two hidden units, outside
of the region the replicated stream x:

    enter   x -> x, x         backward: the sum of both gradients of x
    leave   a, b -> a + b     backward: the same gradient for both

Everything outside is computed identically in every process, so each has the same stream, the same loss,
and the same gradient of replicated weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class TensorParallelGroup:
    """The processes that compute one forest together, and the index of this one."""

    group: ProcessGroup
    size: int
    index: int


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # a copy: autograd may pass the same gradient to another node
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0], None


def enter(x: Tensor, group: ProcessGroup) -> Tensor:
    """x, replicated in the group; its gradient is the sum over the processes."""
    return _Enter.apply(x, group)


def leave(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of x over the group, in place: x must be contiguous and not be used again."""
    return _Leave.apply(x, group)

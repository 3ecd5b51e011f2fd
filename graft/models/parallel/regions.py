"""The two borders of a region that a group of processes computes together.

Inside, each process multiplies with its own rows of a matrix, then with its own columns of the next:
what it finds is one summand of the result, and the sum over the group is the result. Two processes,
each with one of two hidden numbers, outside of the region one stream x:

    enter   x -> x, x         backward: what both want of x, added up
    leave   a, b -> a + b     backward: the same gradient for both

Everything outside is computed by every process alike, so each of them has the same stream, the same
loss, and the same gradient of what it holds a copy of.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # a copy: autograd may hand the same gradient to somebody else
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
    """x, the same in every process of the group; its gradient is the sum of theirs."""
    return _Enter.apply(x, group)


def leave(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of the group's x, written over it: it must be contiguous and of no further use."""
    return _Leave.apply(x, group)

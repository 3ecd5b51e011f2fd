"""Attention over a packed forest from q|k|v: head norms, rotation and attention in one step.

Kept for the backward pass are q|k|v and the output. Queries, keys and values are made from q|k|v again,
by the kernel that made them: a pass over memory per layer, for a fifth of what a layer keeps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graft.models.angles import HeadRotation
from graft.models.kernels import interval, path_attention, rope
from graft.models.tree.block_lists import BlockLists
from graft.models.tree.path_blocks import PathBlocks


class _RotatedAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        qkv: Tensor,
        sinks: Tensor | None,
        blocks: BlockLists,
        path: PathBlocks | None,
        *of_heads: Any,
    ) -> Tensor:
        qkv, how = rope.streamed(qkv, HeadRotation(*of_heads))
        q, k, v, rstd = rope.rotate(qkv, how)
        if path is None:
            out, lse = interval.attend(q, k, v, blocks, sinks)
        else:
            out, lse = path_attention.attend(q, k, v, path, blocks.window, sinks)
        ctx.save_for_backward(qkv, rstd, out, lse, sinks, *how.tensors)
        ctx.blocks, ctx.how = blocks, how.without_tensors()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        qkv, rstd, out, lse, sinks, *of_heads = ctx.saved_tensors
        how = ctx.how.with_tensors(*of_heads)
        q, k, v, _ = rope.rotate(qkv, how)
        *of_heads, grad_sinks = interval.differentiate(
            q, k, v, out, lse, grads[0], ctx.blocks, sinks
        )
        grad_qkv, *of_weights = rope.differentiate(tuple(of_heads), qkv, rstd, how)
        return grad_qkv, grad_sinks, None, None, *of_weights, *[None] * (len(how) - 2)


def rotated_attention(
    qkv: Tensor,
    how: HeadRotation,
    blocks: BlockLists,
    path: PathBlocks | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`interval_attention` of `rope.qk_rotate`, or `path_attention`: [L, (H+2K) d] -> [L, H, d]."""
    return _RotatedAttention.apply(qkv, sinks, blocks, path, *how)

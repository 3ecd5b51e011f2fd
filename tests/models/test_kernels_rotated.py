"""Attention from q|k|v, and what a block keeps for its backward pass where kernels run."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from graft.models.angles import Angles, HeadRotation
from graft.models.decoder import Block
from graft.models.kernels.interval import interval_attention
from graft.models.kernels.rope import qk_rotate
from graft.models.kernels.rotated_attention import rotated_attention
from graft.models.shape import ModelShape
from graft.models.tree.attention import KernelAttention
from graft.models.tree.block_lists import QUERIES, BlockLists

TOKENS, HEADS, KV_HEADS, SIZE = 24, 2, 1, 16


def two_trees() -> torch.Tensor:
    """Ends of a prompt of 6 tokens with two answers of 4, and of a chain of 10."""
    return torch.tensor([14] * 6 + [10] * 4 + [14] * 4 + [24] * 10)


def test_made_again_they_give_the_gradients_of_what_was_kept(kernel_device):
    generator = torch.Generator().manual_seed(0)
    where = kernel_device, torch.bfloat16

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(*where).requires_grad_()

    qkv, q_weight, k_weight = leaf(TOKENS, (HEADS + 2 * KV_HEADS) * SIZE), leaf(SIZE), leaf(SIZE)
    angles = torch.randn(TOKENS, SIZE // 2, generator=generator).to(kernel_device)
    how = HeadRotation(q_weight, k_weight, 1e-6, angles.cos(), angles.sin(), HEADS, KV_HEADS)
    blocks = BlockLists.of(two_trees(), kernel_device)
    pull = torch.randn(TOKENS, HEADS, SIZE, generator=generator).to(*where)
    outputs = rotated_attention(qkv, how, blocks), interval_attention(*qk_rotate(qkv, how), blocks)
    assert torch.equal(*outputs)
    leaves = (qkv, q_weight, k_weight)
    for mine, kept in zip(*(torch.autograd.grad(o, leaves, pull) for o in outputs), strict=True):
        assert torch.equal(mine, kept) and float(kept.abs().sum()) > 0


def test_a_block_keeps_each_of_its_tensors_once_and_in_bf16(kernel_device, monkeypatch):
    for module in ("ops", "tree.attention"):
        monkeypatch.setattr(f"graft.models.{module}.has_kernels", lambda _: True)
    shape = ModelShape(
        vocab_size=8, width=48, layers=1, heads=HEADS, kv_heads=KV_HEADS, head_dim=SIZE, ff=80
    )
    block = Block(shape, 0).to(kernel_device, torch.bfloat16)
    cos, sin = (x.to(kernel_device) for x in Angles(shape).look_up(torch.arange(TOKENS)))
    stream = torch.randn(TOKENS, 48, device=kernel_device, requires_grad=True)
    attend = KernelAttention([], two_trees(), HEADS, KV_HEADS, kernel_device)
    own = {p.untyped_storage().data_ptr() for p in (*block.parameters(), cos, sin)}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    delta = torch.randn(TOKENS, 48, device=kernel_device, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        x, delta = block(stream, delta, cos, sin, attend)
    assert x.dtype == torch.float32 and delta is not None and delta.dtype == torch.bfloat16
    sizes = [t.untyped_storage().nbytes() for p, t in kept.items() if p not in own]
    unit, qkv, out, gate_up = (
        2 * 48,
        2 * (HEADS + 2 * KV_HEADS) * SIZE,
        2 * HEADS * SIZE,
        2 * 2 * 80,
    )
    small = 4 * (1 + 1 + HEADS + KV_HEADS)  # 1 / rms of two norms and of heads
    log_sums = 4 * HEADS * QUERIES  # of whole blocks
    assert sum(sizes) == TOKENS * (2 * unit + qkv + out + gate_up + small) + log_sums

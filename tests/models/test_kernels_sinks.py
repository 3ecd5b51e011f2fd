"""Attention with sinks by the kernels: a score of each head in the sum of weights, without a value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graft.models.tree.attention import KernelAttention
from graft.models.tree.packing import interval_mask

pytest.importorskip("triton")

from graft.models.angles import HeadRotation
from graft.models.kernels.rope import qk_rotate
from tests.models.test_kernels_families import ENDS, RUNS
from tests.models.test_kernels_interval import inputs as noise
from tests.models.test_kernels_windows import window_mask


def dense(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
    """The softmax over one more key, whose value is 0."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    score = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    score = score.masked_fill(~mask, float("-inf"))
    sink = sinks[:, None, None].expand(-1, len(q), 1)
    share = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
    return torch.einsum("hij,jhd->ihd", share, v)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("window", [0, 5])
def test_output_and_gradients_are_those_of_one_more_key(
    window: int, in_order: bool, kernel_device: torch.device
) -> None:
    tensors = [*noise(len(ENDS), 2, 1, 16, kernel_device), torch.tensor([0.7, -1.5])]
    leaves = [x.to(kernel_device).requires_grad_() for x in tensors]
    q, k, v, sinks = leaves
    of_heads = 2, 1, kernel_device, in_order, (window,)
    got = KernelAttention(RUNS, ENDS, *of_heads)(0, q, k, v, sinks)
    mask = window_mask(RUNS, window) if window else interval_mask(ENDS)
    want = dense(q, k, v, sinks, mask.to(kernel_device))
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    pull = torch.randn_like(got)
    grads = (torch.autograd.grad(out, leaves, pull) for out in (got, want))
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, atol=5e-5, rtol=5e-5)


def test_made_again_they_have_the_same_gradients(kernel_device: torch.device) -> None:
    """From q|k|v, whose heads are normed and rotated."""
    torch.manual_seed(0)
    tokens, size = len(ENDS), 16
    qkv, *weights = (
        torch.randn(*s).to(kernel_device) for s in ((tokens, 4 * size), (size,), (size,))
    )
    sinks = torch.randn(2).to(kernel_device)
    leaves = [x.requires_grad_() for x in (qkv, *weights, sinks)]
    angle = torch.rand(tokens, size // 2).to(kernel_device)
    how = HeadRotation(*weights, 1e-6, angle.cos(), angle.sin(), 2, 1)
    attend = KernelAttention(RUNS, ENDS, 2, 1, kernel_device)
    outputs = attend.of_qkv(0, qkv, how, sinks), attend(0, *qk_rotate(qkv, how), sinks)
    pull = torch.randn_like(outputs[0])
    assert torch.equal(*outputs)
    for mine, kept in zip(*(torch.autograd.grad(o, leaves, pull) for o in outputs), strict=True):
        assert torch.equal(mine, kept) and float(kept.abs().sum()) > 0

"""The decoder's element-wise kernels against plain PyTorch on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graft.models import ops as functions
from graft.models.angles import HeadRotation

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poison")

Outputs = Tensor | tuple[Tensor, ...]
FP32: dict[str, Any] = {"atol": 2e-5, "rtol": 2e-5}
BF16: dict[str, Any] = {"atol": 3e-2, "rtol": 2e-2}


def compare(
    kernel: Callable[..., Outputs],
    plain: Callable[..., Outputs],
    inputs: list[Tensor | None],
    device: torch.device,
    tolerance: dict[str, Any] = FP32,
    unused: int | None = None,
) -> None:
    """Outputs and gradients of the kernel on its device and of the plain function on the CPU.

    Output number `unused` gets no gradient: its consumer did not need one.
    """
    sides: list[tuple[list[Tensor], list[Tensor]]] = []
    for function, where in ((kernel, device), (plain, torch.device("cpu"))):
        mine = [None if x is None else x.detach().to(where).requires_grad_() for x in inputs]
        outputs = function(*mine)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
        loss = sum(
            (y.float() * w.float()).sum()
            for i, (y, w) in enumerate(zip(outputs, weights, strict=True))
            if i != unused
        )
        assert isinstance(loss, Tensor)
        grads = torch.autograd.grad(loss, [x for x in mine if x is not None], allow_unused=True)
        sides.append(
            ([y.detach().cpu() for y in outputs], [g.cpu() for g in grads if g is not None])
        )
    (got, got_grads), (want, want_grads) = sides
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    for a, b in zip(got_grads, want_grads, strict=True):  # sums over rows: relative to their size
        scale = max(float(b.float().abs().max()), 1.0) if b.numel() else 1.0
        torch.testing.assert_close(a.float() / scale, b.float() / scale, **tolerance)


@pytest.mark.parametrize(
    ("rows", "width", "has_delta", "dtype", "offset"),
    [
        (1, 1024, True, torch.float32, False),
        (7, 576, False, torch.bfloat16, False),
        (5, 96, True, torch.bfloat16, False),
        (11, 33, True, torch.float32, False),
        (4, 2560, False, torch.float32, False),
        (0, 64, True, torch.float32, False),
        (5, 96, True, torch.float32, True),
        (5, 33, False, torch.float32, True),
    ],
)
def test_norm(
    rows: int,
    width: int,
    has_delta: bool,
    dtype: torch.dtype,
    offset: bool,
    kernel_device: torch.device,
) -> None:
    from graft.models.kernels.norm import add_norm

    torch.manual_seed(0)
    x = (torch.randn(rows, width) * 3).to(dtype)
    delta = torch.randn(rows, width).to(dtype) if has_delta else None
    compare(
        lambda x, delta, w: add_norm(x, delta, w, 1e-5, offset),
        lambda x, delta, w: functions.add_norm(x, delta, w, 1e-5, offset),
        [x, delta, (torch.rand(width) + 0.5).to(dtype)],
        kernel_device,
        FP32 if dtype == torch.float32 else BF16,
    )


@pytest.mark.parametrize("unused", [0, 1])
def test_norm_or_sum_alone_may_have_a_gradient(unused: int, kernel_device: torch.device) -> None:
    from graft.models.kernels.norm import add_norm

    torch.manual_seed(0)
    compare(
        lambda x, delta, w: add_norm(x, delta, w, 1e-6),
        lambda x, delta, w: functions.add_norm(x, delta, w, 1e-6),
        [torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)],
        kernel_device,
        unused=unused,
    )


def test_norm_rounds_in_the_order_of_plain_pytorch(kernel_device: torch.device) -> None:
    """In bf16 one other rounding shows as a last bit; here all but a handful agree to it."""
    from graft.models.kernels.norm import add_norm

    if kernel_device.type == "cpu":
        pytest.skip("Triton's interpreter cuts bf16 off where a GPU rounds it")
    torch.manual_seed(0)
    x, delta, weight = (torch.randn(*s).bfloat16() for s in ((16, 512), (16, 512), (512,)))
    there = kernel_device
    total, normed = add_norm(x.to(there), delta.to(there), weight.to(there), 1e-6)
    want_total, want_normed = functions.add_norm(x, delta, weight, 1e-6)
    assert torch.equal(total.cpu(), want_total)
    assert (normed.cpu() != want_normed).float().mean() < 1e-3


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "size", "is_normed", "dtype"),
    [
        (5, 2, 2, 64, True, torch.bfloat16),
        (7, 9, 3, 64, True, torch.float32),
        (1, 16, 8, 128, True, torch.float32),  # two tiles
        (1, 16, 8, 128, False, torch.bfloat16),
        (5, 6, 2, 12, True, torch.float32),  # half a head is no power of two
        (5, 6, 2, 12, False, torch.float32),
        (0, 4, 1, 32, True, torch.float32),
    ],
)
def test_head_norms_and_rotation(
    tokens: int,
    heads: int,
    kv_heads: int,
    size: int,
    is_normed: bool,
    dtype: torch.dtype,
    kernel_device: torch.device,
) -> None:
    from graft.models.kernels.rope import qk_rotate

    torch.manual_seed(0)
    angle = torch.rand(tokens, size // 2) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    weights = [torch.randn(size).to(dtype) if is_normed else None for _ in range(2)]
    compare(
        lambda qkv, a, b: qk_rotate(
            qkv, HeadRotation(a, b, 1e-5, cos.to(qkv.device), sin.to(qkv.device), heads, kv_heads)
        ),
        lambda qkv, a, b: functions.qk_rotate(
            qkv, HeadRotation(a, b, 1e-5, cos, sin, heads, kv_heads)
        ),
        [torch.randn(tokens, (heads + 2 * kv_heads) * size).to(dtype), *weights],
        kernel_device,
        FP32 if dtype == torch.float32 else BF16,
    )


@pytest.mark.parametrize(
    ("size", "turned", "is_normed", "offset", "query_scale"),
    [
        (32, 4, False, False, 1.0),  # the first 8 numbers of 32
        (24, 8, True, False, 1.0),  # no powers of two
        (32, 16, True, True, 0.7),
        (32, 16, False, False, 0.7),
        (12, 3, True, True, 1.0),
    ],
)
def test_parts_of_heads_norms_from_1_and_scaled_queries(
    size: int, turned: int, is_normed: bool, offset: bool, query_scale: float,
    kernel_device: torch.device,
) -> None:  # fmt: skip
    from graft.models.kernels.rope import qk_rotate

    torch.manual_seed(0)
    angle = torch.rand(5, turned) * 6

    def on(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        def call(qkv: Tensor, a: Tensor | None, b: Tensor | None) -> tuple[Tensor, ...]:
            angles = angle.cos().to(qkv), angle.sin().to(qkv)
            return function(qkv, HeadRotation(a, b, 1e-6, *angles, 3, 1, offset, query_scale))

        return call

    weights = [torch.randn(size) if is_normed else None for _ in range(2)]
    tensors = [torch.randn(5, 5 * size), *weights]
    compare(on(qk_rotate), on(functions.qk_rotate), tensors, kernel_device)


@pytest.mark.parametrize("unused", [0, 1, 2])
@pytest.mark.parametrize("is_normed", [True, False])
def test_rotation_of_a_wider_matrix_with_gradients_missing_or_expanded(
    unused: int, is_normed: bool, kernel_device: torch.device
) -> None:
    from graft.models.kernels.rope import qk_rotate

    torch.manual_seed(0)
    angle = torch.rand(5, 16)
    weights = [torch.randn(32) if is_normed else None for _ in range(2)]

    def on(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        def call(wide: Tensor, a: Tensor | None, b: Tensor | None) -> tuple[Tensor, ...]:
            cos, sin = angle.cos().to(wide), angle.sin().to(wide)
            outputs = function(wide[:, 8:-8], HeadRotation(a, b, 1e-6, cos, sin, 4, 2))
            return tuple(y.sum(1) for y in outputs)  # its gradient is expanded, not copied

        return call

    compare(
        on(qk_rotate),
        on(lambda qkv, how: functions.qk_rotate(qkv.contiguous(), how)),
        [torch.randn(5, 8 * 32 + 16), *weights],
        kernel_device,
        unused=unused,
    )


def test_queries_keys_and_values_are_contiguous(kernel_device: torch.device) -> None:
    from graft.models.kernels.rope import qk_rotate

    qkv, angle = (
        torch.randn(3, 5 * 8, device=kernel_device),
        torch.zeros(3, 4, device=kernel_device),
    )
    q, k, v = qk_rotate(qkv, HeadRotation(None, None, 1e-6, angle.cos(), angle.sin(), 3, 1))
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    assert torch.equal(torch.cat([q, k, v], 1).flatten(1), qkv)  # an angle of 0 turns nothing


def kernel_gate(gate_up: Tensor) -> Tensor:
    """The gate alone: its product with the unit matrix."""
    from graft.models.kernels.products import linear

    unit = torch.eye(gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    return linear(gate_up, unit, None, "silu")


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [
        (1, 1024, torch.float32),
        (5, 300, torch.bfloat16),
        (3, 100, torch.float32),
        (0, 16, torch.float32),
    ],
)
def test_gate(rows: int, width: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(rows, 2 * width) * 4).to(dtype)
    tolerance = FP32 if dtype == torch.float32 else BF16
    compare(kernel_gate, functions.gate_product, [gate_up], kernel_device, tolerance)


def test_a_gate_far_from_zero_is_shut_or_open(kernel_device: torch.device) -> None:
    gate_up = torch.tensor([[-80.0, 80.0, 3.0, 3.0]], device=kernel_device, requires_grad=True)
    out = kernel_gate(gate_up)
    torch.testing.assert_close(out.cpu(), torch.tensor([[0.0, 240.0]]))
    (grad,) = torch.autograd.grad(out.sum(), gate_up)
    torch.testing.assert_close(grad.cpu(), torch.tensor([[0.0, 3.0, 0.0, 80.0]]))

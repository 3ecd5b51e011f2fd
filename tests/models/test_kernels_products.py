"""Products that make their inputs again, against the plain ones, gradients included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graft.models.ops import add_norm, gate_product

CLOSE = {"atol": 2e-4, "rtol": 2e-4}


class Case:
    """Leaves of a small random problem, on the kernels' device."""

    def __init__(self, rows: int, inputs: int, outputs: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(inputs)

        def leaf(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device).requires_grad_()

        self.x, self.delta, self.scale = leaf(rows, inputs), leaf(rows, inputs), leaf(inputs)
        self.gate_up = leaf(rows, 2 * inputs)
        self.weight, self.bias = leaf(outputs, inputs), leaf(outputs)
        self.pull = torch.randn(rows, outputs, generator=generator).to(device)
        self.pull_total = torch.randn(rows, inputs, generator=generator).to(device)


def gradients(loss: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor | None]:
    return list(torch.autograd.grad(loss, leaves, allow_unused=True))


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(5, 48, 20), (17, 72, 33)])
@pytest.mark.parametrize(("has_delta", "offset"), [(True, False), (False, False), (True, True)])
def test_a_norm_and_its_product(rows, inputs, outputs, has_delta, offset, kernel_device):
    from graft.models.kernels.products import norm_linear

    case = Case(rows, inputs, outputs, kernel_device)
    delta = case.delta if has_delta else None
    leaves = [case.x, case.scale, case.weight, case.bias, *([delta] if has_delta else [])]
    how = case.weight, case.bias, None, offset
    total, out = norm_linear(case.x, delta, case.scale, 1e-6, *how)
    got = gradients((out * case.pull).sum() + (total * case.pull_total).sum(), *leaves)
    plain = case.x + case.delta if has_delta else case.x
    scale = 1 + case.scale if offset else case.scale
    want_out = F.linear(rms_norm_plain(plain, scale), case.weight, case.bias)
    want = gradients((want_out * case.pull).sum() + (plain * case.pull_total).sum(), *leaves)
    torch.testing.assert_close(total, plain)
    torch.testing.assert_close(out, want_out, **CLOSE)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


def rms_norm_plain(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if x.is_cuda:  # torch's own, so that nothing of ours is compared with itself
        return F.rms_norm(x, x.shape[-1:], scale, 1e-6)
    return add_norm(x, None, scale, 1e-6)[1]


PLAIN_GATES = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("activation", ["", *PLAIN_GATES])
def test_a_product_with_and_without_a_gate(activation, kernel_device):
    from graft.models.kernels.products import linear

    case = Case(9, 40, 24, kernel_device)
    x = case.gate_up if activation else case.x
    out = linear(x, case.weight, case.bias, activation)
    got = gradients((out * case.pull).sum(), x, case.weight, case.bias)
    gate, up = x.chunk(2, -1) if activation else (x, x)
    given = PLAIN_GATES[activation](gate) * up if activation else x
    want_out = F.linear(given, case.weight, case.bias)
    want = gradients((want_out * case.pull).sum(), x, case.weight, case.bias)
    torch.testing.assert_close(out, want_out, **CLOSE)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


def test_gradients_of_a_weight_with_a_sum_are_added_to_it(kernel_device):
    from graft.models.kernels.products import linear, norm_linear

    case = Case(9, 40, 24, kernel_device)
    start = torch.randn(24, 40).to(kernel_device)
    case.weight.grad_sum = start.clone()  # type: ignore[attr-defined]
    _, out = norm_linear(case.x, case.delta, case.scale, 1e-6, case.weight, None)
    other = linear(case.x, case.weight, None)
    (out * case.pull + other * case.pull).sum().backward()
    assert case.weight.grad is None
    normed = rms_norm_plain(case.x + case.delta, case.scale).detach()
    want = start + case.pull.T @ normed + case.pull.T @ case.x.detach()
    torch.testing.assert_close(case.weight.grad_sum, want, **CLOSE)  # type: ignore[attr-defined]


def test_a_stream_in_fp32_carries_additions_in_bf16(kernel_device):
    from graft.models.kernels.products import norm_linear

    case = Case(9, 40, 24, kernel_device)
    weights = [
        x.detach().bfloat16().requires_grad_() for x in (case.delta, case.scale, case.weight)
    ]
    delta, scale, weight = weights
    total, out = norm_linear(case.x, delta, scale, 1e-6, weight, None)
    assert (total.dtype, out.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(total, case.x + delta.float())
    loss = (out.float() * case.pull).sum() + (total * case.pull_total).sum()
    got = gradients(loss, case.x, *weights)
    assert [x.dtype for x in got] == [torch.float32, *[torch.bfloat16] * 3]  # type: ignore[union-attr]
    wide = [x.detach().float().requires_grad_() for x in weights]
    plain = case.x + wide[0]
    want_out = rms_norm_plain(plain, wide[1]) @ wide[2].T
    want = gradients((want_out * case.pull).sum() + (plain * case.pull_total).sum(), case.x, *wide)
    for mine, theirs in zip(got, want, strict=True):
        size = theirs.abs().max()
        torch.testing.assert_close(mine.float() / size, theirs / size, atol=2e-2, rtol=0)


def test_the_gradient_of_an_embedding_is_added_to_its_rows(kernel_device):
    from graft.models.kernels.products import embed

    weight = torch.randn(6, 4).to(kernel_device).requires_grad_()
    tokens = torch.tensor([1, 5, 1], device=kernel_device)
    pull = torch.randn(3, 4).to(kernel_device)
    assert torch.equal(embed(tokens, weight), weight[tokens])
    weight.grad_sum = torch.ones(6, 4, device=kernel_device)  # type: ignore[attr-defined]
    (embed(tokens, weight) * pull).sum().backward()
    want = torch.ones(6, 4, device=kernel_device)
    want[1] += pull[0] + pull[2]
    want[5] += pull[1]
    assert weight.grad is None
    torch.testing.assert_close(weight.grad_sum, want)  # type: ignore[attr-defined]


def test_a_frozen_weight_gets_no_gradient(kernel_device):
    from graft.models.kernels.products import linear

    case = Case(4, 16, 8, kernel_device)
    frozen = case.weight.detach()
    (grad,) = torch.autograd.grad(linear(case.x, frozen, None).sum(), case.x)
    torch.testing.assert_close(grad, torch.ones_like(case.pull) @ frozen, **CLOSE)


def test_the_plain_gate_is_silu_times_up():
    x = torch.randn(3, 8)
    torch.testing.assert_close(gate_product(x), F.silu(x[:, :4]) * x[:, 4:])

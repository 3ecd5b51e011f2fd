"""Experts in Triton: routes, groups of rows, and the weighted sum of gated MLPs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from graft.models.kernels.experts import mix_experts
from graft.models.kernels.gate import Clamp
from graft.models.kernels.products import router_logits
from graft.models.kernels.routing import choose_and_weigh, group_rows, rows_apart
from graft.models.layers.experts import ExpertMLP, route
from graft.models.shape import Experts, ModelShape

EXPERTS = Experts(count=6, top_k=2, ff=24)
SHAPE = ModelShape(family="qwen3_moe", width=40, experts=EXPERTS)
KINDS = [EXPERTS, replace(EXPERTS, biased=True, swiglu_limit=1.0, swiglu_alpha=1.2)]
"""Those of most families, and with biases and clamped gates as gpt-oss has them."""
DTYPES = [torch.float32, torch.bfloat16]


def drawn(device: torch.device, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device)


def plain_mix(given: list[Tensor], chosen: Tensor, experts: Experts) -> Tensor:
    """The weighted sum by a layer with what `drawn_layer` returns."""
    layer = ExpertMLP(SHAPE, experts)
    x, layer.gate_up.weight, layer.down.weight, weights, *biases = given
    if biases:
        layer.gate_up.bias, layer.down.bias = biases
    return layer._mix(x, weights, chosen)


def mix(given: list[Tensor], chosen: Tensor, experts: Experts) -> Tensor:
    """The same by the kernels."""
    clamp = Clamp(experts.swiglu_limit, experts.swiglu_alpha)
    x, gate_up, down, weights, *biases = given
    groups = group_rows(chosen, experts.count)
    return mix_experts(x, gate_up, down, weights, groups, *(biases or [None, None]), clamp)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_routes_are_those_of_the_plain_form(
    router: str, renormalise: bool, kernel_device: torch.device
) -> None:
    experts = replace(
        EXPERTS, router=router, renormalise=renormalise, scaling=1.5, count=9, top_k=3
    )
    logits = drawn(kernel_device, 7, 9)
    correction = drawn(kernel_device, 9) if router == "sigmoid" else None
    weights, chosen = choose_and_weigh(logits, correction, 3, renormalise, 1.5)
    plain_weights, plain_chosen = route(
        logits.cpu(), experts, None if correction is None else correction.cpu()
    )
    assert chosen.tolist() == plain_chosen.tolist()
    torch.testing.assert_close(weights.cpu(), plain_weights)


def test_of_equal_experts_the_first_is_chosen(kernel_device: torch.device) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 1.0]], device=kernel_device)
    assert choose_and_weigh(logits, None, 3, False, 1.0)[1].tolist() == [[1, 2, 0]]


def test_rows_are_grouped_by_expert(kernel_device: torch.device) -> None:
    chosen = torch.tensor([[0, 3], [3, 1], [0, 3]], dtype=torch.int32, device=kernel_device)
    groups = group_rows(chosen, 5)
    assert groups.order.tolist() == [0, 4, 3, 1, 2, 5]
    assert groups.starts.tolist() == [0, 2, 3, 3, 6, 6] and groups.count == 5
    assert groups.experts.tolist() == [0, 1, 3, 5, 5, 5] and groups.height == 16
    assert groups.first.tolist()[:3] == [0, 2, 3]


def test_numbers_of_experts_are_short_whatever_chose_them(kernel_device: torch.device) -> None:
    """torch.topk gives int64, of which Triton 3.6 makes no histogram."""
    chosen = torch.tensor([[0, 3], [3, 1]], device=kernel_device)
    groups = group_rows(chosen, 5)
    assert groups.chosen.dtype == torch.int32 and groups.order.tolist() == [0, 3, 1, 2]


def test_a_full_expert_has_several_tiles(kernel_device: torch.device) -> None:
    chosen = torch.full((37, 1), 2, dtype=torch.int32, device=kernel_device)
    groups = group_rows(chosen, 5)
    assert groups.experts.tolist()[:3] == [2, 2, 2] and set(groups.experts.tolist()[3:]) == {5}
    assert groups.first.tolist()[:3] == [0, 16, 32] and groups.order.tolist() == [*range(37)]


def test_rows_apart_have_the_bits_of_grouped_ones(kernel_device: torch.device) -> None:
    """Also where two tokens have an expert in common."""
    x, gate_up, down, weights, chosen = inputs(kernel_device, 3)
    chosen[1] = chosen[0].flip(0)
    with torch.no_grad():
        grouped, apart = (
            mix_experts(x, gate_up, down, weights, groups)
            for groups in (group_rows(chosen, 6), rows_apart(chosen, 6))
        )
    assert torch.equal(grouped, apart) and grouped.abs().min() > 0


def inputs(device: torch.device, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, gate_up = drawn(device, tokens, 40), drawn(device, 6 * 48, 40) / 6
    down, weights = drawn(device, 6 * 40, 24) / 5, drawn(device, tokens, 2).abs()
    chosen = drawn(device, tokens, 6).topk(2).indices.int()
    chosen[0] = torch.tensor([4, 2])  # expert 5 may have no row; this is no concern of the others
    return x, gate_up, down, weights, chosen


def drawn_layer(
    device: torch.device, tokens: int, experts: Experts, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """Tokens, matrices, weights of the choice in fp32, and biases if there are; and the choice."""
    x, gate_up, down, weights, chosen = inputs(device, tokens)
    given = [x.to(dtype), gate_up.to(dtype), down.to(dtype), weights]
    if experts.biased:
        given += [drawn(device, 6 * 48).to(dtype), drawn(device, 6 * 40).to(dtype)]
    return given, chosen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", KINDS)
def test_values_and_gradients_are_those_of_the_plain_form(
    experts: Experts, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    given, chosen = drawn_layer(kernel_device, 37, experts, dtype)
    factor = drawn(kernel_device, 37, 40)
    ours = [value.clone().requires_grad_() for value in given]
    theirs = [torch.nn.Parameter(value.cpu().float()) for value in given]
    got = mix(ours, chosen, experts)
    (got * factor).sum().backward()
    want = plain_mix(theirs, chosen.cpu().long(), experts)
    (want * factor.cpu()).sum().backward()
    pairs = [(got, want), *((a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))]
    for mine, plain in pairs:
        assert mine is not None and mine.dtype in (dtype, torch.float32)
        # by their lengths: in bf16 a number near a limit may be on its other side
        error = (mine.detach().cpu().float() - plain).norm() / plain.norm()
        assert error < (1e-5 if dtype == torch.float32 else 0.1)


def test_gradients_are_added_to_sums_that_weights_have(kernel_device: torch.device) -> None:
    x, gate_up, down, weights, chosen = inputs(kernel_device, 5)
    apart = [value.clone().requires_grad_() for value in (gate_up, down)]
    mix_experts(x, *apart, weights, group_rows(chosen, 6)).sum().backward()
    summed = [value.clone().requires_grad_() for value in (gate_up, down)]
    for weight in summed:
        weight.grad_sum = torch.ones_like(weight)
    mix_experts(x, *summed, weights, group_rows(chosen, 6)).sum().backward()
    for one, other in zip(apart, summed, strict=True):
        assert one.grad is not None and other.grad is None
        torch.testing.assert_close(other.grad_sum, one.grad + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", KINDS)
def test_a_token_has_the_bits_that_it_has_among_others(
    experts: Experts, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    (x, gate_up, down, weights, *biases), chosen = drawn_layer(kernel_device, 60, experts, dtype)
    router = drawn(kernel_device, 6, 40).to(dtype)
    logits = router_logits(x, router)
    whole = mix([x, gate_up, down, weights, *biases], chosen, experts)  # as in training
    with torch.no_grad():
        for start, stop in ((0, 1), (19, 22), (5, 39)):
            part = slice(start, stop)
            assert torch.equal(router_logits(x[part], router), logits[part])
            alone = mix([x[part], gate_up, down, weights[part], *biases], chosen[part], experts)
            assert torch.equal(alone, whole[part])


def test_router_logits_are_fp32_and_differentiable(kernel_device: torch.device) -> None:
    x = drawn(kernel_device, 5, 40).requires_grad_()
    weight = drawn(kernel_device, 6, 40).requires_grad_()
    logits = router_logits(x, weight)
    assert logits.dtype == torch.float32
    logits.square().sum().backward()
    expected = (x @ weight.T).detach()
    torch.testing.assert_close(logits.detach(), expected)
    torch.testing.assert_close(x.grad, 2 * expected @ weight.detach(), atol=5e-5, rtol=1e-5)
    torch.testing.assert_close(weight.grad, 2 * expected.T @ x.detach())

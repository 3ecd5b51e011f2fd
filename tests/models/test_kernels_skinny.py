"""Products of a few rows, with norm or gate in front, against the functions they stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graft.models.ops import add_norm, gate_product


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 64, 40), (3, 576, 33), (4, 1030, 16), (2, 5, 3)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_few_rows_times_a_matrix(rows, inputs, outputs, has_bias, kernel_device):
    from graft.models.kernels.skinny import skinny_linear

    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int):
        return torch.randn(*shape, generator=generator).to(kernel_device)

    x, delta, scale = draw(rows, inputs), draw(rows, inputs), draw(inputs)
    weight, bias = draw(outputs, inputs), draw(outputs) if has_bias else None
    close = {"atol": 1e-4, "rtol": 1e-4}

    same, plain = skinny_linear(x, weight, bias)
    assert same is x
    torch.testing.assert_close(plain, F.linear(x, weight, bias), **close)

    total, normed = skinny_linear(x, weight, bias, norm=(delta, scale, 1e-6, False))
    torch.testing.assert_close(total, x + delta)
    want = F.linear(add_norm(x + delta, None, scale, 1e-6)[1], weight, bias)
    torch.testing.assert_close(normed, want, **close)

    same, normed = skinny_linear(x, weight, bias, norm=(None, scale, 1e-6, False))
    assert same is x
    torch.testing.assert_close(
        normed, F.linear(add_norm(x, None, scale, 1e-6)[1], weight, bias), **close
    )

    same, normed = skinny_linear(x, weight, bias, norm=(None, scale, 1e-6, True))
    want = F.linear(add_norm(x, None, 1 + scale, 1e-6)[1], weight, bias)
    torch.testing.assert_close(normed, want, **close)

    gate_up = draw(rows, 2 * inputs)
    for activation in ("silu", "gelu_tanh"):
        _, gated = skinny_linear(gate_up, weight, bias, gate=activation)
        torch.testing.assert_close(
            gated, F.linear(gate_product(gate_up, activation), weight, bias), **close
        )

"""Keys and values in eight bits: worked by hand, in kernels, and with gradients that pass them by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graft.engine.native.kv.pages import kv_bytes
from graft.models.kv_slots import dequantise, quantise, round_rows
from graft.models.shape import ModelShape

DTYPES = [torch.float32, torch.bfloat16]


def rounded(*numbers: float, dtype: torch.dtype = torch.float32) -> list[float]:
    return round_rows(torch.tensor([numbers], dtype=dtype))[0].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_have_four_significant_bits_below_the_largest_of_their_row(dtype) -> None:
    codes, scales = quantise(torch.tensor([[3.125, -0.0195, 0.0001]], dtype=dtype))
    assert scales.tolist() == [2.0**-6]  # 3.125 * 2 ** 6 = 200, between 128 and 256
    # 200 is as far from 192 as from 208, whose fraction is odd; -1.25; 3 * 2 ** -9
    assert codes.tolist() == [[0b0_1110_100, 0b1_0111_010, 3]]
    assert rounded(3.125, -0.0195, 0.0001, dtype=dtype) == [3.0, -1.25 / 64, 3 * 2**-15]


def test_a_number_that_rounds_into_the_next_power_of_two_moves_the_scale() -> None:
    codes, scales = quantise(torch.tensor([[1.9374, 0.0], [1.9375, 0.0], [2.0, 0.0]]))
    assert scales.tolist() == [2.0**-7, 2.0**-6, 2.0**-6]
    assert codes[:, 0].tolist() == [0b0_1110_111, 0b0_1110_000, 0b0_1110_000]  # 240, 128, 128
    assert rounded(1.9374) == [1.875] and rounded(1.9375) == [2.0]


def test_zeros_stay_zeros_and_tiny_rows_are_rounded_in_steps_of_their_own() -> None:
    assert quantise(torch.zeros(2, 3))[0].tolist() == [[0] * 3] * 2
    assert rounded(0.0, -0.0) == [0.0, 0.0]
    step = 2.0**-69
    assert rounded(1.4 * step, -0.5 * step, 0.6 * step) == [step, 0.0, step]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_rows_stay_finite(dtype) -> None:
    largest = float(torch.tensor(torch.finfo(torch.bfloat16).max))
    assert rounded(largest, -largest, 2.0**120, dtype=dtype) == [
        1.875 * 2.0**127,
        -1.875 * 2.0**127,
        2.0**120,
    ]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_with_a_number_that_is_not_finite_is_nan(bad: float, dtype) -> None:
    rows = torch.tensor([[1.0, bad, 2.0], [1.0, 0.5, 2.0]], dtype=dtype)
    found = round_rows(rows)
    assert found[0].isnan().all() and found[1].tolist() == [1.0, 0.5, 2.0]


def spread(rows: int, size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of many magnitudes, with numbers of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.randint(-60, 100, (rows, 1), generator=generator)
    within = torch.randint(-18, 1, (rows, size), generator=generator)
    numbers = torch.randn(rows, size, generator=generator).clamp(-4, 4)
    return (numbers * 2.0**magnitude * 2.0**within).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rounded_row_is_rounded_to_itself_and_is_the_nearest(dtype) -> None:
    rows = spread(4000, 16, dtype=dtype)
    found = round_rows(rows)
    assert torch.equal(round_rows(found), found) and found.dtype == dtype
    wide, back = rows.double(), found.double()
    step = (wide.abs().amax(1, keepdim=True) * 2.0**-16).clamp(min=2.0**-69)
    error = (wide - back).abs()
    assert bool((error <= torch.maximum(wide.abs() / 16, step)).all())
    assert 0.01 < float((error / wide.abs().clamp(min=1e-300)).median()) < 0.05


def test_bfloat16_and_float32_are_rounded_alike() -> None:
    rows = spread(1000, 16, dtype=torch.bfloat16)
    assert torch.equal(round_rows(rows).float(), round_rows(rows.float()))


def test_the_gradient_is_that_of_rows_that_are_not_rounded() -> None:
    rows = torch.tensor([[3.1, -0.7], [0.0, 5.0]], requires_grad=True)
    (round_rows(rows) * torch.tensor([2.0, 3.0])).sum().backward()
    assert rows.grad is not None and rows.grad.tolist() == [[2.0, 3.0], [2.0, 3.0]]


def test_a_token_takes_a_byte_for_a_number_and_two_for_a_row() -> None:
    shape = ModelShape(layers=3, kv_heads=2, head_dim=64)
    assert kv_bytes(shape, torch.bfloat16) == 2 * 3 * 2 * 128
    assert kv_bytes(shape, torch.bfloat16, rounds=True) == 2 * 3 * 2 * 66


def kernel_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and rows of values [T, K, d], by the kernel that the engine and the learner share."""
    from graft.models.angles import HeadRotation
    from graft.models.kernels.rope import qk_rotate, qk_rotate_to_slots
    from graft.models.kv_slots import KVSlots

    count, heads, size = rows.shape
    values = rows.flatten(1)
    qkv = torch.cat([torch.zeros_like(values[:, :size]), torch.zeros_like(values), values], 1)
    angles = torch.ones(count, size // 2), torch.zeros(count, size // 2)
    cos, sin = (angle.to(rows.device) for angle in angles)
    how = HeadRotation(None, None, 1e-6, cos, sin, 1, heads, rounds_kv=True)
    pool = torch.full((1, 2, count, heads, 16, size), 255, dtype=torch.uint8, device=rows.device)
    where = torch.arange(count, device=rows.device)
    places = where[:, None].int(), where, where * 0 + 5, where * 0 + 6
    slots = KVSlots(pool, *places, pool[..., 0].bfloat16())
    qk_rotate_to_slots(qkv, how, slots, 0)
    assert slots.scales is not None
    return pool[0, 1, :, :, 5], slots.scales[0, 1, :, :, 5], qk_rotate(qkv, how)[2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_make_the_same_codes_and_rows(dtype, kernel_device) -> None:
    rows = spread(600, 16, 1, dtype).to(kernel_device)
    rows[0], rows[1, 3], rows[2, 5], rows[3] = 0.0, torch.nan, -torch.inf, torch.finfo(dtype).max
    rows[4], rows[5] = torch.linspace(1.9, 1.95, 16), 2.0**-100
    codes, scales, found = kernel_rows(rows.view(5, 120, 16))
    rows = rows.view(5, 120, 16)
    want, want_scales = quantise(rows)
    torch.testing.assert_close(scales, want_scales, rtol=0, atol=0, equal_nan=True)
    is_finite = ~scales.isnan()
    assert int((~is_finite).sum()) == 2
    assert torch.equal(codes[is_finite], want[is_finite])
    torch.testing.assert_close(found, round_rows(rows), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found[is_finite], dequantise(codes, scales, dtype)[is_finite])


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_round_bfloat16_as_the_specification_does(dtype, kernel_device) -> None:
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite()].to(dtype)
    if kernel_device.type == "cpu":  # the interpreter takes its time
        numbers = numbers[5::32]
    beside = torch.ones_like(numbers).to(dtype)
    pairs = torch.stack([numbers, beside, numbers / 8, beside * 100], 1)
    rows = torch.nn.functional.pad(pairs, (0, 12)).view(-1, 255, 16)
    _, _, found = kernel_rows(rows.to(kernel_device))
    assert torch.equal(found.cpu(), round_rows(rows))

from __future__ import annotations

import torch

from graft.algos.masked import (
    keep,
    masked_mean,
    masked_whiten,
    number,
    segment_mean,
    segment_std,
)

NAN, INF = float("nan"), float("inf")


def test_keep_drops_nan_and_inf_in_value_and_gradient():
    x = torch.tensor([1.0, NAN, -INF, 2.0], requires_grad=True)
    kept = keep(x, torch.tensor([True, False, False, True]))
    assert kept.tolist() == [1, 0, 0, 2]
    kept.square().sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 0, 0, 4]


def test_means_of_nothing_are_zero():
    x, mask = torch.tensor([[1.0, 3.0], [5.0, NAN]]), torch.tensor([[True, True], [False, False]])
    assert masked_mean(x, mask).item() == 2
    assert masked_mean(x, mask, dim=1).tolist() == [2, 0]
    assert masked_mean(x, torch.zeros_like(mask)).item() == 0
    assert masked_whiten(x, torch.zeros_like(mask)).tolist() == [[0, 0], [0, 0]]


def test_whitening_ignores_masked_entries():
    x = torch.tensor([[3.0, 1.0, 100.0], [NAN, 3.0, 1.0]])
    mask = torch.tensor([[True, True, False], [False, True, True]])
    want = torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]])  # mean 2, population std 1
    torch.testing.assert_close(masked_whiten(x, mask), want, atol=1e-5, rtol=0)


def test_segments_are_averaged_apart():
    x, segment = torch.tensor([1.0, 5.0, 3.0]), torch.tensor([0, 2, 0])
    assert segment_mean(x, segment, 3).tolist() == [2, 0, 5]
    assert segment_std(x, segment, 3).tolist() == [1, 0, 0]
    torch.testing.assert_close(
        segment_std(x, segment, 3, unbiased=True)[0], torch.tensor(2.0).sqrt()
    )


def test_the_mean_of_equal_numbers_is_that_number_to_the_bit():
    for value in (-0.1, 0.1, 0.3, 1e-8, 1e8):
        for count in (3, 7, 128, 1000):
            x = torch.full((count,), value)
            assert (segment_mean(x, torch.zeros(count, dtype=torch.long), 1) == x[0]).all()
            assert segment_std(x, torch.zeros(count, dtype=torch.long), 1).item() == 0


def test_ids_are_numbered_in_ascending_order():
    numbers, count = number(torch.tensor([7, 3, 7, 40]))
    assert numbers.tolist() == [1, 0, 1, 2] and count == 3

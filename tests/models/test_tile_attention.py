"""Attention in tiles: values and gradients are those of one softmax."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from graft.models import tile_attention
from graft.models.tile_attention import attend_rows

HEADS, KV_HEADS, QUERIES, KEYS, SIZE = 6, 2, 5, 64, 8


def drawn(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def one_softmax(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
    """A sink is the score of a key whose value is 0."""
    by_row = sinks.view(KV_HEADS, -1).repeat_interleave(QUERIES, 1)[None, :, :, None]
    scores = q @ k.transpose(2, 3) / math.sqrt(SIZE) + bias
    scores = torch.cat([scores, by_row.expand(len(q), -1, -1, -1)], -1)
    return scores.softmax(-1) @ torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("tile", [16, 256])
def test_sinks_take_their_share_in_values_and_gradients(
    window: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_attention, "TILE", tile)
    rows = HEADS // KV_HEADS * QUERIES
    back = torch.tensor([3, 17, 30, 47, 60])[:, None] - torch.arange(KEYS)
    seen = (back >= 0) & (back < window) if window else back >= 0
    bias = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
    bias = bias.repeat(HEADS // KV_HEADS, 1)[None, None].expand(2, -1, -1, -1)
    sizes = [(2, KV_HEADS, rows, SIZE), *[(2, KV_HEADS, KEYS, SIZE)] * 2]
    inputs = [drawn(*size, seed=number) for number, size in enumerate(sizes)]
    sinks, weight = drawn(HEADS, seed=7), drawn(*sizes[0], seed=8)
    found: list[list[Tensor]] = []
    for attend in (
        lambda q, k, v, s: attend_rows(q, k, v, bias, window > 0, s),
        lambda q, k, v, s: one_softmax(q, k, v, bias, s),
    ):
        leaves = [x.clone().requires_grad_() for x in (*inputs, sinks)]
        output = attend(*leaves)
        (output * weight).sum().backward()
        found.append([output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert len(found[0]) == 5
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-4)


def test_sinks_in_another_dtype() -> None:
    q, k, v = (drawn(1, KV_HEADS, n, SIZE, seed=n) for n in (HEADS // KV_HEADS * QUERIES, 32, 32))
    bias, sinks = torch.zeros(1, 1, 1, 32), drawn(HEADS, seed=7)
    kind = torch.bfloat16
    found = attend_rows(q.to(kind), k.to(kind), v.to(kind), bias, sinks=sinks.to(kind))
    assert found.dtype == kind
    wanted = one_softmax(q, k, v, bias, sinks)
    torch.testing.assert_close(found.float(), wanted, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("size", [64, 128, 192, 256])
def test_a_row_has_the_same_bits_among_any_number_of_rows(size: int) -> None:
    """MKL multiplies few rows of large heads by other instructions: hence `padded_rows`."""
    q, k, v = (
        drawn(1, 1, 96, size, seed=1),
        drawn(1, 1, 64, size, seed=2),
        drawn(1, 1, 64, size, seed=3),
    )
    bias = torch.zeros(1, 1, 1, 64)
    whole = attend_rows(q, k, v, bias)
    other = [
        rows
        for rows in range(1, 65)
        if not torch.equal(attend_rows(q[:, :, :rows], k, v, bias), whole[:, :, :rows])
    ]
    assert other == []

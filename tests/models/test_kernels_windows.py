"""Attention with windows by the kernels: what a token sees is counted along its own path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from graft.models.tree.attention import KernelAttention, TreeAttention
from graft.models.tree.block_lists import HELD_KEYS, KEYS, QUERIES, BlockLists, first_seen
from graft.models.tree.packing import TokenRun, interval_mask

pytest.importorskip("triton")

from tests.models.test_kernels_interval import inputs as noise
from tests.models.test_kernels_interval import results, walked
from tests.models.test_kernels_path import assert_paths_alone_have_the_same_bits, grown, rows_of

CPU = torch.device("cpu")
WINDOWS = (1, 7, 70, 1000)


def window_mask(runs: list[TokenRun], window: int) -> Tensor:
    """[L, L]: a token sees the last tokens of its path, itself included."""
    mask = torch.zeros(runs[-1].stop, runs[-1].stop, dtype=torch.bool)
    for run in runs:
        path = rows_of(run)
        for position in range(run.depth, len(path)):
            mask[path[position], path[max(0, position - window + 1) : position + 1]] = True
    return mask


@pytest.mark.parametrize("window", WINDOWS)
def test_first_rows_say_what_a_window_holds(window: int) -> None:
    runs, ends = grown(np.random.default_rng(1), 40)
    begins = torch.from_numpy(first_seen(runs, window))
    seen = interval_mask(ends) & (torch.arange(len(ends)) >= begins[:, None])
    assert torch.equal(seen, window_mask(runs, window))


def test_empty_parts_of_a_path_hold_no_first_row() -> None:
    runs = [TokenRun(0, 10, []), TokenRun(10, 13, [(0, 7), (10, 10)])]
    assert first_seen(runs, 2).tolist() == [0, *range(9), 6, 10, 11]


@pytest.mark.parametrize("window", WINDOWS)
def test_blocks_hold_each_pair_with_a_visible_key(window: int) -> None:
    """Once; those without a mask are visible wholly, and blocks before all windows are left out."""
    runs, ends = grown(np.random.default_rng(2), 150)
    blocks = BlockLists.of(ends, CPU, window, runs)
    mask = window_mask(runs, window)
    for keys in (KEYS, HELD_KEYS):
        height, width = -(-len(ends) // QUERIES), -(-len(ends) // keys)
        padded = torch.zeros(height * QUERIES, width * keys, dtype=torch.bool)
        padded[: len(ends), : len(ends)] = mask
        tiles = padded.view(height, QUERIES, width, keys)
        some, every = tiles.any(3).any(1), tiles.all(3).all(1)
        for items, lists, is_turned in (
            (blocks.query_items, blocks.query_lists, False),
            (blocks.key_items, blocks.key_lists, True),
        ):
            shape = (width, height) if is_turned else (height, width)
            times, bare = walked(items, lists, shape)
            if is_turned:
                times, bare = times.T, bare.T
            assert int(times.max()) == 1 and torch.equal(bare, every.long())
            assert bool((times >= some.long()).all())
    chain = BlockLists.of(torch.full((640,), 640), CPU, 65, [TokenRun(0, 640, [])])
    assert len(chain.query_lists) - 1 == 10 + 9 and len(chain.key_lists) - 1 == 10 + 9


SIBLINGS = [TokenRun(0, 70, []), *(TokenRun(s, s + 45, [(0, 70)]) for s in (70, 115))]
SIBLING_ENDS = torch.tensor([160] * 70 + [115] * 45 + [160] * 45)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(("window", "heads", "kv_heads"), [(5, 1, 1), (66, 2, 1), (100, 1, 1)])
@pytest.mark.usefixtures("poison")
def test_output_and_gradients_are_those_of_the_plain_path(
    window: int, heads: int, kv_heads: int, in_order: bool, kernel_device: torch.device
) -> None:
    """Layer 0 has the window, layer 1 sees all."""
    of_heads, windows = (heads, kv_heads, kernel_device), (window, 0)
    tensors = noise(len(SIBLING_ENDS), heads, kv_heads, 16, kernel_device)
    kernel = KernelAttention(SIBLINGS, SIBLING_ENDS, *of_heads, in_order, windows)
    plain = TreeAttention(SIBLINGS, *of_heads, windows)
    grad = torch.randn_like(tensors[0])
    got, want = (results(lambda *x, of=of: of(0, *x), tensors, grad) for of in (kernel, plain))
    got.append(kernel(1, *tensors))
    want.append(plain(1, *tensors))
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("window", [30, 100, 300])
def test_a_path_alone_has_the_bits_that_it_has_in_a_forest(
    window: int, kernel_device: torch.device
) -> None:
    """Two segments; a tile that begins elsewhere sees blocks that this one does not."""
    runs = [TokenRun(0, 50, [])] + [TokenRun(s, s + 290, [(0, 50)]) for s in (50, 340)]
    ends = torch.tensor([630] * 50 + [340] * 290 + [630] * 290)
    tensors = [x.bfloat16() for x in noise(len(ends), 1, 1, 16, kernel_device)]
    assert_paths_alone_have_the_same_bits(runs, ends, runs[2:], tensors, window)

"""Attention by position: its blocks, its values and gradients, and bits that depend on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from graft.models.tree.block_lists import BlockLists
from graft.models.tree.packing import TokenRun
from graft.models.tree.path_blocks import BLOCK, SEGMENT, PathBlocks

pytest.importorskip("triton")

from graft.models.kernels.path_attention import path_attention
from tests.models.test_kernels_interval import dense, results
from tests.models.test_kernels_interval import inputs as noise

CPU = torch.device("cpu")


def grown(rng: np.random.Generator, longest: int, depth: int = 3) -> tuple[list[TokenRun], Tensor]:
    """A random tree as runs, and the `ends` of its tokens."""
    runs: list[TokenRun] = []
    ends: list[int] = []

    def grow(path: list[tuple[int, int]], left: int) -> None:
        start = len(ends)
        stop = start + int(rng.integers(1, longest + 1))
        runs.append(TokenRun(start, stop, path))
        ends.extend([0] * (stop - start))
        for _ in range(int(rng.integers(2, 4)) if left and rng.random() < 0.8 else 0):
            grow([*path, (start, stop)], left - 1)
        ends[start:stop] = [len(ends)] * (stop - start)

    grow([], depth)
    return runs, torch.tensor(ends)


def rows_of(run: TokenRun) -> list[int]:
    """The forest's rows of a run's whole path."""
    return [row for part in [*run.path, (run.start, run.stop)] for row in range(*part)]


def test_the_blocks_of_a_path_are_its_tokens_by_position() -> None:
    runs, _ = grown(np.random.default_rng(0), 90)
    found = PathBlocks.of(runs, CPU)
    starts = {int(tile[0]): tile.tolist() for tile in found.tiles}
    seen: list[int] = []
    for run in runs:
        path = rows_of(run)
        for first in range(run.start, run.stop, BLOCK):
            _, count, position, at = starts[first]
            assert path[position : position + count] == list(range(first, first + count))
            seen += range(first, first + count)
            num_blocks = -(-(position + count) // BLOCK)
            table = found.table[at : at + num_blocks].tolist()
            keys = [row for block in table for row in found.index[block * BLOCK :][:BLOCK].tolist()]
            assert keys[: position + count] == path[: position + count]
    assert sorted(seen) == list(range(runs[-1].stop))


def test_a_block_that_paths_share_is_listed_once() -> None:
    prompt = TokenRun(0, 130, [])
    runs = [prompt, TokenRun(130, 140, [(0, 130)]), TokenRun(140, 150, [(0, 130)])]
    found = PathBlocks.of(runs, CPU)
    assert found.table.tolist() == [0, 1, 2, 0, 1, 3, 0, 1, 4]
    assert found.index[3 * BLOCK :][:12].tolist() == [128, 129, *range(130, 140)]
    assert found.index[4 * BLOCK :][:12].tolist() == [128, 129, *range(140, 150)]


def test_an_empty_run_and_a_part_of_a_run_may_be_in_a_path() -> None:
    """Empty spans of a tree, and texts that are scored from the middle."""
    runs = [TokenRun(0, 100, []), TokenRun(100, 110, [(0, 70), (100, 100)])]
    found = PathBlocks.of(runs, CPU)
    assert found.table.tolist() == [0, 1, 0, 2]
    assert found.index[2 * BLOCK :][:8].tolist() == [64, 65, 66, 67, 68, 69, 100, 101]


def attend(
    q: Tensor, k: Tensor, v: Tensor, runs: list[TokenRun], ends: Tensor, window: int = 0
) -> Tensor:
    device = q.device
    blocks = BlockLists.of(ends, device, window, runs)
    return path_attention(q, k, v, PathBlocks.of(runs, device), blocks)


FORK = [TokenRun(0, 70, []), TokenRun(70, 75, [(0, 70)]), TokenRun(75, 83, [(0, 70)])]
FORK_ENDS = torch.tensor([83] * 70 + [75] * 5 + [83] * 8)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(2, 1, 16), (1, 1, 24)])
def test_output_and_gradients_are_those_of_a_dense_softmax(
    heads: int, kv_heads: int, size: int, kernel_device: torch.device
) -> None:
    tensors = noise(len(FORK_ENDS), heads, kv_heads, size, kernel_device)
    grad = torch.randn_like(tensors[0])
    got = results(lambda *x: attend(*x, FORK, FORK_ENDS), tensors, grad)
    want = results(lambda *x: dense(*x, FORK_ENDS), tensors, grad)
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other.to(mine.dtype), atol=2e-5, rtol=2e-5)


def assert_paths_alone_have_the_same_bits(
    runs: list[TokenRun],
    ends: Tensor,
    chosen: list[TokenRun],
    tensors: list[Tensor],
    window: int = 0,
) -> None:
    whole = attend(*tensors, runs, ends, window)
    for run in chosen:
        path = torch.tensor(rows_of(run), device=whole.device)
        alone = [TokenRun(0, len(path), [])]
        its_ends = torch.full((len(path),), len(path))
        found = attend(*(x[path] for x in tensors), alone, its_ends, window)
        assert torch.equal(found, whole[path])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_path_alone_has_the_bits_that_it_has_in_a_forest(
    dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """Two segments; other borders of tiles and of packed blocks."""
    runs = [TokenRun(0, 50, [])] + [TokenRun(s, s + 210, [(0, 50)]) for s in (50, 260)]
    ends = torch.tensor([470] * 50 + [260] * 210 + [470] * 210)
    tensors = [x.to(dtype) for x in noise(len(ends), 1, 1, 16, kernel_device)]
    assert_paths_alone_have_the_same_bits(runs, ends, runs[2:], tensors)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 4])
def test_paths_of_random_trees_have_the_bits_that_they_have_in_a_forest(
    seed: int, kernel_device: torch.device
) -> None:
    runs, ends = grown(np.random.default_rng(seed), 150)
    assert max(run.depth + run.stop - run.start for run in runs) > BLOCK * SEGMENT
    tensors = noise(len(ends), 2, 1, 16, kernel_device)
    assert_paths_alone_have_the_same_bits(runs, ends, runs[2::3], tensors)

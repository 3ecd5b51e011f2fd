"""One layer's attention by itself: what sharing pages brings, and what training reaches.

Heads of Qwen3-0.6B (16 query heads on 8 of 128). Decoding is timed inside a graph, as it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.report import Row
from benchmarks.gpu.roofs import READ, UNMEASURED

HEADS, KV_HEADS, SIZE, PAGE = 16, 8, 128, 64
FAMILIES = ((64, 8, 256, 256), (16, 16, 4096, 512), (32, 16, 1024, 512))
"""Groups, rows of a group, tokens they share, tokens of their own: the middle of a rollout."""
CALLS = 20


def decoding(bench: Bench) -> list[Row]:
    """Microseconds a layer with shared pages read once, and read by every row."""
    if bench.device.type != "cuda":
        return []
    table: list[Row] = []
    for groups, members, shared, own in FAMILIES:
        pages = _sibling_table(groups, members, shared // PAGE, own // PAGE)
        once, by_all = (
            _decode(bench, pages, shared + own, is_shared) for is_shared in (True, False)
        )
        unique = len(np.unique(pages)) * PAGE * KV_HEADS * SIZE * 2 * 2
        least = unique / bench.roofs.get(READ, UNMEASURED[READ]) / 1e6
        table.append(
            Row(
                f"decode attention {groups}x{members}, {shared} shared + {own}",
                "us",
                median(once),
                is_less_better=True,
                rounds=once,
                note=f"{median(by_all):.0f} us if every row reads all; the bytes take {least:.0f} us",
            )
        )
    return table


def _sibling_table(groups: int, members: int, shared: int, own: int) -> np.ndarray:
    """[rows, pages], scattered over the pool."""
    numbers = np.random.default_rng(0).permutation(groups * (shared + members * own)) + 1
    stems, tails = np.split(numbers, [groups * shared])
    stems = stems.reshape(groups, shared).repeat(members, 0)
    return np.concatenate([stems, tails.reshape(groups * members, own)], 1)


def _decode(bench: Bench, pages: np.ndarray, length: int, is_shared: bool) -> list[float]:
    from graft.engine.native.cuda.kernels.decode import decode, scratch
    from graft.engine.native.kv.sharing import find_sharing

    def device(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(array).to(bench.device, dtype)

    rows = len(pages)
    sharing = find_sharing(pages, HEADS // KV_HEADS, KV_HEADS, splits=1)
    if not is_shared:
        sharing.items, sharing.tails, sharing.slots = (
            sharing.items[:0], sharing.tails * 0, sharing.slots * 0,
        )  # fmt: skip
    slots = 1 + int(sharing.slots.max())
    pool = torch.randn(
        2, int(pages.max()) + 1, KV_HEADS, PAGE, SIZE, device=bench.device, dtype=bench.dtype
    )
    q = torch.randn(rows, HEADS, SIZE, device=bench.device, dtype=bench.dtype)
    inputs = (
        device(pages[sharing.order], torch.int32),
        torch.full((rows,), length, device=bench.device),
        device(sharing.tails),
        device(sharing.items, torch.int32),
        device(sharing.slots),
    )
    space = scratch(rows, slots, HEADS, SIZE, bench.device)

    def once() -> None:
        decode(q, *pool, *inputs, splits=1, slots=slots, tile_rows=sharing.tile_rows, space=space)

    return _microseconds(bench, _captured(once))


def _captured(work: Callable[[], None]) -> Callable[[], None]:
    from graft.engine.native.cuda.graphs import Graphs

    def several() -> None:
        for _ in range(CALLS):
            work()

    return Graphs().record(several)


def _microseconds(bench: Bench, several: Callable[[], None]) -> list[float]:
    several()
    return bench.repeat(lambda: bench.time(several) / CALLS * 1e6)


def training(bench: Bench) -> list[Row]:
    """TFLOP/s of useful pairs, forward and backward, on three trees of 256 + 8 x 512 tokens."""
    if bench.device.type != "cuda":
        return []
    from graft.models.kernels.interval import interval_attention
    from graft.models.tree.block_lists import BlockLists

    tree = [256 + 8 * 512] * 256 + [256 + 512 * (i + 1) for i in range(8) for _ in range(512)]
    ends = torch.tensor([end + number * len(tree) for number in range(3) for end in tree])
    blocks = BlockLists.of(ends, bench.device)
    pairs = float((ends - torch.arange(len(ends))).sum())
    q, k, v = (
        torch.randn(
            len(ends), heads, SIZE, device=bench.device, dtype=bench.dtype, requires_grad=True
        )
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    out = interval_attention(q, k, v, blocks)
    pull = torch.randn_like(out)

    def forward() -> None:
        with torch.no_grad():
            for _ in range(CALLS):
                interval_attention(q, k, v, blocks)

    def backward() -> None:
        for _ in range(CALLS):
            torch.autograd.grad(out, (q, k, v), pull, retain_graph=True)

    table: list[Row] = []
    for name, work, products in (("forward", forward, 2), ("backward", backward, 5)):
        micros = _microseconds(bench, work)
        rates = [products * 2 * pairs * HEADS * SIZE / micro / 1e6 for micro in micros]
        note = f"{median(micros):.0f} us"
        table.append(
            Row(f"training attention, {name}", "TFLOP/s", median(rates), rounds=rates, note=note)
        )
    return table

"""Which blocks of queries see a key of which blocks of keys: the work list of interval attention.

    L tokens; query i sees key j if and only if `j <= i < ends[j]`

    1 2 -> a b c, d e f                      keys    12    ab    cd    ef
    ends 8 8 5 5 5 8 8 8,        queries 12          some
    blocks of two                        ab          full  some
                                         cd          full  some  some
                                         ef          full   .    some  some

`full` pairs of blocks need no mask and come first in a list. The block of c and d includes that of a
and b, which c sees; the block of e and f skips it. The lists are computed on ranges, in about a
millisecond for a micro-batch, while the device computes the previous one.

With a window query i sees no key before `begins[i]`, the first row of its path that is in the window: with a
window of 3 that of e is 1, and that of f is 5. Blocks before all of a query block's are not listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graft.models.tree.packing import TokenRun
from graft.transfer import transfer

QUERIES = 64
"""Queries of a block, in both kinds of lists."""

KEYS = 64
"""Keys of a block in the lists that belong to queries: forward and gradient of q."""

HELD_KEYS = 64
"""Keys of a block that has a list of queries: gradients of k and v."""

MAX_HEAD = 256
"""The largest head size whose tiles fit a program's shared memory."""

MIN_PIECE = 16
"""Query blocks of a list, up to which it is not split."""


@dataclass(slots=True)
class BlockLists:
    """The pairs of blocks to compute, on the device, for all layers with the same window.

    An item is one program's work: [block, begin, middle, stop]; its list is entries begin to stop of
    `lists`, of which those before the middle are full. Items that hold keys have a fifth number, the
    slot for their sum where a list is split into pieces, else -1; `splits` lists those blocks as [block,
    first slot, last slot + 1].
    """

    ends: Tensor  # [L] int32
    query_items: Tensor  # [.., 4]
    query_lists: Tensor
    key_items: Tensor  # [.., 5]
    key_lists: Tensor
    splits: Tensor  # [.., 3]
    num_slots: int
    window: int = 0
    begins: Tensor | None = None  # [L] int32, with a window

    @classmethod
    def of(
        cls,
        ends: Tensor,
        device: torch.device,
        window: int = 0,
        runs: Sequence[TokenRun] = (),
    ) -> BlockLists:
        """Make the lists from `ends` [L] on the CPU, in one copy to the device, without waiting for it.

        window   how many positions of its path a token sees; 0: all
        runs     of these tokens, for a window
        """
        rows = ends.numpy()
        begins = first_seen(runs, window) if window else None
        query, key, is_full = _pairs(rows, QUERIES, KEYS, begins)
        bounds, query_lists = _lists(query, key, is_full)
        numbers = np.arange(len(bounds))[::-1]  # of equals the later first: more keys before it
        query_items = np.column_stack([numbers, bounds[numbers]])
        query, key, is_full = _pairs(rows, QUERIES, HELD_KEYS, begins)
        bounds, key_lists = _lists(key, query, is_full)
        key_items, splits = _pieces(bounds)
        num_slots = int(splits[-1, 2]) if len(splits) else 0
        parts = {
            "ends": rows,
            "query_items": _longest_first(query_items),
            "query_lists": query_lists,
            "key_items": _longest_first(key_items),
            "key_lists": key_lists,
            "splits": splits,
        }
        if begins is not None:
            parts["begins"] = begins
        small = {name: torch.from_numpy(part.astype(np.int32)) for name, part in parts.items()}
        return cls(**transfer(small, device), num_slots=num_slots, window=window)


def first_seen(runs: Sequence[TokenRun], window: int) -> np.ndarray:
    """The row of the first token that each token of the forest sees in its window, [L]."""
    begins = np.zeros(max((run.stop for run in runs), default=0), dtype=np.int64)
    for run in runs:
        starts, stops = np.array([*run.path, (run.start, run.stop)]).T
        before = np.cumsum(stops - starts) - (stops - starts)  # position at which each part begins
        oldest = run.depth + np.arange(run.stop - run.start) - window + 1
        oldest = np.maximum(oldest, 0)
        part = (
            np.searchsorted(before, oldest, side="right") - 1
        )  # of empty parts the one after them
        begins[run.start : run.stop] = starts[part] + oldest - before[part]
    return begins


def _pairs(
    ends: np.ndarray, queries: int, keys: int, begins: np.ndarray | None = None
) -> tuple[np.ndarray, ...]:
    """Query block, key block and whether all is visible, of each pair in which a key is visible.

    Queries that see a key of a block are between its first row and its furthest end; queries that see
    all of it, between its last row and its nearest end: two ranges of query blocks.
    """
    first_key = np.arange(0, len(ends), keys)
    last_key = first_key + keys - 1  # after the last row in an incomplete block: never full
    begin = first_key // queries
    stop = (np.maximum.reduceat(ends, first_key) - 1) // queries + 1
    full_begin = -(-last_key // queries)
    full_stop = np.minimum.reduceat(ends, first_key) // queries  # whole blocks only
    count = stop - begin
    key = np.repeat(np.arange(len(count)), count)
    query = np.arange(len(key)) - (np.cumsum(count) - count - begin)[key]
    is_full = (query >= full_begin[key]) & (query < full_stop[key])
    if begins is None:
        return query, key, is_full
    first_query = np.arange(0, len(ends), queries)
    is_near = last_key[key] >= np.minimum.reduceat(begins, first_query)[query]
    is_full &= first_key[key] >= np.maximum.reduceat(begins, first_query)[query]
    return query[is_near], key[is_near], is_full[is_near]


def _lists(
    owner: np.ndarray, entry: np.ndarray, is_full: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The entries of each owner, full ones first; [owners, 3] begin, middle and stop of its list."""
    key = owner * 2 + ~is_full
    count = np.bincount(key, minlength=int(owner.max()) * 2 + 2).reshape(-1, 2)
    stop = np.cumsum(count.sum(1))
    middle = stop - count[:, 1]
    order = np.argsort(key.astype(np.min_scalar_type(key.max())), kind="stable")
    lists = np.append(entry[order], 0)  # kernels read one entry ahead
    return np.column_stack([middle - count[:, 0], middle, stop]), lists


def _pieces(bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split long lists evenly: items [.., 5] and splits [.., 3] of `BlockLists`.

    The longest piece takes about as long as a few programs of average size on a GPU of some hundred
    multiprocessors, so that no program runs long after all others have ended.
    """
    begin, middle, stop = bounds.T
    length = stop - begin
    longest = max(MIN_PIECE, int(stop[-1]) // 64)
    count = -(-length // longest)
    size = -(-length // count)
    count = -(-length // size)
    block = np.repeat(np.arange(len(bounds)), count)
    number = np.arange(len(block)) - (np.cumsum(count) - count)[block]
    first = begin[block] + number * size[block]
    last = np.minimum(first + size[block], stop[block])
    is_split = count > 1
    slots = np.cumsum(np.where(is_split, count, 0))
    slot = np.where(is_split[block], (slots - count)[block] + number, -1)
    items = np.column_stack([block, first, np.clip(middle[block], first, last), last, slot])
    split = np.flatnonzero(is_split)
    return items, np.column_stack([split, (slots - count)[split], slots[split]])


def _longest_first(items: np.ndarray) -> np.ndarray:
    """Items in steps of twice their mean length, longest first.

    Within a step the order is kept: neighbours then run at the same time and share what they load.
    """
    length = items[:, 3] - items[:, 1]
    step = max(1.0, 2 * float(length.mean()))
    return items[np.argsort(-(length // step), kind="stable")]

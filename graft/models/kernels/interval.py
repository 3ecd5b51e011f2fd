"""Attention over a packed forest on the GPU: flash attention under the interval rule.

    L tokens, H query heads, K key/value heads, G = H / K heads of a group, d head size

Query i sees key j if and only if `j <= i < ends[j]`. The L x L scores are never stored: a program
holds a tile of queries, walks over the tiles of keys that any of them sees, and keeps a running
maximum and sum per row. Which tiles those are is worked out once per forest on the CPU (`Blocks`):

    1 2 -> a b c, d e f                      keys    12    ab    cd    ef
    ends 8 8 5 5 5 8 8 8,        queries 12          some
    blocks of two                        ab          full  some
                                         cd          full  some  some
                                         ef          full   .    some  some

`full` pairs of blocks need no mask and come first in a list. The block of c and d walks that of a
and b for c's sake; the block of e and f skips it.

The backward needs two kernels, each walking lists of its own: one holds queries and walks over keys
for the gradient of q, one holds keys and walks over queries for those of k and v. Nothing is added
atomically, so gradients are the same from run to run. The first block of a prompt is seen by every
sample: its list is cut into pieces, their sums lie in memory and a small kernel adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

QUERIES = 64
"""Queries of a block, in the lists of both directions."""

KEYS = 64
"""Keys of a block in the lists that belong to queries: forward and gradient of q."""

HELD_KEYS = 64
"""Keys of a block that has a list of queries: gradients of k and v."""

SHORTEST_PIECE = 16
"""Lists of so many query blocks are never cut."""


class Tiles(NamedTuple):
    """How one kernel cuts its blocks, and the shape of its programs."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """The kernels' tiles for one kind of heads."""

    pack: int
    """Heads of a group whose queries lie in one tile: each key is loaded once for all of them."""
    forward: Tiles
    grad_q: Tiles
    grad_kv: Tiles


def plan(dtype: torch.dtype, group: int, width: int) -> Plan:
    """Tiles that fit shared memory and registers of an H100 or H200, for head size up to `width`."""
    if dtype == torch.float32:  # exact products run without tensor cores, on small tiles
        tiles = Tiles(16, 16, 8, 1) if width > 64 else Tiles(32, 32, 8, 1)
        return Plan(1, tiles, tiles, tiles)
    # with 2 stages two small programs of wide heads fit a processor: one computes, the other waits
    stages = 2 if width > 64 else 3
    held = Tiles(QUERIES, HELD_KEYS, 4, stages)
    pack = 2 if group % 2 == 0 else 1
    tiles = Tiles(QUERIES, KEYS, 8, 3) if pack == 2 else Tiles(QUERIES, KEYS, 4, stages)
    return Plan(pack, tiles, tiles, held)


@dataclass(slots=True)
class Blocks:
    """The pairs of blocks with anything to compute, on the device: what all layers share.

    An item is one program's work: [block, begin, middle, stop], its list being entries begin to stop
    of `lists`, those before the middle full. Items that hold keys have a fifth number, the slot for
    their sum where a list is cut in pieces, else -1; `cuts` lists those blocks as [block, first
    slot, slot behind the last].
    """

    ends: Tensor  # [L] int32
    query_items: Tensor  # [.., 4]
    query_lists: Tensor
    key_items: Tensor  # [.., 5]
    key_lists: Tensor
    cuts: Tensor  # [.., 3]
    num_slots: int

    @classmethod
    def of(cls, ends: Tensor, device: torch.device) -> Blocks:
        """From `ends` [L] on the CPU, in one copy to the device that nobody waits for."""
        rows = ends.numpy()
        query, key, is_full = _pairs(rows, QUERIES, KEYS)
        bounds, query_lists = _lists(query, key, is_full)
        numbers = np.arange(len(bounds))[::-1]  # the later of equals first: behind more keys
        query_items = np.column_stack([numbers, bounds[numbers]])
        query, key, is_full = _pairs(rows, QUERIES, HELD_KEYS)
        bounds, key_lists = _lists(key, query, is_full)
        key_items, cuts = _pieces(bounds)
        num_slots = int(cuts[-1, 2]) if len(cuts) else 0
        parts = [
            rows,
            _longest_first(query_items),
            query_lists,
            _longest_first(key_items),
            key_lists,
            cuts,
        ]
        # each part begins at a multiple of 16 bytes: kernels are compiled for aligned pointers
        starts = np.cumsum([0] + [-(-part.size // 4) * 4 for part in parts]).tolist()
        pinned = torch.empty(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
        flat = pinned.numpy()
        for start, part in zip(starts, parts, strict=False):
            flat[start : start + part.size] = part.reshape(-1)
        moved = pinned.to(device, non_blocking=True)
        views = [
            moved[start : start + part.size].view(part.shape)
            for start, part in zip(starts, parts, strict=False)
        ]
        return cls(*views, num_slots=num_slots)


def _pairs(ends: np.ndarray, queries: int, keys: int) -> tuple[np.ndarray, ...]:
    """Query block, key block and "everything is visible" of each pair with anything visible.

    Whoever sees anything of a block of keys lies between its first row and its furthest end; whoever
    sees all of it, between its last row and its nearest end: two ranges of query blocks.
    """
    first_key = np.arange(0, len(ends), keys)
    last_key = first_key + keys - 1  # beyond the last row where the block is ragged: never full
    begin = first_key // queries
    stop = (np.maximum.reduceat(ends, first_key) - 1) // queries + 1
    full_begin = -(-last_key // queries)
    full_stop = np.minimum.reduceat(ends, first_key) // queries  # whole blocks: no edge to mind
    count = stop - begin
    key = np.repeat(np.arange(len(count)), count)
    query = np.arange(len(key)) - (np.cumsum(count) - count - begin)[key]
    return query, key, (query >= full_begin[key]) & (query < full_stop[key])


def _lists(
    owner: np.ndarray, entry: np.ndarray, is_full: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The entries of each owner, full ones first; [owners, 3] begin, middle and stop of its list."""
    place = owner * 2 + ~is_full
    count = np.bincount(place, minlength=int(owner.max()) * 2 + 2).reshape(-1, 2)
    stop = np.cumsum(count.sum(1))
    middle = stop - count[:, 1]
    order = np.argsort(place.astype(np.min_scalar_type(place.max())), kind="stable")
    lists = np.append(entry[order], 0)  # kernels read one ahead
    return np.column_stack([middle - count[:, 0], middle, stop]), lists


def _pieces(bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut long lists evenly: items [.., 5] and cuts [.., 3] of `Blocks`.

    The longest piece takes about as long as a GPU of some hundred processors needs for a few
    programs of average size, so none is still at work long after all others are done.
    """
    begin, middle, stop = bounds.T
    length = stop - begin
    longest = max(SHORTEST_PIECE, int(stop[-1]) // 64)
    count = -(-length // longest)
    size = -(-length // count)
    count = -(-length // size)
    block = np.repeat(np.arange(len(bounds)), count)
    number = np.arange(len(block)) - (np.cumsum(count) - count)[block]
    first = begin[block] + number * size[block]
    last = np.minimum(first + size[block], stop[block])
    is_cut = count > 1
    slots = np.cumsum(np.where(is_cut, count, 0))
    slot = np.where(is_cut[block], (slots - count)[block] + number, -1)
    items = np.column_stack([block, first, np.clip(middle[block], first, last), last, slot])
    cut = np.flatnonzero(is_cut)
    return items, np.column_stack([cut, (slots - count)[cut], slots[cut]])


def _longest_first(items: np.ndarray) -> np.ndarray:
    """Items in steps of twice their mean length, longest first.

    Within a step the given order stays: neighbours then run at one time and share what they load.
    """
    length = items[:, 3] - items[:, 1]
    step = max(1.0, 2 * float(length.mean()))
    return items[np.argsort(-(length // step), kind="stable")]


@triton.jit
def _load(pointer, rows, columns, D: tl.constexpr, W: tl.constexpr):
    """[rows, W]: vectors of d numbers at the row offsets; zeros from d to W."""
    pointers = pointer + rows[:, None] + columns[None, :]
    if D == W:
        return tl.load(pointers)
    return tl.load(pointers, mask=columns[None, :] < D, other=0.0)


@triton.jit
def _store(pointer, rows, columns, is_row, values, D: tl.constexpr):
    mask = is_row[:, None] & (columns[None, :] < D)
    values = values.to(pointer.dtype.element_ty)
    tl.store(pointer + rows[:, None] + columns[None, :], values, mask=mask)


@triton.jit
def _round_up(length, block):
    """Row length of lse and delta: whole blocks can be fetched from them."""
    return tl.cdiv(length, block) * block


@triton.jit
def _dot(left, right):
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _add_dot(total, left, right):
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def _fold_keys(
    most, total, seen, q, token,
    k, v, column, ends, lists, begin, stop,
    SCALE: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the key blocks begin to stop of a list into the running maximum, sum and output."""
    TILES: tl.constexpr = BLOCK // N
    place = tl.arange(0, N)
    block = tl.load(lists + begin)
    for at in tl.range(begin * TILES, stop * TILES):
        first = block * BLOCK + (at % TILES) * N
        block = tl.load(lists + (at + 1) // TILES)
        score = _dot(q, tl.trans(k.load([first, column])))
        if IS_MASKED:
            key = first + place
            end = ends.load([first])
            is_seen = (key[None, :] <= token[:, None]) & (token[:, None] < end[None, :])
            score = tl.where(is_seen, score, float("-inf"))
        # a whole number: weights then round alike however keys are cut, here and in the engine
        higher = tl.maximum(most, tl.ceil(tl.max(score, 1) * SCALE))
        told = v.load([first, column])
        # rounded before they are added up: what a row sees is then a true average
        weight = tl.exp2(score * SCALE - higher[:, None]).to(told.dtype)
        shrink = tl.exp2(most - higher)
        total = total * shrink + tl.sum(weight.to(tl.float32), 1)
        seen = _add_dot(seen * shrink[:, None], weight, told)
        most = higher
    return most, total, seen


@triton.jit(do_not_specialize=["length"])
def _forward(
    q, k, v, out, lse, ends, items, lists, length,
    q_stride, q_head,
    SCALE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = Q_BLOCK // M
    item = items + (tl.program_id(1) // TILES) * 4
    first = tl.load(item) * Q_BLOCK + (tl.program_id(1) % TILES) * M
    begin, middle, stop = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    # rows of the tile: M queries of the first head, M of the next; behind the last token its row
    # is computed again and not stored
    row = tl.arange(0, PACK * M)
    here = tl.minimum(row % M, length - 1 - first)
    head = tl.program_id(0) * PACK + row // M
    column = tl.program_id(0) * PACK // GROUP * D  # where its key/value head begins
    columns = tl.arange(0, W)
    token, start = first + here, first.to(tl.int64)
    asked = _load(q + start * q_stride, here * q_stride + head * q_head, columns, D, W)
    most = tl.full([PACK * M], -1e30, tl.float32)  # finite: a row may see nothing of its first tile
    total = tl.zeros([PACK * M], tl.float32)
    seen = tl.zeros([PACK * M, W], tl.float32)
    most, total, seen = _fold_keys(
        most, total, seen, asked, token, k, v, column, ends, lists, begin, middle,
        SCALE, K_BLOCK, N, False,
    )  # fmt: skip
    most, total, seen = _fold_keys(
        most, total, seen, asked, token, k, v, column, ends, lists, middle, stop,
        SCALE, K_BLOCK, N, True,
    )  # fmt: skip
    is_row = first + row % M < length
    target = out + start * (HEADS * D)
    _store(target, here * (HEADS * D) + head * D, columns, is_row, seen / total[:, None], D)
    number = head.to(tl.int64) * _round_up(length, Q_BLOCK) + first + row % M
    tl.store(lse + number, most + tl.log2(total))


@triton.jit
def _fold_grad_q(
    grad_q, q, grad, lse, delta, token,
    k, v, column, ends, lists, begin, stop,
    SCALE: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = BLOCK // N
    place = tl.arange(0, N)
    block = tl.load(lists + begin)
    for at in tl.range(begin * TILES, stop * TILES):
        first = block * BLOCK + (at % TILES) * N
        block = tl.load(lists + (at + 1) // TILES)
        known = k.load([first, column])
        score = _dot(q, tl.trans(known))
        grad_weight = _dot(grad, tl.trans(v.load([first, column])))
        if IS_MASKED:
            key = first + place
            end = ends.load([first])
            is_seen = (key[None, :] <= token[:, None]) & (token[:, None] < end[None, :])
            score = tl.where(is_seen, score, float("-inf"))
        weight = tl.exp2(score * SCALE - lse[:, None])
        grad_score = weight * (grad_weight - delta[:, None])
        grad_q = _add_dot(grad_q, grad_score.to(known.dtype), known)
    return grad_q


@triton.jit(do_not_specialize=["length"])
def _backward_q(
    q, k, v, out, grad, lse, delta, grad_q, ends, items, lists, length,
    q_stride, q_head,
    FACTOR: tl.constexpr, SCALE: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The gradient of q; on its way delta [H, L], the sum of out * grad, for the other kernel."""
    TILES: tl.constexpr = Q_BLOCK // M
    item = items + (tl.program_id(1) // TILES) * 4
    first = tl.load(item) * Q_BLOCK + (tl.program_id(1) % TILES) * M
    begin, middle, stop = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    row = tl.arange(0, PACK * M)
    here = tl.minimum(row % M, length - 1 - first)
    head = tl.program_id(0) * PACK + row // M
    column = tl.program_id(0) * PACK // GROUP * D  # where its key/value head begins
    columns = tl.arange(0, W)
    token, start = first + here, first.to(tl.int64)
    is_row = first + row % M < length
    plain = here * (HEADS * D) + head * D
    told = _load(out + start * (HEADS * D), plain, columns, D, W)
    wanted = _load(grad + start * (HEADS * D), plain, columns, D, W)
    along = tl.sum(told.to(tl.float32) * wanted.to(tl.float32), 1)
    number = head.to(tl.int64) * _round_up(length, Q_BLOCK) + first + row % M
    tl.store(delta + number, along)
    scale = tl.load(lse + number)
    asked = _load(q + start * q_stride, here * q_stride + head * q_head, columns, D, W)
    total = tl.zeros([PACK * M, W], tl.float32)
    total = _fold_grad_q(
        total, asked, wanted, scale, along, token, k, v, column, ends, lists, begin, middle,
        SCALE, K_BLOCK, N, False,
    )  # fmt: skip
    total = _fold_grad_q(
        total, asked, wanted, scale, along, token, k, v, column, ends, lists, middle, stop,
        SCALE, K_BLOCK, N, True,
    )  # fmt: skip
    _store(grad_q + start * (HEADS * D), plain, columns, is_row, total * FACTOR, D)


@triton.jit
def _fold_grad_kv(
    grad_k, grad_v, k, v, key, end,
    q, grad, lse, delta, first_head, lists, begin, stop, padded,
    SCALE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, M: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Scores stand on their side here, [keys, queries]: what a product takes first stays in registers."""
    TURNS: tl.constexpr = GROUP * (BLOCK // M)
    place = tl.arange(0, M)
    block = tl.load(lists + begin)
    for at in tl.range(begin * TURNS, stop * TURNS):
        head = first_head + at % GROUP
        first = block * BLOCK + (at // GROUP) % (BLOCK // M) * M
        block = tl.load(lists + (at + 1) // TURNS)
        asked = q.load([first, head * D])
        wanted = grad.load([first, head * D])
        number = head * padded + first
        score = _dot(k, tl.trans(asked))
        if IS_MASKED:
            token = first + place  # behind the last token: behind every end, so not seen
            is_seen = (key[:, None] <= token[None, :]) & (token[None, :] < end[:, None])
            score = tl.where(is_seen, score, float("-inf"))
        weight = tl.exp2(score * SCALE - lse.load([number])[None, :])
        grad_weight = _dot(v, tl.trans(wanted))
        grad_score = weight * (grad_weight - delta.load([number])[None, :])
        grad_v = _add_dot(grad_v, weight.to(wanted.dtype), wanted)
        grad_k = _add_dot(grad_k, grad_score.to(asked.dtype), asked)
    return grad_k, grad_v


@triton.jit(do_not_specialize=["length"])
def _backward_kv(
    q, k, v, grad, lse, delta, grad_k, grad_v, sums, ends, items, lists, length,
    k_stride, k_head, v_stride, v_head,
    FACTOR: tl.constexpr, SCALE: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The gradients of k and v, or of cut lists their sums [slots, K, 2, K_BLOCK, W]."""
    TILES: tl.constexpr = K_BLOCK // N
    KV_HEADS: tl.constexpr = HEADS // GROUP
    kv_head = tl.program_id(0)
    item = items + (tl.program_id(1) // TILES) * 5
    offset = (tl.program_id(1) % TILES) * N
    first = tl.load(item) * K_BLOCK + offset
    begin, middle, stop = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    slot = tl.load(item + 4)
    place = tl.arange(0, N)
    here = tl.minimum(place, length - 1 - first)
    columns = tl.arange(0, W)
    key, start = first + place, first.to(tl.int64)
    end = tl.load(ends + first + here)
    known = _load(k + start * k_stride + kv_head * k_head, here * k_stride, columns, D, W)
    told = _load(v + start * v_stride + kv_head * v_head, here * v_stride, columns, D, W)
    padded = _round_up(length, Q_BLOCK)
    total_k = tl.zeros([N, W], tl.float32)
    total_v = tl.zeros([N, W], tl.float32)
    total_k, total_v = _fold_grad_kv(
        total_k, total_v, known, told, key, end, q, grad, lse, delta, kv_head * GROUP,
        lists, begin, middle, padded, SCALE, GROUP, D, Q_BLOCK, M, False,
    )  # fmt: skip
    total_k, total_v = _fold_grad_kv(
        total_k, total_v, known, told, key, end, q, grad, lse, delta, kv_head * GROUP,
        lists, middle, stop, padded, SCALE, GROUP, D, Q_BLOCK, M, True,
    )  # fmt: skip
    total_k *= FACTOR
    if slot < 0:
        target = start * (KV_HEADS * D) + kv_head * D
        _store(grad_k + target, here * (KV_HEADS * D), columns, key < length, total_k, D)
        _store(grad_v + target, here * (KV_HEADS * D), columns, key < length, total_v, D)
    else:
        cell = (slot.to(tl.int64) * KV_HEADS + kv_head) * 2
        kept = sums + cell * (K_BLOCK * W) + (offset + place)[:, None] * W + columns[None, :]
        tl.store(kept, total_k)
        tl.store(kept + K_BLOCK * W, total_v)


@triton.jit(do_not_specialize=["length"])
def _add_pieces(
    sums, grad_k, grad_v, cuts, length,
    KV_HEADS: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    K_BLOCK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = K_BLOCK // N
    kv_head = tl.program_id(0)
    cut = cuts + (tl.program_id(1) // TILES) * 3
    offset = (tl.program_id(1) % TILES) * N
    place = tl.arange(0, N)
    columns = tl.arange(0, W)
    cell = (offset + place)[:, None] * W + columns[None, :]
    total_k = tl.zeros([N, W], tl.float32)
    total_v = tl.zeros([N, W], tl.float32)
    for slot in tl.range(tl.load(cut + 1), tl.load(cut + 2)):
        source = sums + (slot * KV_HEADS + kv_head).to(tl.int64) * (2 * K_BLOCK * W) + cell
        total_k += tl.load(source)
        total_v += tl.load(source + K_BLOCK * W)
    first = tl.load(cut) * K_BLOCK + offset
    target = first.to(tl.int64) * (KV_HEADS * D) + kv_head * D
    is_row = first + place < length
    _store(grad_k + target, place * (KV_HEADS * D), columns, is_row, total_k, D)
    _store(grad_v + target, place * (KV_HEADS * D), columns, is_row, total_v, D)


LOG2_E = 1.4426950408889634
"""Weights are powers of two on the GPU: exp(x) = 2 ** (x * LOG2_E), folded into the scale."""

SUMMED_KEYS = 32
"""Keys of a program that adds up pieces."""


def _constants(q: Tensor, k: Tensor) -> dict[str, Any]:
    _, heads, size = q.shape
    return {
        "SCALE": size**-0.5 * LOG2_E,
        "HEADS": heads,
        "GROUP": heads // k.shape[1],
        "D": size,
        "W": max(16, triton.next_power_of_2(size)),
        "Q_BLOCK": QUERIES,
    }


def _streamed(x: Tensor, rows: int) -> TensorDescriptor:
    """x [L, H, d] for the GPU's copy engine, which fetches `rows` rows of one head at a time.

    Plain lists of numbers, [L] or [H, L], are fetched by `rows` numbers. Behind the end of x come
    zeros. Where d is no power of two a fetch runs into the next head: what is held against it has
    zeros there, and what comes of it is not stored.
    """
    if x.ndim < 3:
        return TensorDescriptor(x, [x.numel()], [1], [rows])
    length, heads, size = x.shape
    width = max(16, triton.next_power_of_2(size))
    return TensorDescriptor(x, [length, heads * size], [x.stride(0), 1], [rows, width])


def _is_streamable(x: Tensor) -> bool:
    _, heads, size = x.shape
    is_flat = x.stride(-1) == 1 and (heads == 1 or x.stride(1) == size)
    return is_flat and x.stride(0) * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0


class _IntervalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks) -> Tensor:  # type: ignore[override]
        length, heads, _ = q.shape
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        padded = triton.cdiv(length, QUERIES) * QUERIES
        lse = torch.empty(heads, padded, dtype=torch.float32, device=q.device)
        constants = _constants(q, k)
        chosen = plan(q.dtype, constants["GROUP"], constants["W"])
        tiles = chosen.forward
        grid = (heads // chosen.pack, len(blocks.query_items) * (QUERIES // tiles.queries))
        _forward[grid](
            q, *(_streamed(x, tiles.keys) for x in (k, v)), out, lse,
            _streamed(blocks.ends, tiles.keys), blocks.query_items, blocks.query_lists, length,
            *q.stride()[:2], **constants,
            PACK=chosen.pack, K_BLOCK=KEYS, M=tiles.queries, N=tiles.keys,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        grad = grads[0].contiguous()
        length, heads, _ = q.shape
        kv_heads = k.shape[1]
        grad_q, grad_k, grad_v = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)
        )
        delta = torch.empty_like(lse)
        constants = _constants(q, k)
        factor = q.shape[-1] ** -0.5
        chosen = plan(q.dtype, constants["GROUP"], constants["W"])
        tiles = chosen.grad_q
        grid = (heads // chosen.pack, len(blocks.query_items) * (QUERIES // tiles.queries))
        _backward_q[grid](
            q, *(_streamed(x, tiles.keys) for x in (k, v)), out, grad, lse, delta, grad_q,
            _streamed(blocks.ends, tiles.keys), blocks.query_items, blocks.query_lists, length,
            *q.stride()[:2], **constants, FACTOR=factor,
            PACK=chosen.pack, K_BLOCK=KEYS, M=tiles.queries, N=tiles.keys,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        tiles = chosen.grad_kv
        width = constants["W"]
        sums = lse.new_empty(blocks.num_slots, kv_heads, 2, HELD_KEYS, width)
        grid = (kv_heads, len(blocks.key_items) * (HELD_KEYS // tiles.keys))
        _backward_kv[grid](
            _streamed(q, tiles.queries), k, v,
            *(_streamed(x, tiles.queries) for x in (grad, lse, delta)),
            grad_k, grad_v, sums, blocks.ends, blocks.key_items, blocks.key_lists, length,
            *k.stride()[:2], *v.stride()[:2], **constants, FACTOR=factor,
            K_BLOCK=HELD_KEYS, M=tiles.queries, N=tiles.keys,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        if blocks.num_slots:
            _add_pieces[(kv_heads, len(blocks.cuts) * (HELD_KEYS // SUMMED_KEYS))](
                sums, grad_k, grad_v, blocks.cuts, length,
                KV_HEADS=kv_heads, D=constants["D"], W=width, K_BLOCK=HELD_KEYS, N=SUMMED_KEYS,
            )  # fmt: skip
        return grad_q, grad_k, grad_v, None


def interval_attention(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks) -> Tensor:
    """softmax(q k / sqrt(d)) v under the interval rule. q [L, H, d], k and v [L, K, d] -> [L, H, d]"""
    size = q.shape[-1]
    if size > 128 or size * q.itemsize % 16:
        raise ValueError(f"head size {size}: the attention kernels take multiples of 8 up to 128")
    q, k, v = (x if _is_streamable(x) else x.contiguous() for x in (q, k, v))
    return _IntervalAttention.apply(q, k, v, blocks)

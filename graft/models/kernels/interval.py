"""Attention over a packed forest on the GPU: flash attention under the interval rule.

    L tokens, H query heads, K key/value heads, G = H / K heads of a group, d head size

Query i sees key j if and only if `j <= i < ends[j]`. The L x L scores are never stored: a program
holds a tile of queries, walks over the tiles of keys that any of them sees, and keeps a running
maximum and sum per row. Which tiles those are is worked out once per forest, on the CPU (`Blocks`).

The backward needs two kernels, each walking lists of its own: one holds queries and walks over keys
for the gradient of q, one holds keys and walks over queries for those of k and v. Nothing is added
atomically, so gradients are the same from run to run. The first block of a prompt is seen by every
sample: its list is cut into pieces, their sums lie in memory and a small kernel adds them up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from graft.models.blocks import HELD_KEYS, KEYS, QUERIES, Blocks


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

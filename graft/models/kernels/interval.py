"""Attention over a packed forest on the GPU: flash attention under the interval rule.

    L tokens, H query heads, K key/value heads, G = H / K heads of a group, d head size

Query i sees key j if and only if `j <= i < ends[j]`, and with a window `begins[i] <= j`. The L x L scores
are never stored: a program holds a tile of queries, loops over the tiles of keys that any of them sees,
and keeps a running maximum and sum per row. These tiles are listed once per forest, on the CPU
(`BlockLists`). A sink, a score of its head that has no value, is added to a row's sum at the end.

The backward has two kernels with lists of their own: one holds queries and loops over keys for the
gradient of q, one holds keys and loops over queries for those of k and v. There are no atomics, so
gradients are the same from run to run. The first block of a prompt is seen by every sample: its list
is split into pieces, each writes its sums to memory, and a small kernel adds them up.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from graft.models.device import has_large_shared_memory
from graft.models.kernels.interval_kernels import add_pieces, backward_kv, backward_q, forward
from graft.models.tree.block_lists import HELD_KEYS, KEYS, MAX_HEAD, QUERIES, BlockLists


class Tiles(NamedTuple):
    """The tiles of one kernel, and the shape of its programs."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


class TilePlan(NamedTuple):
    """The kernels' tiles for one kind of heads."""

    pack: int
    """Heads of a group whose queries share a tile: each key is loaded once for all of them."""
    forward: Tiles
    grad_q: Tiles
    grad_kv: Tiles


def plan(dtype: torch.dtype, group: int, width: int, has_large_memory: bool) -> TilePlan:
    """Tiles that fit shared memory and registers, for head size up to `width`."""
    if dtype == torch.float32:  # exact products run without tensor cores, on small tiles
        tiles = Tiles(16, 16, 8, 1) if width > 64 else Tiles(32, 32, 8, 1)
        return TilePlan(1, tiles, tiles, tiles)
    if width > 128:  # registers hold the sums of 64 rows with 8 warps; 99 KB hold tiles of 32
        if not has_large_memory:
            tiles = Tiles(32, 32, 4, 1)
            return TilePlan(1, tiles, tiles, tiles)
        tiles = Tiles(QUERIES, KEYS, 8, 2)
        # on a B200 two stages of three tiles would take 257 KB
        return TilePlan(1, tiles, tiles, Tiles(QUERIES, KEYS, 8, 1))
    # with 2 stages two small programs of wide heads fit a multiprocessor: one computes while one loads
    stages = 2 if width > 64 else 3
    held = Tiles(QUERIES, HELD_KEYS, 4, stages)
    pack = 2 if group % 2 == 0 and has_large_memory else 1
    tiles = Tiles(QUERIES, KEYS, 8, 3) if pack == 2 else Tiles(QUERIES, KEYS, 4, stages)
    return TilePlan(pack, tiles, tiles, held)


LOG2_E = math.log2(math.e)
"""Weights are powers of two on the GPU: exp(x) = 2 ** (x * LOG2_E), folded into the scale."""

SUMMED_KEYS = 32
"""Keys of a program of `add_pieces`."""


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

    Vectors [L] and matrices [H, L] are fetched by `rows` numbers. After the end of x come zeros. If d
    is no power of two a fetch includes a part of the next head: the other factor of a product has
    zeros there, and results there are not stored.
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


def attend(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The output [L, H, d], and the logs of the sums of weights [H, L rounded up], to base 2.

    sinks   [H], a score of each head without a value
    """
    length, heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    padded = triton.cdiv(length, QUERIES) * QUERIES
    lse = torch.empty(heads, padded, dtype=torch.float32, device=q.device)
    constants = _constants(q, k)
    chosen = plan(q.dtype, constants["GROUP"], constants["W"], has_large_shared_memory(q.device))
    tiles = chosen.forward
    grid = (heads // chosen.pack, len(blocks.query_items) * (QUERIES // tiles.queries))
    forward[grid](
        q, *(_streamed(x, tiles.keys) for x in (k, v)), out, lse, sinks,
        _streamed(blocks.ends, tiles.keys), blocks.begins, blocks.query_items, blocks.query_lists, length,
        *q.stride()[:2], **constants,
        PACK=chosen.pack, K_BLOCK=KEYS, M=tiles.queries, N=tiles.keys,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out, lse


def differentiate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    blocks: BlockLists,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and the sinks from that of the output."""
    grad = grad.contiguous()
    length, heads, _ = q.shape
    kv_heads = k.shape[1]
    grad_q, grad_k, grad_v = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)
    )
    delta = torch.empty_like(lse)
    constants = _constants(q, k)
    factor = q.shape[-1] ** -0.5
    chosen = plan(q.dtype, constants["GROUP"], constants["W"], has_large_shared_memory(q.device))
    tiles = chosen.grad_q
    grid = (heads // chosen.pack, len(blocks.query_items) * (QUERIES // tiles.queries))
    backward_q[grid](
        q, *(_streamed(x, tiles.keys) for x in (k, v)), out, grad, lse, delta, grad_q,
        _streamed(blocks.ends, tiles.keys), blocks.begins, blocks.query_items, blocks.query_lists, length,
        *q.stride()[:2], **constants, FACTOR=factor,
        PACK=chosen.pack, K_BLOCK=KEYS, M=tiles.queries, N=tiles.keys,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    tiles = chosen.grad_kv
    width = constants["W"]
    sums = lse.new_empty(blocks.num_slots, kv_heads, 2, HELD_KEYS, width)
    grid = (kv_heads, len(blocks.key_items) * (HELD_KEYS // tiles.keys))
    backward_kv[grid](
        _streamed(q, tiles.queries), k, v,
        *(_streamed(x, tiles.queries) for x in (grad, lse, delta)),
        grad_k, grad_v, sums, blocks.ends,
        None if blocks.begins is None else _streamed(blocks.begins, tiles.queries),
        blocks.key_items, blocks.key_lists, length,
        *k.stride()[:2], *v.stride()[:2], **constants, FACTOR=factor,
        K_BLOCK=HELD_KEYS, M=tiles.queries, N=tiles.keys,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if blocks.num_slots:
        add_pieces[(kv_heads, len(blocks.splits) * (HELD_KEYS // SUMMED_KEYS))](
            sums, grad_k, grad_v, blocks.splits, length,
            KV_HEADS=kv_heads, D=constants["D"], W=width, K_BLOCK=HELD_KEYS, N=SUMMED_KEYS,
        )  # fmt: skip
    if sinks is None:
        return grad_q, grad_k, grad_v, None
    share = torch.exp2(sinks.float()[:, None] * LOG2_E - lse[:, :length])
    return grad_q, grad_k, grad_v, -(share * delta[:, :length]).sum(1).to(sinks.dtype)


class _IntervalAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, blocks: BlockLists
    ) -> Tensor:
        out, lse = attend(q, k, v, blocks, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *saved, sinks = ctx.saved_tensors
        return *differentiate(*saved, grads[0], ctx.blocks, sinks), None


def interval_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockLists, sinks: Tensor | None = None
) -> Tensor:
    """softmax(q k / sqrt(d)) v under the interval rule. q [L, H, d], k and v [L, K, d] -> [L, H, d]"""
    size = q.shape[-1]
    if size > MAX_HEAD or size * q.itemsize % 16:
        raise ValueError(
            f"head size {size}: the attention kernels take multiples of 8 up to {MAX_HEAD}"
        )
    q, k, v = (x if _is_streamable(x) else x.contiguous() for x in (q, k, v))
    return _IntervalAttention.apply(q, k, v, sinks, blocks)

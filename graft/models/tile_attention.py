"""Attention that adds in one order, whatever is computed together with a query.

    S sequences, K key/value heads, r query rows of each head, L positions, d head size

Keys are counted from the beginning of the query's own path and taken in tiles of TILE positions. A tile
is one call of PyTorch's fused attention; the results of the tiles are merged from first to last. A key
that a query does not see has weight 0, so neither the padding at the end nor the tiles after the last
key change a bit: 40 keys give the same result as 40 keys and 8, or 400, that are not seen. A sink, a score
of a head that takes its share of the weights and has no value, is one more tile.

The engine's decoding, its prompts and the learner's packed trees all call this, so they agree exactly
wherever the library adds along a row in one order (`row_order` tests that). Three rules belong to it: L is
a multiple of LANES, because the rest of a vector is computed by other instructions; so is a product with
one query row, or on x86 (MKL) with 2 or 4, up to 10 for heads of 256 (`padded_rows`); and MKL divides more
than 256 keys by their number, hence the smaller tiles there.
"""

from __future__ import annotations

import math
import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IS_X86 = platform.machine() in ("x86_64", "AMD64")

TILE = 256 if IS_X86 else 512
"""Positions of a tile. Smaller ones let siblings share more of their prompt; larger ones are merged less
often. 128 took 7% more time with prompts of 256 tokens that siblings shared (ARM)."""

ROW_BLOCK = 32
"""Query rows that PyTorch's fused attention multiplies at a time, or a multiple of it."""

LANES = 16
"""Numbers in the longest vector of a CPU."""

Tile = tuple[Tensor, Tensor]
"""Attention over one tile, [S, K, r, d], and the logarithm of its weights' sum, [S, K, r]."""


def padded_length(length: int) -> int:
    """The next multiple of LANES. 40 -> 48"""
    return -(-length // LANES) * LANES


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    has_window: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """[S, K, r, d] of q [S, K, r, d] over k, v [S, K, L, d]; bias [S, 1, r or 1, L] is 0 or -inf.

    A row sees the first positions up to its own, at least one; with a window, only the last of these.
    Rows are those of the first query head of a group, then those of the second; `sinks` [H] has one of each.
    """
    rows = q.shape[2]
    sinks = None if sinks is None else sink_rows(sinks, q.shape[1], rows)
    if q.device.type != "cpu" or q.dtype != torch.float32:
        return _attend_plainly(q, k, v, bias, sinks)
    size = q.shape[3]
    q, bias = pad_rows(q, size), pad_bias(bias, size)
    if k.shape[2] <= TILE and sinks is None:
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    else:
        if sinks is not None:
            sinks = pad_rows(sinks[None, :, :, None], size)[0, :, :, 0]
        seen = _Tiles.apply(q, k, v, bias, has_window, sinks)
    return seen if seen.shape[2] == rows else seen[:, :, :rows]


def sink_rows(sinks: Tensor, kv_heads: int, rows: int) -> Tensor:
    """The sink [K, r] of each row, of those of the heads, [H]."""
    by_group = sinks.view(kv_heads, -1, 1)
    return by_group.expand(-1, -1, rows // by_group.shape[1]).flatten(1)


def _attend_plainly(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor | None) -> Tensor:
    """`attend_rows` in any order of adding."""
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
    scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1]) + bias
    sink = sinks.float()[None, :, :, None].expand(len(q), -1, -1, -1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1].to(v.dtype) @ v


def padded_rows(rows: int, size: int) -> int:
    """The number of query rows to compute for so many: 1 -> 2 on ARM, 6 on x86, 16 of heads above 128."""
    rows += rows % 2
    rest = rows % ROW_BLOCK
    least = 16 if size > 128 else 6
    return rows + least - rest if IS_X86 and 0 < rest < least else rows


def pad_rows(x: Tensor, size: int) -> Tensor:
    """x [S, K, r, n] with its last row repeated up to `padded_rows` of heads of `size`."""
    missing = padded_rows(x.shape[2], size) - x.shape[2]
    if missing == 0:
        return x
    return torch.cat([x, x[:, :, -1:].expand(-1, -1, missing, -1)], dim=2)


def pad_bias(bias: Tensor, size: int) -> Tensor:
    """The bias of these rows; one of a single row is for all."""
    return bias if bias.shape[2] == 1 else pad_rows(bias, size)


def attend_tiles(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, has_window: bool = False
) -> list[Tile]:
    """Each tile alone; rows that see nothing of a tile have weight 0 in it. q as of `pad_rows`."""
    tiles: list[Tile] = []
    for start in range(0, k.shape[2], TILE):
        part = slice(start, start + TILE)
        mask = None if bias is None else bias[..., part]
        seen, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k[:, :, part], v[:, :, part], attn_mask=mask
        )
        if mask is not None and has_window:
            log_sum = log_sum.masked_fill(mask.amax(-1) < 0, -torch.inf)
        elif mask is not None and start:  # rows see the first positions: not this one, hence none
            log_sum = log_sum.masked_fill(mask[..., 0] < 0, -torch.inf)
        tiles.append((seen, log_sum))
    return tiles


def merge_tiles(tiles: list[Tile], sinks: Tensor | None = None) -> Tile:
    """Attention over all tiles, and sinks [K, r], as if one softmax had run over all positions."""
    start = 0 if sinks is None else 1
    if len(tiles) + start == 1:
        return tiles[0]
    first = tiles[0][1]
    log_sums = first.new_full((*first.shape, padded_length(len(tiles) + start)), -torch.inf)
    if sinks is not None:  # the first: tiles after the last key must not move it
        log_sums[..., 0] = sinks
    for number, (_, log_sum) in enumerate(tiles, start):
        log_sums[..., number] = log_sum
    shares = log_sums.softmax(-1)
    total = tiles[0][0] * shares[..., start : start + 1]
    for number, (seen, _) in enumerate(tiles[1:], start + 1):
        total += seen * shares[..., number : number + 1]
    return total, log_sums.logsumexp(-1)


class _Tiles(torch.autograd.Function):
    """`attend_rows` over several tiles; each tile's gradients follow from the whole's result and sum."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor,
        has_window: bool,
        sinks: Tensor | None,
    ) -> Tensor:
        seen, log_sum = merge_tiles(attend_tiles(q, k, v, bias, has_window), sinks)
        ctx.save_for_backward(q, k, v, bias, seen, log_sum, sinks)
        return seen

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, bias, seen, log_sum, sinks = ctx.saved_tensors
        grad_q = torch.zeros_like(q)
        grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        for start in range(0, k.shape[2], TILE):
            part = slice(start, start + TILE)
            of_tile = grads[0], q, k[:, :, part], v[:, :, part], seen, log_sum
            found = backward(*of_tile, 0.0, False, attn_mask=bias[..., part])
            grad_q += found[0]
            grad_k[:, :, part], grad_v[:, :, part] = found[1:]
        grad_sinks = None
        if sinks is not None:  # a key with value 0: its weight times 0 - the mean of all values
            share = (sinks - log_sum).exp()
            grad_sinks = -(share * (grads[0] * seen).sum(-1)).sum(0)
        return grad_q, grad_k, grad_v, None, None, grad_sinks

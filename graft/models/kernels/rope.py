"""Turn q|k|v of the matrix product into queries, keys and values: head norms and rotation.

    T tokens, H query heads, K key/value heads, d head size, P programs

A program holds a tile of several heads of one token as two halves, [heads, d/2] each, since pair i is
(i, i + d/2). Where only the first r numbers of a head are rotated their pairs are (i, i + r/2), and the rest
is halved as well, with an angle of 0. A tile may hold heads of all three kinds: each kind has its own mask,
its own weight and its own output, and masked elements cost no memory traffic.
The backward writes the whole gradient of q|k|v. With head norms its programs loop over every P-th
token and keep their own sums of the weights' gradients, as in `norm`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.models.angles import HeadRotation
from graft.models.kernels.kv_rounding import encode, exponent_of, scale_of, widen
from graft.models.kernels.launch import after_previous, chained
from graft.models.kernels.norm import looping_programs
from graft.models.kv_slots import KVSlots

TILE = 1024
"""Pairs in a tile: with 4 warps, two 16-byte loads of bf16 by each thread."""

RESIDENT_WARPS = 24
"""Warps of the backward with head norms per multiprocessor, whose registers allow 80 a thread."""


@triton.jit
def _pairs(pair, HALF: tl.constexpr, TURNED: tl.constexpr):
    """Find the first number of each pair in its head, and how far behind it the second is."""
    at, gap = pair, HALF
    if TURNED < HALF:
        at = tl.where(pair < TURNED, pair, pair + TURNED)
        gap = tl.where(pair < TURNED, TURNED, HALF - TURNED)
    return at, gap


@triton.jit
def _angles(cos_ptr, sin_ptr, token, pair, HALF: tl.constexpr, TURNED: tl.constexpr):
    """cos and sin of a token's pairs, [1, d/2]; what is not rotated has the angle 0."""
    REST: tl.constexpr = 0.0 if TURNED == HALF else 1.0
    angle = token * TURNED + pair
    cos = tl.load(cos_ptr + angle, mask=pair < TURNED, other=REST).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle, mask=pair < TURNED, other=0.0).to(tl.float32)[None, :]
    return cos, sin


@triton.jit
def _weights(
    q_weight_ptr, k_weight_ptr, is_q, at, inside, OFFSET: tl.constexpr, QUERY_SCALE: tl.constexpr
):
    """Each head's norm weight, [heads, d/2]."""
    q_weight = tl.load(q_weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if OFFSET:
        q_weight, k_weight = 1 + q_weight, 1 + k_weight
    if QUERY_SCALE != 1:
        q_weight *= QUERY_SCALE
    return tl.where(is_q[:, None], q_weight[None, :], k_weight[None, :])


@triton.jit
def _store(rows, across, scales, first, second, is_stored, real, ROUNDS: tl.constexpr):
    """Store the halves of heads [heads, d/2] at `rows`; rounded: their codes and scales, or without `scales`
    what these stand for."""
    if ROUNDS:
        dtype = first.dtype
        first, second = first.to(tl.float32), second.to(tl.float32)
        exponent = exponent_of(first, second)
        first, second = encode(first, exponent[:, None]), encode(second, exponent[:, None])
        if scales is None:
            scale = scale_of(exponent)[:, None]
            first = (widen(first, tl.float32) * scale).to(dtype)
            second = (widen(second, tl.float32) * scale).to(dtype)
        else:
            first, second = first.to(tl.uint8), second.to(tl.uint8)
            tl.store(scales, scale_of(exponent).to(tl.bfloat16), mask=is_stored)
    tl.store(rows, first, mask=is_stored[:, None] & real)
    tl.store(rows + across, second, mask=is_stored[:, None] & real)


@triton.jit(do_not_specialize=["table_stride"])
def _forward(
    qkv_ptr,  # [T, (H+2K) d], rows `qkv_stride` apart
    q_weight_ptr,  # [d] or None
    k_weight_ptr,  # [d] or None
    cos_ptr,  # [T, r/2]
    sin_ptr,  # [T, r/2]
    q_ptr,  # [T, H, d]
    k_ptr,  # [T, K, d]
    v_ptr,  # [T, K, d]
    rstd_ptr,  # [T, H+K] or None: no backward pass follows
    eps,
    qkv_stride,
    table_ptr,  # page numbers, or None: keys and values have tensors of their own
    rows_ptr,  # [T]
    positions_ptr,  # [T]
    lengths_ptr,  # [rows]
    table_stride,
    k_scales_ptr,  # of pages that hold codes, or None
    v_scales_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    TURNED: tl.constexpr,
    OFFSET: tl.constexpr,
    QUERY_SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    PAGE: tl.constexpr,
    ROUNDS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        after_previous()
    dtype = q_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    real = (pair < HALF)[None, :]
    is_q, is_k = head < H, (head >= H) & (head < H + K)
    is_v = (head >= H + K) & (head < H + 2 * K)
    at, gap = _pairs(pair, HALF, TURNED)
    across = gap if TURNED == HALF else gap[None, :]
    within = head[:, None] * (2 * HALF) + at[None, :]

    source = qkv_ptr + token * qkv_stride + within
    inside = (head < H + 2 * K)[:, None] & real
    left = tl.load(source, mask=inside, other=0.0)
    right = tl.load(source + across, mask=inside, other=0.0)
    if table_ptr is None:
        start = token * (K * 2 * HALF)
        head_size = 2 * HALF
    else:  # page [K, page, d] of the token's sequence
        row = tl.load(rows_ptr + token)
        position = tl.load(positions_ptr + token)
        page = tl.load(table_ptr + row * table_stride + position // PAGE).to(tl.int64)
        head_size = PAGE * 2 * HALF
        start = page * (K * head_size) + (position % PAGE) * (2 * HALF)
        alive_head = tl.where(tl.load(lengths_ptr + row) != 0, head, -1)  # -1: stored nowhere
        is_k = (alive_head >= H) & (alive_head < H + K)
        is_v = (alive_head >= H + K) & (alive_head < H + 2 * K)
    value = v_ptr + start + (head - H - K)[:, None] * head_size + at[None, :]
    k_scales, v_scales = k_scales_ptr, v_scales_ptr
    if k_scales_ptr is not None:
        slot = page * (K * PAGE) + position % PAGE
        k_scales += slot + (head - H) * PAGE
        v_scales += slot + (head - H - K) * PAGE
    _store(value, across, v_scales, left, right, is_v, real, ROUNDS)

    left, right = left.to(tl.float32), right.to(tl.float32)
    if q_weight_ptr is not None:
        squares = tl.sum(left * left + right * right, 1)
        rstd = tl.rsqrt(squares / (2 * HALF) + eps)
        if rstd_ptr is not None:
            tl.store(rstd_ptr + token * (H + K) + head, rstd, mask=head < H + K)
        weights = q_weight_ptr, k_weight_ptr, is_q
        weight_left = _weights(*weights, at, pair < HALF, OFFSET, QUERY_SCALE)
        weight_right = _weights(*weights, at + gap, pair < HALF, OFFSET, QUERY_SCALE)
        left = (left * rstd[:, None]).to(dtype).to(tl.float32) * weight_left
        right = (right * rstd[:, None]).to(dtype).to(tl.float32) * weight_right
        left, right = left.to(dtype).to(tl.float32), right.to(dtype).to(tl.float32)
    elif QUERY_SCALE != 1:
        factor = tl.where(is_q, QUERY_SCALE, 1.0)[:, None]
        left = (left * factor).to(dtype).to(tl.float32)
        right = (right * factor).to(dtype).to(tl.float32)
    cos, sin = _angles(cos_ptr, sin_ptr, token, pair, HALF, TURNED)
    rotated_left = (left * cos - right * sin).to(dtype)
    rotated_right = (right * cos + left * sin).to(dtype)
    query = q_ptr + token * (H * 2 * HALF) + within
    tl.store(query, rotated_left, mask=is_q[:, None] & real)
    tl.store(query + across, rotated_right, mask=is_q[:, None] & real)
    key = k_ptr + start + (head - H)[:, None] * head_size + at[None, :]
    _store(key, across, k_scales, rotated_left, rotated_right, is_k, real, ROUNDS)


@triton.jit(do_not_specialize=["tokens"])
def _backward(
    grad_q_ptr,  # [T, H, d]
    grad_k_ptr,  # [T, K, d]
    grad_v_ptr,  # [T, K, d]
    qkv_ptr,  # [T, (H+2K) d], rows `qkv_stride` apart, or None without norms
    q_weight_ptr,  # [d] or None
    k_weight_ptr,  # [d] or None
    rstd_ptr,  # [T, H+K] or None
    cos_ptr,  # [T, r/2]
    sin_ptr,  # [T, r/2]
    grad_qkv_ptr,  # [T, (H+2K) d]
    partial_ptr,  # [P, tiles, 2, d] or None: of q_weight, of k_weight
    tokens,
    qkv_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    TURNED: tl.constexpr,
    OFFSET: tl.constexpr,
    QUERY_SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    real = (pair < HALF)[None, :]
    is_q, is_k = head < H, (head >= H) & (head < H + K)
    is_v = (head >= H + K) & (head < H + 2 * K)
    is_rotated = (head < H + K)[:, None] & real
    inside = (head < H + 2 * K)[:, None] & real
    at, gap = _pairs(pair, HALF, TURNED)
    across = gap if TURNED == HALF else gap[None, :]
    within = head[:, None] * (2 * HALF) + at[None, :]
    if q_weight_ptr is not None:
        weights = q_weight_ptr, k_weight_ptr, is_q
        weight_left = _weights(*weights, at, pair < HALF, OFFSET, QUERY_SCALE)
        weight_right = _weights(*weights, at + gap, pair < HALF, OFFSET, QUERY_SCALE)
        sum_left = tl.zeros([HEADS, PAIRS], tl.float32)
        sum_right = tl.zeros([HEADS, PAIRS], tl.float32)

    token = tl.program_id(0).to(tl.int64)
    while token < tokens:
        query = grad_q_ptr + token * (H * 2 * HALF) + within
        key = grad_k_ptr + token * (K * 2 * HALF) + within - H * (2 * HALF)
        value = grad_v_ptr + token * (K * 2 * HALF) + within - (H + K) * (2 * HALF)
        # a head is of one kind: two of its three loads are masked and return 0
        left = tl.load(query, mask=is_q[:, None] & real, other=0.0)
        right = tl.load(query + across, mask=is_q[:, None] & real, other=0.0)
        left += tl.load(key, mask=is_k[:, None] & real, other=0.0)
        right += tl.load(key + across, mask=is_k[:, None] & real, other=0.0)
        value_left = tl.load(value, mask=is_v[:, None] & real, other=0.0)
        value_right = tl.load(value + across, mask=is_v[:, None] & real, other=0.0)
        left, right = left.to(tl.float32), right.to(tl.float32)

        cos, sin = _angles(cos_ptr, sin_ptr, token, pair, HALF, TURNED)
        # the transpose of a rotation is its inverse
        grad_left, grad_right = left * cos + right * sin, right * cos - left * sin
        if q_weight_ptr is not None:
            source = qkv_ptr + token * qkv_stride + within
            rstd = tl.load(rstd_ptr + token * (H + K) + head, mask=head < H + K, other=0.0)[:, None]
            unit_left = tl.load(source, mask=is_rotated, other=0.0).to(tl.float32) * rstd
            unit_right = tl.load(source + across, mask=is_rotated, other=0.0).to(tl.float32) * rstd
            sum_left += grad_left * unit_left
            sum_right += grad_right * unit_right
            grad_left *= weight_left
            grad_right *= weight_right
            along = tl.sum(grad_left * unit_left + grad_right * unit_right, 1)[:, None]
            along = along / (2 * HALF)
            grad_left = rstd * (grad_left - unit_left * along)
            grad_right = rstd * (grad_right - unit_right * along)
        elif QUERY_SCALE != 1:
            factor = tl.where(is_q, QUERY_SCALE, 1.0)[:, None]
            grad_left, grad_right = grad_left * factor, grad_right * factor
        # the gradient of v is added: where it is not 0 the others are masked to 0
        target = grad_qkv_ptr + token * ((H + 2 * K) * 2 * HALF) + within
        dtype = grad_qkv_ptr.dtype.element_ty
        tl.store(target, (grad_left + value_left.to(tl.float32)).to(dtype), mask=inside)
        tl.store(target + across, (grad_right + value_right.to(tl.float32)).to(dtype), mask=inside)
        token += tl.num_programs(0)

    if q_weight_ptr is not None:
        program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        row = partial_ptr + program * (4 * HALF) + at
        q_left = tl.sum(tl.where(is_q[:, None], sum_left, 0.0), 0)
        q_right = tl.sum(tl.where(is_q[:, None], sum_right, 0.0), 0)
        k_left = tl.sum(tl.where(is_k[:, None], sum_left, 0.0), 0)
        k_right = tl.sum(tl.where(is_k[:, None], sum_right, 0.0), 0)
        if QUERY_SCALE != 1:
            q_left, q_right = q_left * QUERY_SCALE, q_right * QUERY_SCALE
        tl.store(row, q_left, mask=pair < HALF)
        tl.store(row + gap, q_right, mask=pair < HALF)
        tl.store(row + 2 * HALF, k_left, mask=pair < HALF)
        tl.store(row + 2 * HALF + gap, k_right, mask=pair < HALF)


def _tile(all_heads: int, half: int) -> tuple[int, int, int]:
    """Heads and pairs of a tile, and its warps."""
    pairs = triton.next_power_of_2(half)
    heads = min(triton.next_power_of_2(all_heads), max(TILE // pairs, 1))
    return heads, pairs, max(heads * pairs // 256, 1)


def _constants(how: HeadRotation, size: int) -> dict[str, Any]:
    """What both kernels are compiled for."""
    return {
        "H": how.heads,
        "K": how.kv_heads,
        "HALF": size // 2,
        "TURNED": how.cos.shape[1],
        "OFFSET": how.offset,
        "QUERY_SCALE": how.query_scale,
    }


def _launch(
    qkv: Tensor,
    how: HeadRotation,
    out: tuple[Tensor, Tensor, Tensor],
    rstd: Tensor | None = None,
    kv_slots: KVSlots | None = None,
    scales: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
) -> None:
    """Write q, k and v to `out`: tensors of their own, or for k and v the pages of `kv_slots`, where
    these hold codes and `scales`."""
    kv_heads = how.kv_heads
    tokens, heads, size = out[0].shape
    pages = (None, None, None, None, 0)
    if kv_slots is not None:
        table = kv_slots.table
        pages = (table, kv_slots.rows, kv_slots.positions, kv_slots.lengths, table.stride(0))
    tile_heads, pairs, warps = _tile(heads + 2 * kv_heads, size // 2)
    _forward[(tokens, triton.cdiv(heads + 2 * kv_heads, tile_heads))](
        qkv,
        how.q_weight,
        how.k_weight,
        how.cos,
        how.sin,
        *out,
        rstd,
        how.eps,
        qkv.stride(0),
        *pages,
        *scales,
        **_constants(how, size),
        HEADS=tile_heads,
        PAIRS=pairs,
        PAGE=1 if kv_slots is None else kv_slots.pool.shape[4],
        ROUNDS=how.rounds_kv,
        num_warps=warps,
        **chained(qkv.device),
    )


def rotate(qkv: Tensor, how: HeadRotation) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v, each in a tensor of its own, and with head norms 1 / rms of every head, [T, H+K]."""
    heads, kv_heads = how.heads, how.kv_heads
    tokens, size = len(qkv), qkv.shape[1] // (heads + 2 * kv_heads)
    q, k, v = (qkv.new_empty(tokens, count, size) for count in (heads, kv_heads, kv_heads))
    rstd = None
    if how.q_weight is not None:
        rstd = qkv.new_empty(tokens, heads + kv_heads, dtype=torch.float32)
    _launch(qkv, how, (q, k, v), rstd)
    return q, k, v, rstd


def differentiate(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor | None,
    rstd: Tensor | None,
    how: HeadRotation,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of q|k|v and of the weights of head norms; a rotation alone (None) needs only its angles."""
    heads, kv_heads = how.heads, how.kv_heads
    grad_q, grad_k, grad_v = (grad.contiguous() for grad in grads)
    tokens, _, size = grad_q.shape
    tile_heads, pairs, warps = _tile(heads + 2 * kv_heads, size // 2)
    tiles = triton.cdiv(heads + 2 * kv_heads, tile_heads)
    grad_qkv = grad_q.new_empty(tokens, (heads + 2 * kv_heads) * size)
    programs, partial = tokens, None
    if qkv is not None:
        resident = looping_programs(qkv.device, warps, RESIDENT_WARPS)
        programs = min(tokens, max(resident // tiles, 1))
        partial = grad_q.new_empty(programs, tiles, 2, size, dtype=torch.float32)
    _backward[(programs, tiles)](
        grad_q,
        grad_k,
        grad_v,
        qkv,
        how.q_weight,
        how.k_weight,
        rstd,
        how.cos,
        how.sin,
        grad_qkv,
        partial,
        tokens,
        0 if qkv is None else qkv.stride(0),
        **_constants(how, size),
        HEADS=tile_heads,
        PAIRS=pairs,
        num_warps=warps,
    )
    if partial is None or how.q_weight is None:
        return grad_qkv, None, None
    grad_q_weight, grad_k_weight = partial.sum((0, 1)).to(how.q_weight.dtype)
    return grad_qkv, grad_q_weight, grad_k_weight


def streamed(qkv: Tensor, how: HeadRotation) -> tuple[Tensor, HeadRotation]:
    """The same with rows that the kernels can read."""
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    return qkv, how._replace(cos=how.cos.contiguous(), sin=how.sin.contiguous())


class _QkRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, *of_heads: Any) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        qkv, how = streamed(qkv, HeadRotation(*of_heads))
        q, k, v, rstd = rotate(qkv, how)
        kept = None if rstd is None else qkv
        ctx.save_for_backward(kept, rstd, *how.tensors)
        ctx.how = how.without_tensors()
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        qkv, rstd, *of_heads = ctx.saved_tensors
        how = ctx.how.with_tensors(*of_heads)
        return *differentiate(grads, qkv, rstd, how), *[None] * (len(how) - 2)  # type: ignore[arg-type]


def qk_rotate(qkv: Tensor, how: HeadRotation) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [T, (H+2K) d] -> q [T, H, d], k [T, K, d], v [T, K, d], each in a tensor of its own."""
    return _QkRotate.apply(qkv, *how)


def qk_rotate_to_slots(qkv: Tensor, how: HeadRotation, kv_slots: KVSlots, layer: int) -> Tensor:
    """q [T, H, d]; keys and values are written directly to their pages. No gradient."""
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    q = qkv.new_empty(len(qkv), how.heads, qkv.shape[1] // (how.heads + 2 * how.kv_heads))
    keys, values = kv_slots.pool[layer].unbind(0)
    scales = (None, None) if kv_slots.scales is None else kv_slots.scales[layer].unbind(0)
    _launch(qkv, how, (q, keys, values), kv_slots=kv_slots, scales=scales)
    return q

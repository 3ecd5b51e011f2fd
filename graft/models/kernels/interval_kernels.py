"""The kernels of interval attention; see `interval`.

Legend: L tokens, D head size, W the power of two that holds it, M queries and N keys of a tile,
Q_BLOCK and K_BLOCK those of a block of the lists. `forward` and `backward_q` hold queries and loop
over keys; `backward_kv` holds keys and loops over queries; `add_pieces` sums lists that were split.
With windows `begins` [L] is the first row that each query sees; None: the first of its path.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    """Row length of lse and delta: a multiple of the block, so that whole blocks can be fetched."""
    return tl.cdiv(length, block) * block


@triton.jit
def _dot(left, right):
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _add_dot(total, left, right):
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def sink_weight(top, sink):
    """What a head's sink adds to the sum of a row's weights: a score without a value."""
    zeros = tl.zeros_like(top)
    # one rounding, so that it has the same bits in every kernel
    return tl.exp2(tl.fma(sink.to(tl.float32) + zeros, 1.4426950408889634 + zeros, -top))


@triton.jit
def _fold_keys(
    top, total, acc, q, token, oldest,
    k, v, column, ends, lists, begin, stop,
    SCALE: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the key blocks begin to stop of a list into the running maximum, sum and output."""
    TILES: tl.constexpr = BLOCK // N
    index = tl.arange(0, N)
    block = tl.load(lists + begin)
    for at in tl.range(begin * TILES, stop * TILES):
        first = block * BLOCK + (at % TILES) * N
        block = tl.load(lists + (at + 1) // TILES)
        score = _dot(q, tl.trans(k.load([first, column])))
        if IS_MASKED:
            key = first + index
            end = ends.load([first])
            is_seen = (key[None, :] <= token[:, None]) & (token[:, None] < end[None, :])
            if oldest is not None:
                is_seen &= key[None, :] >= oldest[:, None]
            score = tl.where(is_seen, score, float("-inf"))
        # an integer: weights then round alike however keys are split, here and in the engine
        new_top = tl.maximum(top, tl.ceil(tl.max(score, 1) * SCALE))
        values = v.load([first, column])
        # rounded before they are summed, so that the result is an exact weighted average
        weight = tl.exp2(score * SCALE - new_top[:, None]).to(values.dtype)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight.to(tl.float32), 1)
        acc = _add_dot(acc * shrink[:, None], weight, values)
        top = new_top
    return top, total, acc


@triton.jit(do_not_specialize=["length"])
def forward(
    q, k, v, out, lse, sinks, ends, begins, items, lists, length,
    q_stride, q_head,
    SCALE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = Q_BLOCK // M
    item = items + (tl.program_id(1) // TILES) * 4
    first = tl.load(item) * Q_BLOCK + (tl.program_id(1) % TILES) * M
    begin, middle, stop = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    # rows of the tile: M queries of the first head, M of the next; rows after the last token repeat
    # it and are not stored
    row = tl.arange(0, PACK * M)
    here = tl.minimum(row % M, length - 1 - first)
    head = tl.program_id(0) * PACK + row // M
    column = tl.program_id(0) * PACK // GROUP * D  # where its key/value head begins
    columns = tl.arange(0, W)
    token, start = first + here, first.to(tl.int64)
    oldest = None if begins is None else tl.load(begins + token)
    queries = _load(q + start * q_stride, here * q_stride + head * q_head, columns, D, W)
    top = tl.full([PACK * M], -1e30, tl.float32)  # finite: a row may see no key of its first tile
    total = tl.zeros([PACK * M], tl.float32)
    acc = tl.zeros([PACK * M, W], tl.float32)
    top, total, acc = _fold_keys(
        top, total, acc, queries, token, oldest, k, v, column, ends, lists, begin, middle,
        SCALE, K_BLOCK, N, False,
    )  # fmt: skip
    top, total, acc = _fold_keys(
        top, total, acc, queries, token, oldest, k, v, column, ends, lists, middle, stop,
        SCALE, K_BLOCK, N, True,
    )  # fmt: skip
    if sinks is not None:
        total += sink_weight(top, tl.load(sinks + head))
    is_row = first + row % M < length
    target = out + start * (HEADS * D)
    _store(target, here * (HEADS * D) + head * D, columns, is_row, acc / total[:, None], D)
    number = head.to(tl.int64) * _round_up(length, Q_BLOCK) + first + row % M
    tl.store(lse + number, top + tl.log2(total))


@triton.jit
def _fold_grad_q(
    grad_q, q, grad, lse, delta, token, oldest,
    k, v, column, ends, lists, begin, stop,
    SCALE: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = BLOCK // N
    index = tl.arange(0, N)
    block = tl.load(lists + begin)
    for at in tl.range(begin * TILES, stop * TILES):
        first = block * BLOCK + (at % TILES) * N
        block = tl.load(lists + (at + 1) // TILES)
        keys = k.load([first, column])
        score = _dot(q, tl.trans(keys))
        grad_weight = _dot(grad, tl.trans(v.load([first, column])))
        if IS_MASKED:
            key = first + index
            end = ends.load([first])
            is_seen = (key[None, :] <= token[:, None]) & (token[:, None] < end[None, :])
            if oldest is not None:
                is_seen &= key[None, :] >= oldest[:, None]
            score = tl.where(is_seen, score, float("-inf"))
        weight = tl.exp2(score * SCALE - lse[:, None])
        grad_score = weight * (grad_weight - delta[:, None])
        grad_q = _add_dot(grad_q, grad_score.to(keys.dtype), keys)
    return grad_q


@triton.jit(do_not_specialize=["length"])
def backward_q(
    q, k, v, out, grad, lse, delta, grad_q, ends, begins, items, lists, length,
    q_stride, q_head,
    FACTOR: tl.constexpr, SCALE: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The gradient of q, and delta [H, L], the sum of out * grad, for `backward_kv`."""
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
    oldest = None if begins is None else tl.load(begins + token)
    is_row = first + row % M < length
    plain = here * (HEADS * D) + head * D
    output = _load(out + start * (HEADS * D), plain, columns, D, W)
    grad_out = _load(grad + start * (HEADS * D), plain, columns, D, W)
    along = tl.sum(output.to(tl.float32) * grad_out.to(tl.float32), 1)
    number = head.to(tl.int64) * _round_up(length, Q_BLOCK) + first + row % M
    tl.store(delta + number, along)
    scale = tl.load(lse + number)
    queries = _load(q + start * q_stride, here * q_stride + head * q_head, columns, D, W)
    total = tl.zeros([PACK * M, W], tl.float32)
    total = _fold_grad_q(
        total, queries, grad_out, scale, along, token, oldest, k, v, column, ends, lists,
        begin, middle, SCALE, K_BLOCK, N, False,
    )  # fmt: skip
    total = _fold_grad_q(
        total, queries, grad_out, scale, along, token, oldest, k, v, column, ends, lists,
        middle, stop, SCALE, K_BLOCK, N, True,
    )  # fmt: skip
    _store(grad_q + start * (HEADS * D), plain, columns, is_row, total * FACTOR, D)


@triton.jit
def _fold_grad_kv(
    grad_k, grad_v, k, v, key, end, begins,
    q, grad, lse, delta, first_head, lists, begin, stop, padded,
    SCALE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, M: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Scores are transposed here, [keys, queries]: the first factor of a product stays in registers."""
    TURNS: tl.constexpr = GROUP * (BLOCK // M)
    index = tl.arange(0, M)
    block = tl.load(lists + begin)
    for at in tl.range(begin * TURNS, stop * TURNS):
        head = first_head + at % GROUP
        first = block * BLOCK + (at // GROUP) % (BLOCK // M) * M
        block = tl.load(lists + (at + 1) // TURNS)
        queries = q.load([first, head * D])
        grad_out = grad.load([first, head * D])
        number = head * padded + first
        score = _dot(k, tl.trans(queries))
        if IS_MASKED:
            token = first + index  # after the last token: after every end, so not seen
            is_seen = (key[:, None] <= token[None, :]) & (token[None, :] < end[:, None])
            if begins is not None:
                is_seen &= key[:, None] >= begins.load([first])[None, :]
            score = tl.where(is_seen, score, float("-inf"))
        weight = tl.exp2(score * SCALE - lse.load([number])[None, :])
        grad_weight = _dot(v, tl.trans(grad_out))
        grad_score = weight * (grad_weight - delta.load([number])[None, :])
        grad_v = _add_dot(grad_v, weight.to(grad_out.dtype), grad_out)
        grad_k = _add_dot(grad_k, grad_score.to(queries.dtype), queries)
    return grad_k, grad_v


@triton.jit(do_not_specialize=["length"])
def backward_kv(
    q, k, v, grad, lse, delta, grad_k, grad_v, sums, ends, begins, items, lists, length,
    k_stride, k_head, v_stride, v_head,
    FACTOR: tl.constexpr, SCALE: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The gradients of k and v; of split lists their partial sums [slots, K, 2, K_BLOCK, W]."""
    TILES: tl.constexpr = K_BLOCK // N
    KV_HEADS: tl.constexpr = HEADS // GROUP
    kv_head = tl.program_id(0)
    item = items + (tl.program_id(1) // TILES) * 5
    offset = (tl.program_id(1) % TILES) * N
    first = tl.load(item) * K_BLOCK + offset
    begin, middle, stop = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    slot = tl.load(item + 4)
    index = tl.arange(0, N)
    here = tl.minimum(index, length - 1 - first)
    columns = tl.arange(0, W)
    key, start = first + index, first.to(tl.int64)
    end = tl.load(ends + first + here)
    keys = _load(k + start * k_stride + kv_head * k_head, here * k_stride, columns, D, W)
    values = _load(v + start * v_stride + kv_head * v_head, here * v_stride, columns, D, W)
    padded = _round_up(length, Q_BLOCK)
    total_k = tl.zeros([N, W], tl.float32)
    total_v = tl.zeros([N, W], tl.float32)
    total_k, total_v = _fold_grad_kv(
        total_k, total_v, keys, values, key, end, begins, q, grad, lse, delta, kv_head * GROUP,
        lists, begin, middle, padded, SCALE, GROUP, D, Q_BLOCK, M, False,
    )  # fmt: skip
    total_k, total_v = _fold_grad_kv(
        total_k, total_v, keys, values, key, end, begins, q, grad, lse, delta, kv_head * GROUP,
        lists, middle, stop, padded, SCALE, GROUP, D, Q_BLOCK, M, True,
    )  # fmt: skip
    total_k *= FACTOR
    if slot < 0:
        target = start * (KV_HEADS * D) + kv_head * D
        _store(grad_k + target, here * (KV_HEADS * D), columns, key < length, total_k, D)
        _store(grad_v + target, here * (KV_HEADS * D), columns, key < length, total_v, D)
    else:
        at_slot = (slot.to(tl.int64) * KV_HEADS + kv_head) * 2
        partial = sums + at_slot * (K_BLOCK * W) + (offset + index)[:, None] * W + columns[None, :]
        tl.store(partial, total_k)
        tl.store(partial + K_BLOCK * W, total_v)


@triton.jit(do_not_specialize=["length"])
def add_pieces(
    sums, grad_k, grad_v, splits, length,
    KV_HEADS: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    K_BLOCK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = K_BLOCK // N
    kv_head = tl.program_id(0)
    split = splits + (tl.program_id(1) // TILES) * 3
    offset = (tl.program_id(1) % TILES) * N
    index = tl.arange(0, N)
    columns = tl.arange(0, W)
    within = (offset + index)[:, None] * W + columns[None, :]
    total_k = tl.zeros([N, W], tl.float32)
    total_v = tl.zeros([N, W], tl.float32)
    for slot in tl.range(tl.load(split + 1), tl.load(split + 2)):
        source = sums + (slot * KV_HEADS + kv_head).to(tl.int64) * (2 * K_BLOCK * W) + within
        total_k += tl.load(source)
        total_v += tl.load(source + K_BLOCK * W)
    first = tl.load(split) * K_BLOCK + offset
    target = first.to(tl.int64) * (KV_HEADS * D) + kv_head * D
    is_row = first + index < length
    _store(grad_k + target, index * (KV_HEADS * D), columns, is_row, total_k, D)
    _store(grad_v + target, index * (KV_HEADS * D), columns, is_row, total_v, D)

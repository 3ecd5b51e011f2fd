"""Chunks of a recurrence (`layers.chunks`): rows of some tokens, and the state after a whole chunk.

    n parts, T tokens, K key heads of size dk, H value heads of size dv, C positions of a chunk

A part is the tokens of one path that lie in one chunk. One program computes some values of one head of a
part: of a token alone where every part is one (decoding), else of as many rows as a chunk has (prompts, the
learner), by the same code.

What is added up goes through products in float32, which a GPU computes without tensor cores: one number
after the other, in the order of the sum, each multiplied and added at once (`tests/models/compiled_order`).
Tiles decide who adds, not in which order, so a row has the same bits in both forms, and beside any others.
Where a product meets a sum outside of them, `tl.fma` says what a compiler else decides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.models.recurrence import CHUNK

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""`ScanInputs`: q, k, v, decay and beta."""
Slots = tuple[Tensor, Tensor, Tensor]
"""`ChunkRows`: k, u and log, by slot."""

NONE = -1
"""A place in a part that is not written."""


class ChunkPart(NamedTuple):
    """The columns of a table of parts."""

    first: int
    """Its first token."""
    at: int
    """The row of this token in its chunk."""
    count: int
    """Its tokens; 0: the part is skipped."""
    state: int
    """The index of the state at the beginning of the chunk."""
    rows: int
    """The slot of the rows before `at`."""
    written: int
    """The slot that takes its rows, or NONE."""
    next: int
    """The index for the state at the end of the chunk, if the part reaches it, or NONE."""


_NONE, _FIELDS = tl.constexpr(NONE), tl.constexpr(len(ChunkPart._fields))
_C = tl.constexpr(CHUNK)

BLOCK_KEY, BLOCK_VALUE = 16, 64
"""Tiles of a state. No bit depends on them."""
WARPS = {1: 4, CHUNK: 8}
"""Warps of a program, by its rows."""


@triton.jit
def _advance(
    q, k,  # [T, K, dk]
    v,  # [T, H, dv]
    decay,  # [T, H]
    beta,  # [T, H], or None
    parts,  # [n, FIELDS]
    states, next_states,  # [., H, dv, dk]
    k_slots,  # [slots, K, C, dk], or None: no part has rows before it, and none are written
    u_slots,  # [slots, H, C, dv]
    log_slots,  # [slots, H, C]
    read,  # [T, H, dv]
    H: tl.constexpr, K: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr,  # 1 or C
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    part = parts + tl.program_id(0).to(tl.int64) * _FIELDS
    first, at, count = tl.load(part), tl.load(part + 1), tl.load(part + 2)
    if count == 0:
        return
    before, written, after = tl.load(part + 4), tl.load(part + 5), tl.load(part + 6)
    head = tl.program_id(1)
    key_head = head // (H // K)
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    position = tl.arange(0, _C)
    row = tl.arange(0, ROWS)
    if ROWS == 1:
        row += at
    is_known, is_new = position < at, (position >= at) & (position < at + count)
    is_stored = (position >= at) & (position < tl.where(written == _NONE, at, at + count))
    is_own = (row >= at) & (row < at + count)
    token, own_token = first + position - at, first + row - at
    is_value = value < DV
    state = states + ((tl.load(part + 3) * H + head) * DV + value)[:, None] * DK

    # logarithms of the decay since the beginning of the chunk, added row after row
    total = 0.0
    log = tl.zeros([_C], tl.float32)
    if k_slots is not None:
        here = log_slots + (before * H + head) * _C
        log = tl.load(here + position, mask=is_known, other=0.0)
        total = tl.load(here + at - 1, mask=at > 0, other=0.0)
    for number in tl.range(0, count):
        total += tl.load(decay + (first + number) * H + head)
        log = tl.where(position == at + number, total, log)

    # keys and queries of the rows times the state, and times the keys of the chunk
    k_state = tl.zeros([ROWS, BLOCK_V], tl.float32)
    q_state = tl.zeros([ROWS, BLOCK_V], tl.float32)
    k_keys = tl.zeros([ROWS, _C], tl.float32)
    q_keys = tl.zeros([ROWS, _C], tl.float32)
    for begin in tl.range(0, DK, BLOCK_K):
        key = begin + tl.arange(0, BLOCK_K)
        is_key = (key < DK)[None, :]
        place = (own_token * K + key_head)[:, None] * DK + key[None, :]
        own_keys = tl.load(k + place, mask=is_own[:, None] & is_key, other=0.0)
        queries = tl.load(q + place, mask=is_own[:, None] & is_key, other=0.0)
        place = (token * K + key_head)[:, None] * DK + key[None, :]
        keys = tl.load(k + place, mask=is_new[:, None] & is_key, other=0.0)
        if k_slots is not None:
            within = position[:, None] * DK + key[None, :]
            if (head % (H // K) == 0) & (tl.program_id(2) == 0):
                of_slot = k_slots + (written * K + key_head) * _C * DK
                tl.store(of_slot + within, keys, mask=is_stored[:, None] & is_key)
            of_rows = k_slots + (before * K + key_head) * _C * DK
            known = tl.load(of_rows + within, mask=is_known[:, None] & is_key, other=0.0)
            keys = tl.where(is_known[:, None], known, keys)
        tile = tl.load(state + key[None, :], mask=is_value[:, None] & is_key, other=0.0)
        k_state = tl.dot(own_keys, tl.trans(tile), k_state, input_precision="ieee")
        q_state = tl.dot(queries, tl.trans(tile), q_state, input_precision="ieee")
        k_keys = tl.dot(own_keys, tl.trans(keys), k_keys, input_precision="ieee")
        q_keys = tl.dot(queries, tl.trans(keys), q_keys, input_precision="ieee")

    own_log = log
    if ROWS == 1:
        own_log = tl.zeros([ROWS], tl.float32) + total
    share = tl.exp(own_log)[:, None]
    is_seen = position[None, :] <= row[:, None]
    since = tl.exp(tl.where(is_seen, own_log[:, None] - log[None, :], float("-inf")))

    # what is added to the state: of each row after those before it
    u = tl.zeros([_C, BLOCK_V], tl.float32)
    inside = position[:, None] * DV + value[None, :]
    if k_slots is not None:
        of_rows = u_slots + (before * H + head) * _C * DV
        u = tl.load(of_rows + inside, mask=is_known[:, None] & is_value[None, :], other=0.0)
    own_place = (own_token * H + head)[:, None] * DV + value[None, :]
    is_mine = is_own[:, None] & is_value[None, :]
    if beta is None:
        v_place = (token * H + head)[:, None] * DV + value[None, :]
        added = tl.load(v + v_place, mask=is_new[:, None] & is_value[None, :], other=0.0)
        u = tl.where(is_new[:, None], added, u)
    else:
        values = tl.load(v + own_place, mask=is_mine, other=0.0)
        missing = tl.fma(-share, k_state, values)
        weights = tl.where(position[None, :] < row[:, None], k_keys * since, 0.0)
        for number in tl.range(0, count):
            is_row = (row == at + number)[:, None]
            of_row = tl.sum(tl.where(is_row, weights, 0.0), 0)[None, :]  # picks it: others are 0
            stored = tl.dot(of_row, u, input_precision="ieee")
            wanted = tl.sum(tl.where(is_row, missing, 0.0), 0)[None, :]
            new = (wanted - stored) * tl.load(beta + (first + number) * H + head)
            u = tl.where((position == at + number)[:, None], new, u)

    result = tl.fma(share, q_state, tl.dot(q_keys * since, u, input_precision="ieee"))
    tl.store(read + own_place, result, mask=is_mine)
    if k_slots is not None:
        of_head = (written * H + head) * _C
        tl.store(u_slots + of_head * DV + inside, u, mask=is_stored[:, None] & is_value[None, :])
        if tl.program_id(2) == 0:
            tl.store(log_slots + of_head + position, log, mask=is_stored)

    if (at + count == _C) & (after != _NONE):
        left = u * tl.exp(total - log)[:, None]
        target = next_states + ((after * H + head) * DV + value)[:, None] * DK
        for begin in tl.range(0, DK, BLOCK_K):
            key = begin + tl.arange(0, BLOCK_K)
            is_key = (key < DK)[None, :]
            place = (token * K + key_head)[:, None] * DK + key[None, :]
            keys = tl.load(k + place, mask=is_new[:, None] & is_key, other=0.0)
            if k_slots is not None:
                within = position[:, None] * DK + key[None, :]
                of_rows = k_slots + (before * K + key_head) * _C * DK
                known = tl.load(of_rows + within, mask=is_known[:, None] & is_key, other=0.0)
                keys = tl.where(is_known[:, None], known, keys)
            mask = is_value[:, None] & is_key
            tile = tl.load(state + key[None, :], mask=mask, other=0.0) * tl.exp(total)
            tile = tl.dot(tl.trans(left), keys, tile, input_precision="ieee")
            tl.store(target + key[None, :], tile, mask=mask)


def advance(
    new: Inputs,
    parts: Tensor,
    states: Tensor,
    next_states: Tensor,
    slots: Slots | None = None,
    is_single: bool = False,
    read: Tensor | None = None,
) -> Tensor:
    """What each token reads, [T, H, dv], of inputs [T, ...]; rows and states are written as `parts` say.

    parts        [n, 7] int64, the columns of `ChunkPart`
    states       [., H, dv, dk] those at the beginnings of chunks; `next_states` may be the same tensor
    slots        the rows of chunks in progress; None: every part begins its chunk, and no rows are kept
    is_single    every part is one token
    read         takes the result; tokens of no part are left as they are
    """
    q, k, v, decay, beta = (None if x is None else x.contiguous() for x in new)
    assert k is not None and v is not None
    (heads, value_dim), (key_heads, key_dim) = v.shape[1:], k.shape[1:]
    read = torch.empty_like(v) if read is None else read
    rows = 1 if is_single else CHUNK
    block_key = min(BLOCK_KEY, max(triton.next_power_of_2(key_dim), 16))
    block_value = min(BLOCK_VALUE, max(triton.next_power_of_2(value_dim), 16))
    if not len(parts):
        return read
    _advance[(len(parts), heads, triton.cdiv(value_dim, block_value))](
        q, k, v, decay, beta, parts, states, next_states,
        *((None, None, None) if slots is None else slots), read,
        H=heads, K=key_heads, DK=key_dim, DV=value_dim, ROWS=rows,
        BLOCK_K=block_key, BLOCK_V=block_value, num_warps=WARPS[rows],
    )  # fmt: skip
    return read


def scan(state: Tensor, new: Inputs) -> tuple[Tensor, Tensor]:
    """What every row reads, [n, W, H, dv], and the next states, of the W first rows of n chunks, [n, W, ...].

    The next state of a chunk with fewer than C rows is left as memory was.
    """
    count, width = new[2].shape[:2]
    number = torch.arange(count, device=state.device)
    zero = torch.zeros_like(number)
    columns = number * width, zero, zero + width, number, zero, zero + NONE, number
    flat: Any = tuple(None if x is None else x.flatten(0, 1) for x in new)
    states = state.contiguous()
    after = torch.empty_like(states)
    read = advance(flat, torch.stack(columns, 1), states, after)
    return read.unflatten(0, (count, width)), after

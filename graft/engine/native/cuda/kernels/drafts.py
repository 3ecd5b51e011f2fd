"""Drafts on the device: find where the last tokens were written before, verify, go on; without the host.

    C rows of a burst, E rows for drafted tokens after them, which read the pages of the row they belong to

    find     the longest match of each row's last tokens in its own text, those of its peers, and its archive
    share    rows 0 and 2 match: rows C and C+1 get two tokens of row 0's draft, C+2 and C+3 two of row 2's
    (step)   embedding ... draw, for C + E rows
    accept   the draw of row 0 is the token of row C: go on there; its draw is not that of C+1: row 0 takes
             over the state of row C, with the results of both

What a row draws after the tokens of another row's state is what that row would draw when it got there: the
state of the last right one is copied, and nothing is computed again.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from graft.engine.native.cuda.kernels.draw import FIELDS, DrawField

MIN_MATCH, MAX_MATCH = 3, 12
MAX_DRAFT = 8
PEERS = 8
"""Other rows of the burst whose texts are searched."""
BLOCK = 512
NO_TAIL = 1 << 20

_MIN_MATCH = tl.constexpr(MIN_MATCH)
_MAX_MATCH = tl.constexpr(MAX_MATCH)
_MAX_DRAFT = tl.constexpr(MAX_DRAFT)
_PEERS = tl.constexpr(PEERS)
_FIELDS = tl.constexpr(FIELDS)
_NO_TAIL = tl.constexpr(NO_TAIL)
_TOKEN = tl.constexpr(int(DrawField.TOKEN))
_POSITION = tl.constexpr(int(DrawField.POSITION))
_LENGTH = tl.constexpr(int(DrawField.LENGTH))
_DRAWN = tl.constexpr(int(DrawField.DRAWN))
_BUDGET = tl.constexpr(int(DrawField.BUDGET))
_TAIL = tl.constexpr(int(DrawField.TAIL))
_SHARED = tl.constexpr(int(DrawField.SHARED))


class DraftState(NamedTuple):
    """The buffers of a burst with drafts, at fixed addresses."""

    texts: Tensor
    """[C, W] int32: the last tokens of each row's context."""
    offsets: Tensor
    """[C] int32: the position of the first of them."""
    peers: Tensor
    """[C, PEERS] int32: rows of the same task; -1: none."""
    archive: Tensor
    """[A] int32: finished texts, -1 after each."""
    spans: Tensor
    """[C, 3] int32: the part of the archive that is searched, first, last + 1, and where texts under earlier
    weights begin in it."""
    best: Tensor
    """[C] int64: length, source and place of the best match of the step; 0: none."""
    fed: Tensor
    """[E] int64: the drafted token of each row."""
    counts: Tensor
    """[C, 6] int32: proposed from the row's own text, its peers', earlier ones; accepted of these."""


@triton.jit(do_not_specialize=["state_stride", "width"])
def _find(
    state, state_stride, texts, width, offsets, peers, archive, spans, best, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    region = tl.program_id(1)
    if tl.load(state + _LENGTH * state_stride + row) == 0:
        return
    length = tl.load(state + _POSITION * state_stride + row) + 1 - tl.load(offsets + row)
    mine = texts + row * width
    source = mine
    first = tl.full([], 0, tl.int64)
    stop = length
    rank = 2
    if region > 0:
        rank = 1
        if region <= _PEERS:
            peer = tl.load(peers + row * _PEERS + region - 1).to(tl.int64)
            its_row = tl.maximum(peer, 0)
            source = texts + its_row * width
            stop = (
                tl.load(state + _POSITION * state_stride + its_row) + 1 - tl.load(offsets + its_row)
            )
            stop = tl.where(peer < 0, 0, stop)
        else:
            source = archive
            first = tl.load(spans + row * 3).to(tl.int64)
            stop = tl.load(spans + row * 3 + 1).to(tl.int64)
            rank = 0
    longest = tl.full([], 0, tl.int64)
    for start in range(first + _MIN_MATCH, stop, BLOCK):
        end = start + tl.arange(0, BLOCK)
        agrees = end < stop
        size = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(_MIN_MATCH):
            last = tl.load(mine + length - 1 - back, mask=length > back, other=-2)
            token = tl.load(source + end - 1 - back, mask=agrees, other=-1)
            agrees = agrees & (token == last)
            size += agrees.to(tl.int64)
        if tl.max(agrees.to(tl.int32), 0) > 0:
            for back in tl.static_range(_MIN_MATCH, _MAX_MATCH):
                last = tl.load(mine + length - 1 - back, mask=length > back, other=-2)
                is_there = agrees & (end - 1 - back >= first)
                token = tl.load(source + end - 1 - back, mask=is_there, other=-1)
                agrees = is_there & (token == last)
                size += agrees.to(tl.int64)
            packed = (size << 44) | (tl.full([BLOCK], 0, tl.int64) + rank << 40)
            packed = packed | (tl.full([BLOCK], 0, tl.int64) + region << 32) | end.to(tl.int64)
            longest = tl.maximum(longest, tl.max(tl.where(size >= _MIN_MATCH, packed, 0), 0))
    if longest != 0:
        tl.atomic_max(best + row, longest)


@triton.jit
def _wanted(size, level):
    """Tokens that a match of `size` asks for: all at the highest level, at lower ones fewer."""
    return tl.minimum(size * level * level // 8, _MAX_DRAFT)


@triton.jit
def _rows_of(state, state_stride, best, base, room, C_2: tl.constexpr):
    """Drafted tokens of every row, at most `room` together: at the highest level at which they fit."""
    number = tl.arange(0, C_2)
    inside = number < base
    packed = tl.load(best + number, mask=inside, other=0)
    length = tl.load(state + _LENGTH * state_stride + number, mask=inside, other=0)
    drawn = tl.load(state + _DRAWN * state_stride + number, mask=inside, other=0)
    budget = tl.load(state + _BUDGET * state_stride + number, mask=inside, other=0)
    size = packed >> 44
    room_left = tl.where((length > 0) & (size > 0), tl.maximum(budget - drawn - 1, 0), 0)
    room_left = tl.minimum(room_left, room)
    counts = tl.zeros([C_2], tl.int64)
    for less in tl.static_range(8):
        wanted = tl.minimum(_wanted(size, 8 - less), room_left)
        is_new = (tl.sum(counts, 0) == 0) & (tl.sum(wanted, 0) <= room)
        counts = tl.where(is_new, wanted, counts)
    return counts


@triton.jit
def _token_of(draft, texts, width, peers, archive, row, length, place):
    """The token at a place of the row's draft; -1 behind its end."""
    region = (draft >> 32) & 0xFF
    end = draft & 0xFFFFFFFF
    at = end + place
    if region == 0:
        period = length - end
        token = tl.load(texts + row * width + end + place % tl.maximum(period, 1))
    elif region <= _PEERS:
        peer = tl.load(peers + row * _PEERS + region - 1).to(tl.int64)
        token = tl.load(texts + peer * width + at, mask=at < width, other=-1)
    else:
        token = tl.load(archive + at)
    return token


@triton.jit(
    do_not_specialize=[
        "state_stride",
        "width",
        "table_stride",
        "stop_count",
        "vocabulary",
        "base",
        "room",
    ]
)
def _share(
    state, state_stride, texts, width, peers, archive, best, fed, table, table_stride, inv_temperature,
    exponents, is_plain, truncations, stops, stop_count, vocabulary, offsets, base, room,
    C_2: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    extra = tl.program_id(0)
    target = (base + extra).to(tl.int64)
    counts = _rows_of(state, state_stride, best, base, room, C_2)
    reach = tl.cumsum(counts, 0)
    number = tl.arange(0, C_2)
    here = (reach > extra) & (reach - counts <= extra) & (counts > 0)
    row = tl.sum(tl.where(here, number, 0), 0).to(tl.int64)
    is_used = tl.max(here.to(tl.int32), 0) > 0
    token = tl.full([], -1, tl.int32)
    place = extra - tl.sum(tl.where(here, reach - counts, 0), 0)
    if is_used:
        length = tl.load(state + _POSITION * state_stride + row) + 1 - tl.load(offsets + row)
        draft = tl.load(best + row)
        token = _token_of(draft, texts, width, peers, archive, row, length, place)
        region = (draft >> 32) & 0xFF
        if (region > 0) & (region <= _PEERS):  # where its text ends, so does the draft
            peer = tl.load(peers + row * _PEERS + region - 1).to(tl.int64)
            its_length = (
                tl.load(state + _POSITION * state_stride + peer) + 1 - tl.load(offsets + peer)
            )
            token = tl.where((draft & 0xFFFFFFFF) + place < its_length, token, -1)
    is_used = is_used & (token >= 0) & (token < vocabulary)
    tl.store(fed + extra, tl.where(is_used, token, -1).to(tl.int64))
    if not is_used:
        tl.store(state + _LENGTH * state_stride + target, tl.full([], 0, tl.int64))
        tl.store(state + _TAIL * state_stride + target, tl.full([], _NO_TAIL, tl.int64))
        return
    for field in tl.static_range(_FIELDS):
        tl.store(state + field * state_stride + target, tl.load(state + field * state_stride + row))
    ahead = place.to(tl.int64) + 1
    tl.debug_barrier()
    position = tl.load(state + _POSITION * state_stride + row) + ahead
    tl.store(state + _TOKEN * state_stride + target, token.to(tl.int64))
    tl.store(state + _POSITION * state_stride + target, position)
    tl.store(state + _LENGTH * state_stride + target, position + 1)
    drawn = tl.load(state + _DRAWN * state_stride + row)
    tl.store(state + _DRAWN * state_stride + target, drawn + ahead)
    tl.store(state + _TAIL * state_stride + target, tl.full([], 0, tl.int64))
    tl.store(state + _SHARED * state_stride + target, tl.full([], 0, tl.int64))
    tl.store(inv_temperature + target, tl.load(inv_temperature + row))
    tl.store(exponents + target, tl.load(exponents + row))
    tl.store(is_plain + target, tl.load(is_plain + row))
    for cut in tl.static_range(3):
        tl.store(
            truncations + cut * (base + room) + target,
            tl.load(truncations + cut * (base + room) + row),
        )
    for stop in range(stop_count):
        tl.store(stops + target * stop_count + stop, tl.load(stops + row * stop_count + stop))
    last = position // PAGES + 1
    for start in range(0, last, 64):
        page = start + tl.arange(0, 64)
        pages = tl.load(table + row * table_stride + page, mask=page < last, other=0)
        tl.store(table + target * table_stride + page, pages, mask=page < last)


@triton.jit(do_not_specialize=["state_stride", "width", "base", "room"])
def _accept(
    state, state_stride, before, texts, width, best, fed, counts_out, spans, results, offsets, base, room,
    C_2: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    was_alive = tl.load(before + _LENGTH * base + row) > 0
    if not was_alive:
        return
    counts = _rows_of(before, base, best, base, room, C_2)
    number = tl.arange(0, C_2)
    first = tl.sum(tl.where(number < row, counts, 0), 0)
    count = tl.sum(tl.where(number == row, counts, 0), 0)
    at = row
    accepted = tl.full([], 0, tl.int64)
    proposed = tl.full([], 0, tl.int64)
    goes_on = tl.full([], 1, tl.int1)
    position = tl.load(state + _POSITION * state_stride + row)
    token = tl.load(state + _TOKEN * state_stride + row)
    line_start = texts + (row * width - tl.load(offsets + row))
    tl.store(line_start + position, token.to(tl.int32))
    for place in range(count):
        extra = first + place
        target = base + extra
        expected = tl.load(fed + extra)
        proposed += (expected >= 0).to(tl.int64)
        is_alive = tl.load(state + _LENGTH * state_stride + at) > 0
        goes_on = goes_on & is_alive & (expected >= 0) & (expected == token)
        if goes_on:
            at = target
            accepted += 1
            position = tl.load(state + _POSITION * state_stride + at)
            token = tl.load(state + _TOKEN * state_stride + at)
            tl.store(line_start + position, token.to(tl.int32))
            drawn = tl.load(state + _DRAWN * state_stride + at) - 1
            for kind in tl.static_range(3):
                line = results + (kind * STEPS + drawn) * (base + room)
                tl.store(line + row, tl.load(line + at))
    if accepted > 0:
        for field in tl.static_range(_FIELDS):
            if field != _TAIL and field != _SHARED:
                tl.store(
                    state + field * state_stride + row, tl.load(state + field * state_stride + at)
                )
    draft = tl.load(best + row)
    region = (draft >> 32) & 0xFF
    is_earlier = (region > _PEERS) & ((draft & 0xFFFFFFFF) >= tl.load(spans + row * 3 + 2))
    source = tl.where(region == 0, 0, tl.where(is_earlier, 2, 1))
    tally = counts_out + row * 6 + source
    tl.store(tally, tl.load(tally) + proposed.to(tl.int32))
    tl.store(tally + 3, tl.load(tally + 3) + accepted.to(tl.int32))


def propose(
    draft: DraftState,
    state: Tensor,
    rows: Tensor,
    buffers: tuple[Tensor, ...],
    page: int,
    vocabulary: int,
) -> None:
    """Give drafted tokens to the rows after the first C.

    rows     [rows, P] pages of each
    buffers  inv_temperature, exponents, is_plain, truncations, stops
    """
    base, extra = len(draft.best), len(draft.fed)
    draft.best.zero_()
    width = draft.texts.shape[1]
    _find[(base, PEERS + 2)](
        state, state.stride(0), draft.texts, width, draft.offsets, draft.peers, draft.archive,
        draft.spans, draft.best, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    _share[(extra,)](
        state, state.stride(0), draft.texts, width, draft.peers, draft.archive, draft.best, draft.fed,
        rows, rows.stride(0), *buffers, buffers[-1].shape[1], vocabulary,
        draft.offsets, base, extra, C_2=_width_of(base), PAGES=page, num_warps=1,
    )  # fmt: skip


def _width_of(base: int) -> int:
    """Rows that a program counts over: few sizes, since each is compiled anew."""
    return 64 if base <= 64 else triton.next_power_of_2(max(base, 512))


def accept(draft: DraftState, state: Tensor, before: Tensor, results: Tensor) -> None:
    """Let the first C rows take over what was drawn after right tokens; `before` [FIELDS, C] is their state
    before the step."""
    base, extra = len(draft.best), len(draft.fed)
    _accept[(base,)](
        state, state.stride(0), before, draft.texts, draft.texts.shape[1], draft.best, draft.fed,
        draft.counts, draft.spans, results, draft.offsets, base, extra,
        C_2=_width_of(base), STEPS=results.shape[1], num_warps=1,
    )  # fmt: skip

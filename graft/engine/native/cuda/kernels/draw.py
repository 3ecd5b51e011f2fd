"""Draw a token, and compute its log-prob and the entropy, in one pass over the logits.

    B rows, V vocabulary, C chunks of CHUNK columns

`_chunk_stats` reads every logit once and writes per chunk: maximum m, sum of exp(z - m) and sum of
z exp(z - m). `_draw` combines the chunks, which gives log-sum-exp and entropy, finds the chunk in which the
cumulative sum passes the row's random number, or that of the maximum, and reads that one chunk again to
find the token: the distribution is inverted as in the plain sampler, with one random number a row instead
of one a logit, and no probabilities are ever written to memory.

Then it advances the row: the drawn token becomes its next input, unless the row is over. So a graph of
the whole step can be replayed without the host. With the tables of a grammar (`grammar_tables`) it also
looks up the next mode and what the action writes: a row in the middle of a description takes the next
token of its script instead of drawing, and its result is NO_ACTION.

state [FIELDS, B] int64, one line per `DrawField`; a row of length 0 is left unchanged.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.engine.native.sampling.grammar_tables import GrammarTables

CHUNK = 4096
STATS = 3
_STATS = tl.constexpr(STATS)


class DrawField(IntEnum):
    """The lines of a burst's state."""

    TOKEN = 0
    """The next input of the model."""
    POSITION = 1
    """Its position."""
    LENGTH = 2
    """Tokens it attends to, itself included; 0: the row is over, or unused."""
    DRAWN = 3
    """Tokens drawn in this burst."""
    BUDGET = 4
    """Tokens the row may draw in this burst."""
    FORCED = 5
    """Draws of this burst in which stop tokens are not allowed (`min_tokens`)."""
    KEY = 6
    """Of its random numbers, see `uniforms.row_keys`."""
    GREEDY = 7
    MODE = 8
    TAIL = 9
    """First page of its tail, see `kv.sharing`."""
    SHARED = 10
    """Slots of shared spans; in the order of positions, shared pages of its tail."""
    SCRIPT = 11
    """Index of the next token of its script; 0: it draws. See `grammar_tables`."""


FIELDS = len(DrawField)
_TOKEN = tl.constexpr(int(DrawField.TOKEN))
_POSITION = tl.constexpr(int(DrawField.POSITION))
_LENGTH = tl.constexpr(int(DrawField.LENGTH))
_DRAWN = tl.constexpr(int(DrawField.DRAWN))
_BUDGET = tl.constexpr(int(DrawField.BUDGET))
_FORCED = tl.constexpr(int(DrawField.FORCED))
_KEY = tl.constexpr(int(DrawField.KEY))
_GREEDY = tl.constexpr(int(DrawField.GREEDY))
_MODE = tl.constexpr(int(DrawField.MODE))
_SCRIPT = tl.constexpr(int(DrawField.SCRIPT))


@triton.jit
def _scores(
    logits,
    row,
    column,
    vocabulary,
    logits_stride,
    state,
    state_stride,
    inv_temperature,
    floors,
    allowed,
    stops,
    HAS_MASK: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
    STOPS: tl.constexpr,
):
    """The scaled logits of some columns, -inf where they may not be drawn."""
    inside = column < vocabulary
    score = tl.load(logits + row * logits_stride + column, mask=inside, other=float("-inf"))
    score = score.to(tl.float32) * tl.load(inv_temperature + row)
    if HAS_MASK:
        mode = tl.load(state + _MODE * state_stride + row)
        is_allowed = tl.load(allowed + mode * vocabulary + column, mask=inside, other=0)
        score = tl.where(is_allowed != 0, score, float("-inf"))
    if STOPS > 0:
        drawn = tl.load(state + _DRAWN * state_stride + row)
        must_go_on = drawn < tl.load(state + _FORCED * state_stride + row)
        for number in tl.static_range(STOPS):
            stop = tl.load(stops + row * STOPS + number)
            score = tl.where(must_go_on & (column == stop), float("-inf"), score)
    if HAS_FLOOR:
        score = tl.where(score < tl.load(floors + row), float("-inf"), score)
    return score


@triton.jit(do_not_specialize=["logits_stride", "state_stride"])
def _chunk_stats(
    logits,
    logits_stride,
    state,
    state_stride,
    inv_temperature,
    floors,
    allowed,
    stops,
    stats,  # [B, C, STATS] float32
    occupied,  # [modes, C] whether a mode allows anything in a chunk
    vocabulary: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
    HAS_GRAMMAR: tl.constexpr,
    STOPS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    is_idle = tl.load(state + _LENGTH * state_stride + row) == 0
    if HAS_GRAMMAR:
        is_idle = is_idle | (tl.load(state + _SCRIPT * state_stride + row) != 0)
    if HAS_MASK:
        mode = tl.load(state + _MODE * state_stride + row)
        is_idle = is_idle | (tl.load(occupied + mode * CHUNKS + chunk) == 0)
    if is_idle:
        return
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    score = _scores(
        logits,
        row,
        column,
        vocabulary,
        logits_stride,
        state,
        state_stride,
        inv_temperature,
        floors,
        allowed,
        stops,
        HAS_MASK,
        HAS_FLOOR,
        STOPS,
    )
    top = tl.max(score, 0)
    weight = tl.exp(score - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    moment = tl.sum(tl.where(score == float("-inf"), 0.0, weight * score), 0)
    stat = stats + (row * CHUNKS + chunk) * _STATS
    tl.store(stat, top)
    tl.store(stat + 1, total)
    tl.store(stat + 2, moment)


@triton.jit
def _uniform(key, position):
    """`uniforms.uniforms` of the row's key and position: a number in [0, 1)."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    x = key.to(tl.uint64, bitcast=True) + position.to(tl.uint64) * golden
    x = x + golden
    x = (x ^ (x >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    x = x ^ (x >> 31)
    return (x >> 40).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit(do_not_specialize=["logits_stride", "state_stride", "batch"])
def _draw(
    logits,
    logits_stride,
    state,
    state_stride,
    inv_temperature,
    floors,
    allowed,
    stops,
    stats,
    occupied,
    drawn_actions,  # [3, STEPS, B] float32: action, log-prob, entropy
    picked,  # [3, B] action, mode and step of the draw, or None
    batch,
    action_column,  # these three: see `grammar_tables`
    table,
    script,
    vocabulary: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_2: tl.constexpr,
    CHUNK: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
    HAS_GRAMMAR: tl.constexpr,
    TABLE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STOPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    here = state + row
    length = tl.load(here + _LENGTH * state_stride)
    if length == 0:
        return
    position = tl.load(here + _POSITION * state_stride)
    drawn = tl.load(here + _DRAWN * state_stride)
    budget = tl.load(here + _BUDGET * state_stride)
    result = drawn_actions + drawn * batch + row
    if HAS_GRAMMAR:
        script_index = tl.load(here + _SCRIPT * state_stride)
        if script_index != 0:  # in the middle of a description
            token = tl.load(script + script_index)
            has_more = tl.load(script + script_index + 1) >= 0
            tl.debug_barrier()  # every warp must have read the state before it is overwritten
            tl.store(result, -1.0)
            tl.store(result + STEPS * batch, 0.0)
            tl.store(result + 2 * STEPS * batch, 0.0)
            tl.store(here + _TOKEN * state_stride, token.to(tl.int64))
            tl.store(here + _SCRIPT * state_stride, tl.where(has_more, script_index + 1, 0))
            tl.store(here + _POSITION * state_stride, position + 1)
            tl.store(here + _LENGTH * state_stride, tl.where(drawn + 1 >= budget, 0, length + 1))
            tl.store(here + _DRAWN * state_stride, drawn + 1)
            return
    number = tl.arange(0, CHUNKS_2)
    is_chunk = number < CHUNKS
    if HAS_MASK:  # chunks without an allowed column have no stats
        mode = tl.load(here + _MODE * state_stride)
        is_chunk = tl.load(occupied + mode * CHUNKS + number, mask=is_chunk, other=0) != 0
    stat = stats + (row * CHUNKS + number) * _STATS
    tops = tl.load(stat, mask=is_chunk, other=float("-inf"))
    totals = tl.load(stat + 1, mask=is_chunk, other=0.0)
    moments = tl.load(stat + 2, mask=is_chunk, other=0.0)
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    scale = tl.exp(tops - base)
    mass = totals * scale
    total = tl.sum(mass, 0)
    log_total = tl.log(total)
    entropy = log_total + base - tl.sum(moments * scale, 0) / total

    # the chunk in which the cumulative mass passes the target, and how far into it
    uniform = _uniform(tl.load(here + _KEY * state_stride), position + 1)
    target = uniform * total
    reached = tl.cumsum(mass, 0)
    is_behind = (reached > target) & (mass > 0)
    chunk = tl.min(tl.where(is_behind, number, CHUNKS_2), 0)
    is_greedy = tl.load(here + _GREEDY * state_stride) != 0
    chunk = tl.where(is_greedy, tl.min(tl.where(tops == top, number, CHUNKS_2), 0), chunk)
    last = tl.max(tl.where(mass > 0, number, 0), 0)
    chunk = tl.minimum(chunk, last)  # rounding can leave the sum short of the target
    before = tl.sum(tl.where(number < chunk, mass, 0.0), 0)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    score = _scores(
        logits,
        row,
        column,
        vocabulary,
        logits_stride,
        state,
        state_stride,
        inv_temperature,
        floors,
        allowed,
        stops,
        HAS_MASK,
        HAS_FLOOR,
        STOPS,
    )
    weight = tl.exp(score - base)
    passed = (before + tl.cumsum(weight, 0) > target) & (weight > 0)
    passed = tl.where(is_greedy, score == top, passed)
    nowhere = CHUNKS_2 * CHUNK
    token = tl.min(tl.where(passed, column, nowhere), 0)
    likely = tl.max(tl.where(weight > 0, column, 0), 0)
    token = tl.minimum(token, likely)
    chosen = tl.sum(tl.where(column == token, score, 0.0), 0)
    logp = chosen - base - log_total
    logp = tl.where(top == float("-inf"), float("nan"), logp)  # nothing was allowed

    if picked is not None:
        tl.store(picked + row, token.to(tl.int64))
        tl.store(picked + batch + row, tl.load(here + _MODE * state_stride))
        tl.store(picked + 2 * batch + row, drawn)
    tl.store(result, token.to(tl.float32))
    tl.store(result + STEPS * batch, logp)
    tl.store(result + 2 * STEPS * batch, entropy)
    is_stop = logp != logp
    if STOPS > 0:
        for index in tl.static_range(STOPS):
            is_stop = is_stop | (tl.load(stops + row * STOPS + index) == token)
    if HAS_GRAMMAR:
        mode = tl.load(here + _MODE * state_stride)
        rule = table + mode * COLUMNS + tl.load(action_column + token)
        start = tl.load(rule + TABLE_ROWS * COLUMNS)
        writes = start != 0
        has_more = writes & (tl.load(script + start + 1) >= 0)
        token = tl.where(writes, tl.load(script + start), token)  # an action is never fed
        is_stop = (is_stop & ~writes) | (logp != logp)  # a description is no stop token
        is_stop = is_stop | (tl.load(rule + 2 * TABLE_ROWS * COLUMNS) != 0)
        tl.store(here + _MODE * state_stride, tl.load(rule).to(tl.int64))
        tl.store(here + _SCRIPT * state_stride, tl.where(has_more, start + 1, 0).to(tl.int64))
    is_over = is_stop | (drawn + 1 >= budget)
    tl.store(here + _TOKEN * state_stride, token.to(tl.int64))
    tl.store(here + _POSITION * state_stride, position + 1)
    tl.store(here + _LENGTH * state_stride, tl.where(is_over, 0, length + 1))
    tl.store(here + _DRAWN * state_stride, drawn + 1)


def occupied_chunks(allowed: Tensor) -> Tensor:
    """[modes, C] uint8 of allowed [modes, V]: whether a mode allows any column of a chunk."""
    wide = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % CHUNK))
    return wide.view(len(allowed), -1, CHUNK).any(-1).to(torch.uint8)


def draw(
    logits: Tensor,
    state: Tensor,
    inv_temperature: Tensor,
    stops: Tensor,
    results: Tensor,
    *,
    allowed: Tensor | None = None,
    occupied: Tensor | None = None,
    floors: Tensor | None = None,
    grammar: GrammarTables | None = None,
    picked: Tensor | None = None,
) -> None:
    """Draw a token for every row of logits [B,V] that is alive; writes results [3,STEPS,B] and `state`.

    inv_temperature [B] is 1 / temperature, stops [B,n] the stop tokens (-1: none), allowed [modes,V]
    bool with its `occupied_chunks`, floors [B] the lowest score that may be drawn. To
    picked [3,B] go action, mode and step of every draw; rows that draw nothing stay as they are.
    """
    batch, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    stats = torch.empty((batch, chunks, STATS), dtype=torch.float32, device=logits.device)
    nothing = stats  # a pointer that is never read
    if allowed is not None and occupied is None:
        occupied = occupied_chunks(allowed)
    shared = {
        "vocabulary": vocabulary,
        "CHUNKS": chunks,
        "CHUNK": CHUNK,
        "HAS_MASK": allowed is not None,
        "HAS_FLOOR": floors is not None,
        "HAS_GRAMMAR": grammar is not None,
        "STOPS": stops.shape[1],
    }
    inputs = (
        logits,
        logits.stride(0),
        state,
        state.stride(0),
        inv_temperature,
        nothing if floors is None else floors,
        nothing if allowed is None else allowed.view(torch.uint8),
        stops,
        stats,
        nothing if occupied is None else occupied,
    )
    _chunk_stats[(chunks, batch)](*inputs, **shared, num_warps=4)
    _draw[(batch,)](
        *inputs,
        results,
        picked,
        results.shape[2],
        *((nothing,) * 3 if grammar is None else grammar),
        **shared,
        TABLE_ROWS=0 if grammar is None else grammar.table.shape[1],
        COLUMNS=0 if grammar is None else grammar.table.shape[2],
        CHUNKS_2=triton.next_power_of_2(chunks),
        STEPS=results.shape[1],
        num_warps=4,
    )

"""The two passes over rows of logits: log-probs and entropies, and the gradient of the logits.

    u rows, V actions, W = V rounded up: the length of a row in memory

Powers of 2 replace powers of e, since the GPU computes them in hardware: with y = logit / temperature *
log2 e and n = log2 of the sum of all 2^y, an action's probability is 2^(y - n).

With `vocab_size` the same pass also sums the first `vocab_size` actions, the tokens: see `models.logprobs`.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

BLOCK = 4096
"""Actions per step of either kernel."""

FORWARD_WARPS, FORWARD_STAGES, BACKWARD_WARPS = 4, 3, 8
FLOOR_BLOCK, FLOOR_WARPS = 8192, 8
"""Those of the engine's kernel: sums over the same actions in the same order."""

LN2 = tl.constexpr(math.log(2.0))
# finite, unlike -inf: their differences and products are no NaN; 2^(FORBIDDEN - BOTTOM) is 0
FORBIDDEN, BOTTOM = tl.constexpr(-1e30), tl.constexpr(-1e20)


@triton.jit
def _load_logits(logits, allowed, floor, action, columns, num_actions, row_length):
    """(logit, whether it is allowed) of some actions of a row; other logits are FORBIDDEN.

    Allowed are those at `floor` (None: all) or above, and the chosen `action`.
    """
    inside = columns < row_length
    z = tl.load(logits + columns, mask=inside, other=0.0).to(tl.float32)
    if allowed is None:
        is_allowed = columns < num_actions
    else:  # zero beyond the last action
        is_allowed = tl.load(allowed + columns, mask=inside, other=0) != 0
    if floor is not None:
        is_allowed = is_allowed & ((z >= floor) | (columns == action))
    return tl.where(is_allowed, z, FORBIDDEN), is_allowed


# the alignment of a vector over rows does not matter: one compiled kernel serves all
@triton.jit(
    do_not_specialize_on_alignment=[
        "actions_ptr",
        "modes_ptr",
        "logp_ptr",
        "entropy_ptr",
        "norm_ptr",
        "vocab_logp_ptr",
        "floors_ptr",
    ]
)
def forward(
    logits_ptr,  # [u, W]
    actions_ptr,  # [u]
    modes_ptr,  # [u], or None with `allowed`
    allowed_ptr,  # [modes, W] bytes, or None
    logp_ptr,  # [u]
    entropy_ptr,  # [u]
    norm_ptr,  # [u] the n of the module's docstring
    vocab_logp_ptr,  # [u] log-prob of any of the first `vocab_size`, or None
    floors_ptr,  # [u] the lowest logit that is kept, or None
    num_actions,
    vocab_size,
    row_length,
    scale,
    scales_ptr,  # [u] instead of `scale`, or None
    STEPS: tl.constexpr,  # blocks in a row: one number per model
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * row_length
    allowed = None
    if allowed_ptr is not None:
        allowed = allowed_ptr + tl.load(modes_ptr + row).to(tl.int64) * row_length
    if scales_ptr is not None:
        scale = tl.load(scales_ptr + row)

    action = tl.maximum(tl.load(actions_ptr + row).to(tl.int64), 0)  # -1: its result is not used
    floor = None
    if floors_ptr is not None:
        floor = tl.load(floors_ptr + row)

    top = BOTTOM  # the largest y so far
    total = 0.0  # of 2^(y - top)
    moment = 0.0  # of (y - top) 2^(y - top)
    vocab_total = 0.0  # the part of the total that tokens have
    for step in tl.range(0, STEPS, num_stages=STAGES):
        columns = step * BLOCK + tl.arange(0, BLOCK)
        z, _ = _load_logits(logits, allowed, floor, action, columns, num_actions, row_length)
        new_top = tl.maximum(top, tl.max(z, 0) * scale)
        y = z * scale - new_top
        power = tl.exp2(y)
        # sums relative to the old top become relative to the new one
        shift = top - new_top
        shrink = tl.exp2(shift)
        moment = (moment + shift * total) * shrink + tl.sum(y * power, 0)
        total = total * shrink + tl.sum(power, 0)
        if vocab_logp_ptr is not None:
            vocab_total = vocab_total * shrink + tl.sum(
                tl.where(columns < vocab_size, power, 0.0), 0
            )
        top = new_top

    log_total = tl.log2(total)
    chosen, is_allowed = _load_logits(
        logits, allowed, floor, action, action, num_actions, row_length
    )
    logp = tl.where(is_allowed, (chosen * scale - top - log_total) * LN2, float("-inf"))
    tl.store(logp_ptr + row, logp)
    tl.store(entropy_ptr + row, (log_total - moment / total) * LN2)
    tl.store(norm_ptr + row, top + log_total)
    if vocab_logp_ptr is not None:
        # at least the drawn token: its power may underflow, its log does not
        of_vocab = tl.maximum(tl.log2(vocab_total), chosen * scale - top) - log_total
        tl.store(vocab_logp_ptr + row, tl.where(action < vocab_size, of_vocab * LN2, 0.0))


@triton.jit(
    do_not_specialize_on_alignment=[
        "actions_ptr",
        "modes_ptr",
        "norm_ptr",
        "entropy_ptr",
        "vocab_logp_ptr",
        "grad_logp_ptr",
        "grad_entropy_ptr",
        "grad_vocab_ptr",
        "floors_ptr",
    ]
)
def backward(
    logits_ptr,  # [u, W] in: logits; out: their gradient
    actions_ptr,  # [u]
    modes_ptr,  # [u], or None with `allowed`
    allowed_ptr,  # [modes, W] bytes, or None
    norm_ptr,  # [u]
    entropy_ptr,  # [u]
    vocab_logp_ptr,  # [u] or None
    grad_logp_ptr,  # [u] or None
    grad_entropy_ptr,  # [u] or None
    grad_vocab_ptr,  # [u] or None; 0 where no token was chosen
    floors_ptr,  # [u] or None
    num_actions,
    vocab_size,
    row_length,
    scale,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(row_length, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    logits = logits_ptr + row * row_length
    allowed = None
    if allowed_ptr is not None:
        allowed = allowed_ptr + tl.load(modes_ptr + row).to(tl.int64) * row_length

    action = tl.load(actions_ptr + row).to(tl.int32)
    floor = None
    if floors_ptr is not None:
        floor = tl.load(floors_ptr + row)
    z, is_allowed = _load_logits(logits, allowed, floor, action, columns, num_actions, row_length)
    y = z * scale - tl.load(norm_ptr + row)
    p = tl.exp2(y)
    # d logp / dz = onehot - p;   d H / dz = -p (log p + H)
    gradient = tl.zeros([BLOCK], tl.float32)
    if grad_logp_ptr is not None:
        grad_logp = tl.load(grad_logp_ptr + row)
        gradient += tl.where(columns == action, grad_logp, 0.0) - p * grad_logp
    if grad_entropy_ptr is not None:
        surprise = y * LN2 + tl.load(entropy_ptr + row)
        gradient -= tl.load(grad_entropy_ptr + row) * p * surprise
    if grad_vocab_ptr is not None:
        # d log(any) / dz = p / any - p of tokens, -p of actions beyond the vocabulary
        vocab_share = tl.exp2(y - tl.load(vocab_logp_ptr + row) / LN2)
        vocab_share = tl.where(columns < vocab_size, vocab_share, 0.0)
        gradient += tl.load(grad_vocab_ptr + row) * (vocab_share - p)
    gradient = tl.where(is_allowed, gradient * inverse_temperature, 0.0)
    gradient = gradient.to(logits_ptr.dtype.element_ty)
    tl.store(logits + columns, gradient, mask=columns < row_length)


@triton.jit
def _rank(z):
    """An int32 with the order of the float."""
    bits = z.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _reach(
    logits, allowed, num_actions, scale, top, least, OF_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """How many of a row's actions have a rank of `least` or more, or the sum of their e^(score - top)."""
    total = 0.0
    for start in range(0, num_actions, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z, is_allowed = _load_logits(logits, allowed, None, 0, columns, num_actions, num_actions)
        weight = tl.exp(z * scale - top) if OF_MASS else 1.0
        total += tl.sum(tl.where(is_allowed & (_rank(z) >= least), weight, 0.0), 0)
    return total


@triton.jit(do_not_specialize_on_alignment=["modes_ptr", "floors_ptr"])
def find_floors(
    logits_ptr,  # [u, W]
    modes_ptr,  # [u], or None with `allowed`
    allowed_ptr,  # [modes, W] bytes, or None
    floors_ptr,  # [u]: the lowest logit that is kept
    num_actions,
    row_length,
    scale,  # 1 / temperature
    top_k,  # a float, as sums are
    top_p,
    log_min_p,
    HAS_COUNT: tl.constexpr,
    HAS_SHARE: tl.constexpr,
    BITS: tl.constexpr,  # of the logits' dtype: they are the upper ones in fp32
    BLOCK: tl.constexpr,
):
    """Bisect the lowest rank that top-k and then top-p keep: the sign first, then bit by bit."""
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * row_length
    allowed = None
    if allowed_ptr is not None:
        allowed = allowed_ptr + tl.load(modes_ptr + row).to(tl.int64) * row_length
    highest = FORBIDDEN
    for start in range(0, num_actions, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z, _ = _load_logits(logits, allowed, None, 0, columns, num_actions, num_actions)
        highest = tl.maximum(highest, tl.max(z, 0))
    top = highest * scale
    least = tl.full([], -2147483648, tl.int32)
    for OF_MASS in tl.static_range(2):
        if HAS_SHARE if OF_MASS else HAS_COUNT:
            goal = top_k
            if OF_MASS:
                goal = top_p * _reach(logits, allowed, num_actions, scale, top, least, True, BLOCK)
            rank = tl.full([], -2147483648, tl.int32)
            for step in range(BITS):
                bit = tl.full([], 1, tl.int32) << (31 - step)
                trial = tl.where(step == 0, 0, rank + bit)
                lowest = tl.maximum(trial, least)
                total = _reach(logits, allowed, num_actions, scale, top, lowest, OF_MASS, BLOCK)
                rank = tl.where(total >= goal, trial, rank)
            least = tl.maximum(rank, least)
    floor = highest
    for start in range(0, num_actions, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z, is_allowed = _load_logits(logits, allowed, None, 0, columns, num_actions, num_actions)
        is_kept = is_allowed & (_rank(z) >= least) & (z * scale >= top + log_min_p)
        floor = tl.minimum(floor, tl.min(tl.where(is_kept, z, float("inf")), 0))
    tl.store(floors_ptr + row, floor)

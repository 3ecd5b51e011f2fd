"""The head on a GPU: two passes over a chunk of logits; the rest are matrix products.

    U positions, D width, V actions, W = V rounded up: the length of a row of logits in memory

    forward   logits = hidden weightᵀ  ->  logp, entropy and the log of the sum, one read of a row
    backward  logits again             ->  their gradient, written over them
              grad_hidden = gradient weight,   grad_weight += gradientᵀ hidden  in fp32

The product rounds the logits to the model's dtype, as for the sampler; all that follows is fp32. Powers of
2 replace powers of e, since the GPU computes them in hardware: with y = logit / temperature * log2 e and
n = log2 of the sum of all 2^y, an action's probability is 2^(y - n).

With `vocab_size` the same pass also sums the first `vocab_size` actions, the tokens: see `models.logprobs`.
With a `Truncation` the rows are sorted first, a few at a time, to find the lowest logit that each keeps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from graft.models.grad_sum import grad_sum_of
from graft.models.kernels.fixed_product import fixed_linear
from graft.models.kernels.products import add_product_
from graft.models.row_order import RowOrder
from graft.models.truncation import Truncation

CHUNK_BYTES = 650_000_000
"""Logits held at a time: 2,048 rows of 152k actions in bfloat16. Twice as many are 4% faster."""

KEPT_SHARE = 0.08
"""Of the device's memory: logits of a whole micro-batch that fit are kept instead of computed twice."""

ROW_MULTIPLE = 64
"""Rows start at whole cache lines for any V, so that every load has full width."""

BLOCK = 4096
"""Actions per step of either kernel."""

FORWARD_WARPS, FORWARD_STAGES, BACKWARD_WARPS = 4, 3, 8

SORTED_ROWS = 128
"""Rows that are sorted at a time: 300 MB at 152k actions, indices included."""

LOG2_E = math.log2(math.e)
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
def _forward_kernel(
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
def _backward_kernel(
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


def empty_logits(rows: int, num_actions: int, like: Tensor) -> Tensor:
    """[rows, W] of `like`'s dtype, uninitialised; the first V columns of each row are for logits."""
    length = triton.cdiv(num_actions, ROW_MULTIPLE) * ROW_MULTIPLE
    return torch.empty(rows, length, dtype=like.dtype, device=like.device)


def write_logits(hidden: Tensor, weight: Tensor, out: Tensor, order: RowOrder | None) -> None:
    """hidden weightᵀ to `out` [u, V]."""
    if order is not None and order.is_fixed(len(hidden), weight):
        fixed_linear(hidden, weight, out=out)
    else:
        torch.mm(hidden, weight.T, out=out)


def widen(allowed: Tensor | None) -> Tensor | None:
    """`allowed` [modes, V] as bytes [modes, W], laid out like the logits: no action beyond V."""
    if allowed is None:
        return None
    return F.pad(allowed, (0, -allowed.shape[1] % ROW_MULTIPLE)).contiguous().view(torch.uint8)


def _at(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]


class _KernelHead(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,  # [U, D]
        weight: Tensor,  # [V, D]
        actions: Tensor,  # [U]
        modes: Tensor | None,  # [U], or None like `allowed`
        allowed: Tensor | None,  # [modes, V]
        temperature: float,
        chunk: int,
        is_kept: bool,
        vocab_size: int | None,
        truncation: Truncation | None,
        order: RowOrder | None,
    ) -> tuple[Tensor, ...]:
        rows, num_actions = len(actions), len(weight)
        allowed = widen(allowed)
        logp = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        entropy, norm = torch.empty_like(logp), torch.empty_like(logp)
        vocab_logp = None if vocab_size is None else torch.empty_like(logp)
        floors = None if truncation is None else torch.empty_like(logp)
        logits = empty_logits(min(chunk, rows), num_actions, hidden)
        for start in range(0, rows, chunk):
            part = slice(start, min(start + chunk, rows))
            here = logits[: part.stop - start]
            write_logits(hidden[part], weight, here[:, :num_actions], order)
            if truncation is not None and floors is not None:
                _find_floors(
                    here[:, :num_actions], allowed, _at(modes, part), truncation, temperature,
                    floors[part],
                )  # fmt: skip
            _forward_kernel[(len(here),)](
                here, actions[part], _at(modes, part), allowed,
                logp[part], entropy[part], norm[part], _at(vocab_logp, part), _at(floors, part),
                num_actions, vocab_size or num_actions, here.shape[1], LOG2_E / temperature, None,
                STEPS=triton.cdiv(num_actions, BLOCK), BLOCK=BLOCK, STAGES=FORWARD_STAGES,
                num_warps=FORWARD_WARPS,
            )  # fmt: skip
        saved = hidden, weight, actions, modes, allowed, entropy, norm, vocab_logp, floors
        ctx.save_for_backward(*saved)
        ctx.vocab_size = vocab_size or num_actions
        ctx.logits = logits if is_kept else None
        ctx.temperature, ctx.chunk, ctx.grad_sum = temperature, chunk, grad_sum_of(weight)
        ctx.order = order
        ctx.set_materialize_grads(False)  # an unused entropy has gradient None, not zeros
        return (logp, entropy) if vocab_logp is None else (logp, entropy, vocab_logp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        # the gradient of a sum is an expanded number; the kernel needs U numbers
        grad_logp, grad_entropy, *others = (g if g is None else g.contiguous() for g in grads)
        *saved, entropy, norm, vocab_logp, floors = ctx.saved_tensors
        hidden, weight, actions, modes, allowed = saved
        grad_vocab = others[0] if others else None
        if grad_vocab is not None:
            grad_vocab = grad_vocab.masked_fill(actions >= ctx.vocab_size, 0.0)
        rows, num_actions = len(actions), len(weight)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = ctx.grad_sum
        if grad_weight is None and ctx.needs_input_grad[1]:  # not under adapters
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        kept, ctx.logits = ctx.logits, None  # overwritten below: usable for one backward
        logits = empty_logits(min(ctx.chunk, rows), num_actions, hidden) if kept is None else kept
        for start in range(0, rows, ctx.chunk):
            part = slice(start, min(start + ctx.chunk, rows))
            here = logits[: part.stop - start]
            d_logits = here[:, :num_actions]
            if kept is None:
                write_logits(hidden[part], weight, d_logits, ctx.order)
            _backward_kernel[(len(here) * triton.cdiv(here.shape[1], BLOCK),)](
                here, actions[part], _at(modes, part), allowed,
                norm[part], entropy[part], _at(vocab_logp, part),
                _at(grad_logp, part), _at(grad_entropy, part), _at(grad_vocab, part),
                _at(floors, part),
                num_actions, ctx.vocab_size, here.shape[1],
                LOG2_E / ctx.temperature, 1.0 / ctx.temperature,
                BLOCK=BLOCK, num_warps=BACKWARD_WARPS,
            )  # fmt: skip
            torch.mm(d_logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                add_product_(grad_weight, d_logits.T, hidden[part])
        is_own = grad_weight is not None and ctx.grad_sum is None
        own = grad_weight.to(weight.dtype) if is_own else None
        return grad_hidden, own, *[None] * 9


def _find_floors(
    logits: Tensor,
    allowed: Tensor | None,
    modes: Tensor | None,
    truncation: Truncation,
    temperature: float,
    floors: Tensor,
) -> None:
    """Write the lowest kept logit of each row of logits [u, V] to floors [u]."""
    for start in range(0, len(logits), SORTED_ROWS):
        part = slice(start, start + SORTED_ROWS)
        rows = logits[part].float()
        if allowed is not None and modes is not None:
            is_allowed = allowed[modes[part], : rows.shape[1]] != 0
            rows.masked_fill_(~is_allowed, float("-inf"))
        floors[part] = truncation.floors(rows, temperature)


def fits_whole(rows: int, num_actions: int, hidden: Tensor) -> bool:
    """Whether all logits can be kept for the backward pass, which then does not compute them again."""
    if not hidden.is_cuda:
        return False
    memory = torch.cuda.get_device_properties(hidden.device).total_memory
    return rows * num_actions * hidden.itemsize <= KEPT_SHARE * memory


def rows_per_chunk(num_actions: int, dtype: torch.dtype) -> int:
    """The rows that fit CHUNK_BYTES, in whole tiles of the matrix product."""
    rows = CHUNK_BYTES // (num_actions * dtype.itemsize)
    return max(128, rows // 128 * 128)


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    actions: Tensor,
    modes: Tensor,
    allowed: Tensor | None,
    temperature: float,
    chunk: int | None = None,
    vocab_size: int | None = None,
    truncation: Truncation | None = None,
    order: RowOrder | None = None,
) -> tuple[Tensor, ...]:
    """`logprobs.score_actions` where there are kernels; `chunk` rows at a time."""
    is_kept = torch.is_grad_enabled() and fits_whole(len(actions), len(weight), hidden)
    if chunk is None:
        chunk = len(actions) if is_kept else rows_per_chunk(len(weight), hidden.dtype)
    read_modes = None if allowed is None else modes.contiguous()
    return _KernelHead.apply(
        hidden,
        weight,
        actions.contiguous(),
        read_modes,
        allowed,
        temperature,
        chunk,
        is_kept and chunk >= len(actions),
        vocab_size,
        truncation,
        order,
    )


def logits_in_rows(hidden: Tensor, weight: Tensor, order: RowOrder | None) -> tuple[Tensor, Tensor]:
    """Logits as the learner's head holds them: rows [u, W], and the first V columns of them."""
    rows = empty_logits(len(hidden), len(weight), hidden)
    logits = rows[:, : len(weight)]
    write_logits(hidden, weight, logits, order)
    return rows, logits


def score_logit_rows(
    rows: Tensor,
    actions: Tensor,
    modes: Tensor | None,
    allowed: Tensor | None,
    scales: Tensor,
    num_actions: int,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy [u] as the learner computes them; scales [u] are log2 e / temperature.

    rows [u, W] and `allowed` [modes, W] have the layout of `empty_logits` and `widen`: how a kernel
    reads, and in which order it adds, depends on it.
    """
    logp, entropy, norm = (torch.empty_like(scales) for _ in range(3))
    _forward_kernel[(len(rows),)](
        rows, actions, modes, allowed, logp, entropy, norm, None, None,
        num_actions, num_actions, rows.shape[1], 1.0, scales,
        STEPS=triton.cdiv(num_actions, BLOCK), BLOCK=BLOCK, STAGES=FORWARD_STAGES,
        num_warps=FORWARD_WARPS,
    )  # fmt: skip
    return logp, entropy

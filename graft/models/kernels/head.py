"""The head on a GPU: two passes over a chunk of logits; the rest are matrix products.

    U positions, D width, V actions, W = V rounded up: the length of a row of logits in memory

    forward   logits = hidden weightᵀ  ->  logp, entropy and the log of the sum, one read of a row
    backward  logits again             ->  their gradient, written over them
              grad_hidden = gradient weight,   grad_weight += gradientᵀ hidden  in fp32

The product rounds the logits to the model's dtype, as for the sampler; all that follows is fp32
(`head_kernels`).
With a `Truncation` the lowest logit that each row keeps is found first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from graft.models.kernels import head_kernels
from graft.models.kernels.fixed_product import fixed_linear
from graft.models.kernels.head_kernels import BACKWARD_WARPS, BLOCK, FORWARD_STAGES, FORWARD_WARPS
from graft.models.kernels.products import add_product_
from graft.models.row_order import RowOrder
from graft.models.truncation import Truncation
from graft.row_sums import grad_sum_of

CHUNK_BYTES = 650_000_000
"""Logits held at a time: 2,048 rows of 152k actions in bfloat16. Twice as many are 4% faster."""

KEPT_SHARE = 0.08
"""Of the device's memory: logits of a whole micro-batch that fit are kept instead of computed twice."""

ROW_MULTIPLE = 64
"""Rows start at whole cache lines for any V, so that every load has full width."""

LOG2_E = math.log2(math.e)


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
                how = truncation, temperature, floors[part]
                find_floors(here, num_actions, _at(modes, part), allowed, *how)
            head_kernels.forward[(len(here),)](
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
            head_kernels.backward[(len(here) * triton.cdiv(here.shape[1], BLOCK),)](
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


def find_floors(
    logits: Tensor,
    num_actions: int,
    modes: Tensor | None,
    allowed: Tensor | None,
    truncation: Truncation,
    temperature: float,
    floors: Tensor,
) -> None:
    """Write the lowest kept logit of each row of logits [u, W] to floors [u]."""
    top_k, top_p, min_p = truncation
    head_kernels.find_floors[(len(logits),)](
        logits, modes, allowed, floors, num_actions, logits.shape[1], 1.0 / temperature,
        float(top_k), top_p, math.log(min_p) if min_p else -math.inf,
        HAS_COUNT=0 < top_k < num_actions, HAS_SHARE=top_p < 1, BITS=8 * logits.itemsize,
        BLOCK=head_kernels.FLOOR_BLOCK, num_warps=head_kernels.FLOOR_WARPS,
    )  # fmt: skip


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

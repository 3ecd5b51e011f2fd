"""Divergences between the distributions of two models, without holding all logits at once.

    N rows, T columns, U positions of the student's forest, P pairs of positions, V tokens, D width

A position of the student is paired with one of the teacher, whose context may differ (another prompt) or
whose distribution came from a server as its K likeliest tokens. Both heads run on chunks of pairs, and the
backward pass recomputes each chunk: [P] numbers stay in memory, not [P, V].

Both distributions are whole ones: divided by the temperature, without the tokens that a grammar forbids,
before any top-k, top-p or min-p of sampling, and without actions beyond the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graft.algos.distillation import (
    Divergence,
    Support,
    Tail,
    likeliest_tokens,
    log_rest,
    with_tail,
)
from graft.models.logprobs import chunk_of, logits_of
from graft.models.ops import gather_rows


@dataclass(frozen=True, slots=True)
class TeacherStates:
    """A teacher in this process: its hidden states [P, D] and its head [V, D]."""

    hidden: Tensor
    weight: Tensor


@dataclass(frozen=True, slots=True)
class TeacherCandidates:
    """A teacher's likeliest tokens, [P, K], and their log-probs."""

    ids: Tensor
    logprobs: Tensor


@dataclass(frozen=True, slots=True)
class TeacherPart:
    """The cells of a micro-batch that one teacher scored."""

    cells: Tensor
    """[M] long: cells of the [N, T] grid, row by row."""
    pair: Tensor
    """[M] long: the pair of each cell; cells of a token that rows share have one."""
    student: Tensor
    """[P] long: the student's position."""
    modes: Tensor
    """[P] long: the row of the action table that was allowed there."""
    target: TeacherStates | TeacherCandidates


@dataclass(frozen=True, slots=True)
class TeacherComparison:
    """What is compared, and how."""

    divergence: Divergence
    temperature: float = 1.0
    top_k: int = 0
    """Compare this number of likeliest tokens only; 0: all. A server's candidates are always these."""
    support: Support = "teacher"
    tail: Tail = "bucket"
    vocab_size: int = 0
    """Tokens that both have: a head may have more rows, for actions or as padding."""
    allowed: Tensor | None = None
    """[modes, V] bool."""

    def grid(
        self, hidden: Tensor, weight: Tensor, parts: Sequence[TeacherPart], shape: torch.Size
    ) -> Tensor:
        """[N, T] divergences of the student with hidden states [U, D] and head [V, D]; 0 elsewhere."""
        found = hidden.new_zeros(shape.numel(), dtype=torch.float32)
        for part in parts:
            if not len(part.cells):
                continue
            values = self.of_pairs(gather_rows(hidden, part.student), weight, part)
            found = found.index_copy(0, part.cells, gather_rows(values, part.pair))
        return found.view(shape)

    def of_pairs(self, hidden: Tensor, weight: Tensor, part: TeacherPart) -> Tensor:
        """[P] of hidden states [P, D]."""
        own = weight if len(weight) == self.vocab_size else weight[: self.vocab_size]

        def compare(logits: Tensor, some: slice) -> Tensor:
            student = logits.log_softmax(-1)
            if isinstance(part.target, TeacherCandidates):
                ids, teacher = part.target.ids[some], part.target.logprobs[some]
                # a server may return fewer than K; the places that are left have no probability
                is_given = teacher != float("-inf")
                mine = student.gather(-1, ids).masked_fill(~is_given, float("-inf"))
                rest = log_rest(student, ids, is_given) if self.tail == "bucket" else None
                return self.divergence(
                    with_tail(mine, self.tail, rest), with_tail(teacher, self.tail)
                )
            states, head = part.target.hidden[some], part.target.weight[: self.vocab_size]
            with torch.no_grad():
                teacher = self._logits(states, head, part.modes[some]).log_softmax(-1)
            if 0 < self.top_k < self.vocab_size:
                how = self.top_k, self.support, self.tail
                return self.divergence(*likeliest_tokens(student, teacher, *how))
            return self.divergence(student, teacher)

        def logits(hidden: Tensor, weight: Tensor, some: slice) -> Tensor:
            return self._logits(hidden[some], weight, part.modes[some])

        # both distributions, their gradients and what a divergence makes of them
        chunk = chunk_of(hidden.device, 8 * self.vocab_size)
        return _ChunkedDivergence.apply(hidden, own, logits, compare, chunk, self.temperature)

    def _logits(self, hidden: Tensor, weight: Tensor, modes: Tensor) -> Tensor:
        rows = None if self.allowed is None else self.allowed[modes][:, : self.vocab_size]
        return logits_of(hidden, weight, self.temperature, rows)


class _ChunkedDivergence(torch.autograd.Function):
    """Divergences of the rows of a product, chunk by chunk; each depends on its own row alone."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,  # [P, D]
        weight: Tensor,  # [V, D]
        logits: Callable[[Tensor, Tensor, slice], Tensor],
        compare: Callable[[Tensor, slice], Tensor],
        chunk: int,
        temperature: float,
    ) -> Tensor:
        found = torch.empty(len(hidden), device=hidden.device)
        for start in range(0, len(hidden), chunk):
            some = slice(start, start + chunk)
            found[some] = compare(logits(hidden, weight, some), some)
        ctx.save_for_backward(hidden, weight)
        ctx.how = logits, compare, chunk, temperature
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden, weight = ctx.saved_tensors
        logits, compare, chunk, temperature = ctx.how
        (grad,) = grads
        grad_hidden = torch.empty_like(hidden)
        is_frozen = not ctx.needs_input_grad[1]  # as under adapters
        grad_weight = None if is_frozen else torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), chunk):
            some = slice(start, start + chunk)
            with torch.enable_grad():
                leaf = logits(hidden.detach(), weight.detach(), some).requires_grad_()
                (d_logits,) = torch.autograd.grad(compare(leaf, some), leaf, grad[some])
            d_logits = (d_logits / temperature).to(hidden.dtype)
            grad_hidden[some] = d_logits @ weight
            if grad_weight is not None:
                grad_weight += (d_logits.T @ hidden[some]).float()
        own = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, own, None, None, None, None

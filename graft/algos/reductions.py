"""Reductions: from the losses of tokens to the loss of a step, as one weight per token.

    N rows, T tokens

A reduction sees the whole batch once and gives weights_NT; the step's loss is sum(loss_NT *
weights_NT), added up over micro-batches and processes in any split. No mean is taken anywhere
else, so no count of micro-batches or ranks can slip into the gradient.

    lengths 3 and 1:    token     [1/4 1/4 1/4] [1/4]       each token alike
                        sequence  [1/6 1/6 1/6] [1/2]       each row alike
                        constant  [1/8 1/8 1/8] [1/8]       length=4: a row weighs by its length
                        written_tokens  [1/9 1/9 1/9] [1/9]  a tool wrote 5 tokens more
                        unique_tokens   [1/6 1/3 1/3] [1/6]  both rows begin with the same token
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.masked import first_of, number, segment_count

Reduction = Callable[[Batch], Tensor]
"""Batch -> weights_NT, 0 where masked."""


def token() -> Reduction:
    """Mean over all trained tokens of the batch."""

    def weigh(batch: Batch) -> Tensor:
        return batch.mask.float() / max(batch.num_tokens, 1)

    return weigh


def sequence() -> Reduction:
    """Mean over rows of the mean over their tokens; rows without trained tokens are not counted."""

    def weigh(batch: Batch) -> Tensor:
        num_trained = (batch.lengths > 0).sum().clamp(min=1)
        return batch.mask.float() / batch.lengths.clamp(min=1)[:, None] / num_trained

    return weigh


def constant(length: int) -> Reduction:
    """Sum over tokens, divided by rows * length: long answers are not diluted (Dr. GRPO, GEM).

    `length` is the generation budget or any other constant; it only scales the gradient.
    """
    if length < 1:
        raise ValueError(f"constant(length={length}): the divisor must be 1 or more")

    def weigh(batch: Batch) -> Tensor:
        return batch.mask.float() / (max(batch.num_rows, 1) * length)

    return weigh


def written_tokens() -> Reduction:
    """Sum over trained tokens, divided by all tokens after the prompts, of any author.

    Observations and the tokens of an action's description count in the denominator without being
    trained, as in EARL; `token` leaves them out.
    """

    def weigh(batch: Batch) -> Tensor:
        return batch.mask.float() / (batch.spans >= 0).sum().clamp(min=1)

    return weigh


def unique_tokens() -> Reduction:
    """Mean over the distinct trained tokens of the trees: one that d rows share counts once.

    Each of its d cells has 1/d of its weight. Two cells are the same token if they are of one span
    and at the same position in it. If no rows share a trained token this is `token`.
    """

    def weigh(batch: Batch) -> Tensor:
        # a span has one path to its root, so in every row it begins at the same column
        column_T = torch.arange(batch.spans.shape[1], device=batch.spans.device)
        cell_NT = batch.spans * len(column_T) + column_T
        token_M, num_distinct = number(cell_NT[batch.mask])
        rows_M = segment_count(token_M, num_distinct)[token_M]
        weights_NT = batch.zeros()
        weights_NT[batch.mask] = 1 / (rows_M * num_distinct)
        return weights_NT

    return weigh


def turn_starts() -> Reduction:
    """Mean over turns of their first trained tokens: where a critic of turns learns.

    Turns of 3 and 1 tokens: [1/2 0 0] [1/2]
    """

    def weigh(batch: Batch) -> Tensor:
        turn_M, num_turns = number(batch.turn_ids()[batch.mask])
        weights_M = torch.zeros(turn_M.numel(), device=turn_M.device)
        weights_M[first_of(turn_M, num_turns)] = 1 / max(num_turns, 1)
        weights_NT = batch.zeros()
        weights_NT[batch.mask] = weights_M
        return weights_NT

    return weigh


REDUCTIONS: dict[str, Callable[..., Reduction]] = {
    "token": token,
    "sequence": sequence,
    "constant": constant,
    "written_tokens": written_tokens,
    "unique_tokens": unique_tokens,
}

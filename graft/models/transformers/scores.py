"""What a learner asks about logits [u, V]: the same as `logprobs`, of a head that is not ours.

There the head is one matrix and its backward pass is written out. Here it is whatever the model does,
with its bias, its scale or its soft cap, so autograd goes through it and chunks are computed again.
"""

from __future__ import annotations

import torch
from torch import Tensor


def score_logits(
    logits: Tensor,
    actions: Tensor,
    allowed: Tensor | None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, ...]:
    """Log-prob [u] of each action and entropy [u]; with `vocab_size` that of any token.

    `allowed` is [u, V]: what could be drawn at each place.
    """
    log_p = _as_sampled(logits, allowed, temperature).log_softmax(-1)
    logp = log_p.gather(1, actions[:, None])[:, 0]
    # 0 log 0 = 0, and no gradient through -inf
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == float("-inf"), 0.0)).sum(-1)
    if vocab_size is None:
        return logp, entropy
    is_beyond = actions >= vocab_size
    of_tokens = log_p[:, :vocab_size].masked_fill(is_beyond[:, None], 0.0)
    return logp, entropy, of_tokens.logsumexp(-1).masked_fill(is_beyond, 0.0)


def find_likeliest(
    logits: Tensor, actions: Tensor, allowed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Log-prob [u] of each action, and whether no other is likelier: what greedy decoding does."""
    logits = _as_sampled(logits, allowed, 1.0)
    chosen = logits.gather(1, actions[:, None])[:, 0]
    return chosen - logits.logsumexp(-1), logits.argmax(-1) == actions


def _as_sampled(logits: Tensor, allowed: Tensor | None, temperature: float) -> Tensor:
    logits = logits.to(torch.float32) / temperature
    return logits if allowed is None else logits.masked_fill(~allowed, float("-inf"))

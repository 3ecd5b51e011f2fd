"""Log-probs and entropies from logits [u, V]: the counterpart of `logprobs` for transformers' heads.

In `logprobs` the head is one matrix and its backward pass is written out. Here a head may have a bias, a
scale or a soft cap, so autograd differentiates it and chunks are recomputed.
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
    """Log-prob [u] of each action and entropy [u]; with `vocab_size` also the log-prob of any token.

    `allowed` is [u, V]: the actions that could be drawn.
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
    """Log-prob [u] of each action, and whether greedy decoding would choose it."""
    logits = _as_sampled(logits, allowed, 1.0)
    chosen = logits.gather(1, actions[:, None])[:, 0]
    return chosen - logits.logsumexp(-1), logits.argmax(-1) == actions


def _as_sampled(logits: Tensor, allowed: Tensor | None, temperature: float) -> Tensor:
    logits = logits.to(torch.float32) / temperature
    return logits if allowed is None else logits.masked_fill(~allowed, float("-inf"))

"""Log-probs of logits that a module computed: of heads that are more than one matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.models.logprobs import entropy_of
from graft.models.truncation import Truncation


def score_logits(
    logits: Tensor,
    actions: Tensor,
    allowed: Tensor | None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    truncation: Truncation | None = None,
) -> tuple[Tensor, ...]:
    """`score_actions` of logits [u, V], `allowed` [u, V]: for heads that are more than one matrix.

    Such a head may have a bias, a scale or a soft cap: autograd differentiates it.
    """
    scores = _as_sampled(logits, allowed, temperature)
    if truncation is not None and len(actions):
        floors = truncation.floors(scores.detach())
        scores = truncation.mask_(scores.clone(), floors, actions)
    log_p = scores.log_softmax(-1)
    logp, entropy = log_p.gather(1, actions[:, None])[:, 0], entropy_of(log_p)
    if vocab_size is None:
        return logp, entropy
    is_beyond = actions >= vocab_size
    of_tokens = log_p[:, :vocab_size].masked_fill(is_beyond[:, None], 0.0)
    return logp, entropy, of_tokens.logsumexp(-1).masked_fill(is_beyond, 0.0)


def likeliest_of_logits(
    logits: Tensor, actions: Tensor, allowed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`likeliest` of logits [u, V]."""
    logits = _as_sampled(logits, allowed, 1.0)
    chosen = logits.gather(1, actions[:, None])[:, 0]
    return chosen - logits.logsumexp(-1), logits.argmax(-1) == actions


def _as_sampled(logits: Tensor, allowed: Tensor | None, temperature: float) -> Tensor:
    logits = logits.to(torch.float32) / temperature
    return logits if allowed is None else logits.masked_fill(~allowed, float("-inf"))

"""Draw a token from logits, with its log-prob and the entropy, all of the distribution that is drawn from.

    B rows, V vocabulary

Order: repetition penalty (`penalize`, before `sample`), temperature, then the mask, then top-k, top-p over
what top-k left, and min-p against the most likely token; what remains is normalised again. One uniform
number per row picks the token by inverting the cumulative distribution.

    logits log[.5 .3 .2], top_k 2 -> [.625 .375 0]; uniform .7 -> token 1, log-prob log .375
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graft.models.truncation import count_kept

_FLOOR = -1e4  # exp of it is 0 in float32; keeps 0 * log 0 at 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters per row; None where no row of the batch uses one."""

    temperature: Tensor | None = None
    """[B], all above 0; None: 1 everywhere."""
    greedy: Tensor | None = None
    """[B] bool."""
    top_k: Tensor | None = None
    """[B] int, V where off; given together with `top_p` and `min_p`, or not at all."""
    top_p: Tensor | None = None
    min_p: Tensor | None = None


def sample(
    logits: Tensor, uniform: Tensor, params: SamplingParams, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Token, log-prob and entropy, each [B], of logits [B,V], uniform [B], allowed [B,V] bool.

    A greedy row takes the most likely token; its log-prob and entropy are those of the masked
    distribution at temperature 1, which is what a trainer at temperature 1 computes. A row with NaN
    logits or nothing allowed has log-prob NaN.
    """
    scores = logits.float()
    if params.temperature is not None:
        scores = scores / params.temperature[:, None]
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if params.top_k is not None and params.top_p is not None and params.min_p is not None:
        floor = lowest_kept(scores, params.top_k, params.top_p, params.min_p)
        scores = scores.masked_fill(scores < floor[:, None], -torch.inf)
    logp = scores.log_softmax(-1)
    probs = logp.exp()
    token = invert(probs, uniform)
    if params.greedy is not None:
        token = torch.where(params.greedy, logp.argmax(-1), token)
    entropy = -(probs * logp.clamp_min(_FLOOR)).sum(-1)
    return token, logp.gather(-1, token[:, None])[:, 0], entropy


def penalize(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Logits [B,V] with those of `seen` tokens [B,V] bool made less likely, by penalty [B].

    logits 2 -2 1, the first two seen, penalty 1.25: 1.6 -2.5 1
    """
    scores, factor = logits.float(), penalty[:, None]
    return torch.where(seen, torch.where(scores < 0, scores * factor, scores / factor), scores)


def invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds `uniform`; never one of probability 0.

    Rounding could leave the sum short of `uniform`, or let a parallel sum increase at a token of
    probability 0: such tokens are excluded, and the target stays below the largest sum.
    """
    cumulative = probs.cumsum(-1).masked_fill_(probs == 0, 0)
    total = cumulative.amax(-1)
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return (cumulative > target[:, None]).to(torch.uint8).argmax(-1)


def lowest_kept(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[B]: the lowest of scores [B,V] that top-k, top-p and min-p leave; see `models.truncation`."""
    ranked = scores.sort(dim=-1, descending=True).values
    rank = torch.arange(scores.shape[-1], device=scores.device)
    in_k = ranked.masked_fill(rank >= top_k[:, None], -torch.inf)
    count = count_kept(in_k, top_p[:, None], min_p[:, None])
    return ranked.gather(-1, count[:, None] - 1)[:, 0]

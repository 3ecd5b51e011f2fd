"""Sums of p^2: the chance that two draws from the policy are the same.

    N rows, T tokens

Of logits z, with Z the sum of e^z: log p = z - log Z, and at half the temperature
log q = 2 z - log sum e^2z. So 2 log p - log q = log of (sum e^2z) / Z^2, whichever action z is of: two
log-probs give the sum, in every kind of head. Probabilities 0.75 and 0.25: p 0.75, q 0.9, p^2 / q = 0.625.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.masked import keep
from graft.models.decoder import Decoder
from graft.models.tree.forest import Forest
from graft.models.truncation import Truncation


class Scorer(Protocol):
    """What of a learner is needed."""

    @property
    def scoring(self) -> tuple[Decoder, float, Tensor | None, Truncation | None]: ...

    def over_micros(self, batch: Batch, compute: Callable[[Forest], Tensor]) -> Tensor: ...


def collisions(learner: Scorer, batch: Batch, logp_NT: Tensor | None) -> Tensor:
    """[N, T] sums of p^2 over what could be drawn; `logp_NT` are the policy's log-probs, if known."""
    policy, temperature, allowed, cut = learner.scoring
    if cut is not None and (cut.top_p < 1 or cut.min_p > 0):
        raise ValueError(
            f"top_p={cut.top_p:g} and min_p={cut.min_p:g} keep other tokens at another temperature, so "
            "sums of p^2 cannot be computed; set both off (rollout.top_p=1, rollout.min_p=0; top_k may "
            "stay), or use another credit than optimal_token_baseline"
        )

    def logprobs_at(degree: float) -> Tensor:
        return learner.over_micros(batch, lambda f: f.logprobs(policy, degree, allowed, cut)[0])

    full_NT = logprobs_at(temperature) if logp_NT is None else logp_NT
    return keep((2 * full_NT - logprobs_at(temperature / 2)).exp(), batch.mask)

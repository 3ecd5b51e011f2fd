"""Losses: pure functions (logp_NT, entropy_NT, batch) -> (loss_NT, metrics), never reduced.

    N rows, T tokens

`logp_NT` and `entropy_NT` are the learner's, with gradient. A reduction turns loss_NT into a
number; the metrics are per token too, without gradient, and the learner averages them over the
trained tokens of the whole batch. Nothing here depends on how rows are split, and values outside
the mask (-inf, NaN) have no effect on value or gradient.

The old policy is `batch.old_logprobs`. Without them there is one update per batch, and the old
policy is the current one: ratio 1, gradient of -A * logp.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.kl import bounded
from graft.algos.masked import keep

Metrics = dict[str, Tensor]
"""Name -> [N, T], detached, 0 where masked."""

Loss = Callable[[Tensor, Tensor, Batch], tuple[Tensor, Metrics]]


def advantages(batch: Batch) -> Tensor:
    return keep(batch.need("advantages", "a policy loss needs them: run a credit"), batch.mask)


def old_logprobs(logp_NT: Tensor, batch: Batch) -> Tensor:
    return logp_NT.detach() if batch.old_logprobs is None else batch.old_logprobs


def log_ratio(logp_NT: Tensor, batch: Batch) -> Tensor:
    # masked one by one: the difference of two -inf has a NaN gradient that no later mask removes
    old_NT = keep(old_logprobs(logp_NT, batch), batch.mask)
    return bounded(keep(logp_NT, batch.mask) - old_NT)


def worse(ratio_NT: Tensor, held_NT: Tensor, adv_NT: Tensor) -> Tensor:
    """The larger loss of a ratio and of its clipped value: clipping never lowers a loss."""
    return torch.maximum(-adv_NT * ratio_NT, -adv_NT * held_NT)


def check_dual(dual: float | None, high: float) -> None:
    if dual is not None and dual <= 1 + high:
        raise ValueError(f"dual={dual} must be more than 1 + high = {1 + high}; null leaves it out")


def at_most_dual(loss_NT: Tensor, adv_NT: Tensor, dual: float | None) -> Tensor:
    """The loss of a token with a negative advantage, held at -dual * A; None: as it is."""
    if dual is None:
        return loss_NT
    return torch.where(adv_NT < 0, torch.minimum(loss_NT, -adv_NT * dual), loss_NT)


def check_clip_range(low: float, high: float) -> None:
    if not 0 <= low <= 1 or high < 0:
        raise ValueError(
            f"low={low}, high={high}: ratios are clipped to [1 - low, 1 + high]; "
            "give 0 <= low <= 1 and high >= 0"
        )


def policy_metrics(loss_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> Metrics:
    return {
        "loss/policy": loss_NT.detach(),
        "entropy": keep(entropy_NT.detach(), batch.mask),
    }


def clip_metrics(ratio_NT: Tensor, adv_NT: Tensor, low: float, high: float) -> Metrics:
    """Tokens that moved beyond the range in the direction of their advantage."""
    return clip_shares((ratio_NT < 1 - low) & (adv_NT < 0), (ratio_NT > 1 + high) & (adv_NT > 0))


def clip_shares(is_low_NT: Tensor, is_high_NT: Tensor) -> Metrics:
    """Shares of tokens that a bound stopped: below with A < 0, above with A > 0."""
    return {
        "clip_ratio/low_mean": is_low_NT.float(),
        "clip_ratio/high_mean": is_high_NT.float(),
        "clip_ratio/region_mean": (is_low_NT | is_high_NT).float(),
    }

"""Weights: factors on the policy's loss, for tokens that another policy drew than the one that is trained.

    N rows, T tokens

A weight is a pure function (logp_NT, batch) -> (weight_NT, metrics), without gradient; several are
multiplied. `logp_NT` are the learner's present log-probs, `batch.logprobs` the engine's, which drew the
tokens, and `batch.old_logprobs` the learner's before its first update (None: there is only one update, and
they are the present ones). A weight of 0 leaves a token out; the reduction still counts it, so leaving out
half of the tokens halves the gradient. KL and entropy are not weighted.

A function may read whole rows: a row is never cut. One that compares rows (a group, the batch) is a
`BatchWeight`: it is computed once on the whole batch, with the old log-probs in place of the present ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.kl import bounded
from graft.algos.losses.loss import Metrics, advantages, old_logprobs
from graft.algos.masked import keep, masked_mean, number, segment_mean, segment_sum

Weight = Callable[[Tensor, Batch], tuple[Tensor, Metrics]]

IMPORTANCE = "sampling/importance_sampling_ratio"
"""Metrics of the importance weights; the learner turns mean and mean square into `ess`."""

Level = Literal["token", "sequence", "geometric"]
Policy = Literal["old", "current"]
Statistic = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class BatchWeight:
    """A weight that needs the whole batch."""

    weigh: Weight
    needs_old: bool = False
    """Whether it compares with the engine, and so needs the learner's log-probs before the update: one
    forward pass more where a batch gets a single update."""

    def __call__(self, logp_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        return self.weigh(logp_NT, batch)


def importance(
    level: Level = "token",
    cap: float = 2.0,
    floor: float = 0.0,
    outside: Literal["clamp", "mask"] = "clamp",
    policy: Policy = "old",
    normalise: bool = False,
) -> Weight:
    """w = p / p_engine, bounded: the expectation under the learner, from what the engine drew.

    level       of a token; `sequence`, the product over the row; `geometric`, the mean in logs over the row
    outside     `clamp` to [floor, cap] (TIS), or `mask`, 0 outside of it (IcePop, MIS)
    policy      p is the learner's `old` policy, or its `current` one (for losses without a ratio)
    normalise   divide by the mean over the batch: of tokens, or of rows where a row has one weight

    Engine -2, -2, learner -1, -2, cap 2: token 2, 1; sequence 2, 2 (e, held at 2); geometric 1.65, 1.65.
    With mask: token 0, 1; sequence 0, 0.
    """
    _check("level", level, ("token", "sequence", "geometric"))
    _check("outside", outside, ("clamp", "mask"))
    _check("policy", policy, ("old", "current"))
    if not 0 <= floor <= cap or cap <= 0:
        raise ValueError(f"importance(floor={floor}, cap={cap}): give 0 <= floor <= cap, cap > 0")

    def weigh(logp_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        gap_NT = _gap(logp_NT, batch, policy)
        if level != "token":
            row_N = gap_NT.sum(dim=1)
            row_N = row_N if level == "sequence" else row_N / batch.lengths.clamp(min=1)
            gap_NT = row_N[:, None].expand_as(gap_NT)
        ratio_NT = torch.exp(bounded(gap_NT))
        weight_NT = ratio_NT.clamp(floor, cap)
        if outside == "mask":
            weight_NT = keep(ratio_NT, weight_NT == ratio_NT)
        weight_NT = keep(weight_NT, batch.mask)
        metrics = {f"{IMPORTANCE}/mean": weight_NT, f"{IMPORTANCE}/mean_square": weight_NT.square()}
        return weight_NT / _mean(weight_NT, level, batch) if normalise else weight_NT, metrics

    return BatchWeight(weigh, needs_old=True) if normalise else weigh


def reject(
    by: Statistic = "k3",
    level: Literal["token", "sequence", "group"] = "sequence",
    of: Literal["mean", "sum", "max"] = "mean",
    high: float = 0.01,
    low: float | None = None,
    policy: Policy = "old",
) -> Weight:
    """0 where learner and engine differ too much, 1 elsewhere.

    With d = log p - log p_engine: k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d. A token, a row or a group is kept
    where its value is at most `high`. The bounds of k1 are ratios: it is kept where e^k1 lies in [low, high],
    low = 1 / high where none is given. `of` says how the tokens of a row or a group become one value.

    d = 0.5, -0.5 in a row: k1 has the mean 0, k2 0.125, k3 (0.149 + 0.107) / 2 = 0.128.
    """
    _check("by", by, ("k1", "k2", "k3"))
    _check("level", level, ("token", "sequence", "group"))
    _check("of", of, ("mean", "sum", "max"))
    _check("policy", policy, ("old", "current"))
    if by == "k1" and of == "max" and level != "token":
        raise ValueError(
            "reject(by='k1', of='max'): k1 has both signs; take k2 or k3, or of='mean'"
        )
    if low is not None and by != "k1":
        raise ValueError(f"reject(by={by!r}, low={low}): only k1 has a lower bound")
    least = -math.inf
    if high <= 0 or (low is not None and not 0 < low <= high):
        raise ValueError(f"reject(low={low}, high={high}): bounds are above 0, low at most high")
    most = math.log(high) if by == "k1" else high
    if by == "k1":
        least = -most if low is None else math.log(low)
        if least > most:
            raise ValueError(f"reject(by='k1', high={high}): give low as well, or high above 1")

    def weigh(logp_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        value_NT = _statistic(bounded(_gap(logp_NT, batch, policy)), by)
        if level == "sequence":
            value_NT = _over_rows(value_NT, batch.mask, of)[:, None].expand_as(value_NT)
        elif level == "group":
            value_NT = _over_groups(value_NT, batch, of)
        weight_NT = ((value_NT >= least) & (value_NT <= most) & batch.mask).float()
        return weight_NT, {"weights/rejected": batch.mask.float() - weight_NT}

    return BatchWeight(weigh, needs_old=policy == "old") if level == "group" else weigh


def off_policy_rows(high: float = 0.5) -> Weight:
    """0 on tokens with a negative advantage in rows that the learner has left behind (DeepSeek-V3.2).

    Left behind: the mean over the row of log p_engine - log p, p the present policy's, is above `high`.
    Engine -1, -1, learner -3, -1.4 has the mean 1.2: with A = -1 the row is left out at 0.5, with A = 1 it
    is trained.
    """

    def weigh(logp_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        drift_N = -_gap(logp_NT, batch, "current").sum(dim=1) / batch.lengths.clamp(min=1)
        kept_NT = (advantages(batch) >= 0) | (drift_N <= high)[:, None]
        weight_NT = (kept_NT & batch.mask).float()
        return weight_NT, {"weights/rejected": batch.mask.float() - weight_NT}

    return weigh


def top_entropy(share: float = 0.2) -> Weight:
    """1 on the `share` of trained tokens that were drawn under the highest entropy, 0 on the others.

    Entropies 0.1, 0.2, 0.3, 0.4, 2.0, share 0.2: only the last. They are the engine's; equal ones stay
    together. Forks in the reasoning are few, and the other tokens follow from them (the "80/20 rule").
    """
    if not 0 < share <= 1:
        raise ValueError(f"top_entropy(share={share}): the share of tokens must lie in (0, 1]")

    def weigh(logp_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        entropy_M = batch.entropies[batch.mask]
        if not entropy_M.numel():
            return batch.zeros(), {}
        # the place of the quantile 1 - share among the sorted ones, without the rounding of the product
        place = math.ceil((entropy_M.numel() - 1) * (1 - share) - 1e-6)
        least = entropy_M.kthvalue(place + 1).values
        return ((batch.entropies >= least) & batch.mask).float(), {}

    return BatchWeight(weigh)


WEIGHTS: dict[str, Callable[..., Weight]] = {
    "importance": importance,
    "reject": reject,
    "off_policy_rows": off_policy_rows,
    "top_entropy": top_entropy,
}


def _gap(logp_NT: Tensor, batch: Batch, policy: Policy) -> Tensor:
    """log p - log p_engine, 0 where masked."""
    logp_NT = logp_NT.detach()
    ours_NT = logp_NT if policy == "current" else old_logprobs(logp_NT, batch)
    # masked one by one: -inf - -inf is NaN
    return keep(ours_NT, batch.mask) - keep(batch.logprobs, batch.mask)


def _statistic(gap_NT: Tensor, by: Statistic) -> Tensor:
    if by == "k1":
        return -gap_NT
    return 0.5 * gap_NT.square() if by == "k2" else torch.exp(gap_NT) - 1 - gap_NT


def _over_rows(value_NT: Tensor, mask_NT: Tensor, of: str) -> Tensor:
    """[N]; k2 and k3 are never negative, so that masked zeros do not change a maximum."""
    if of == "max":
        return value_NT.amax(dim=1) if value_NT.shape[1] else value_NT.sum(dim=1)
    return value_NT.sum(dim=1) if of == "sum" else masked_mean(value_NT, mask_NT, dim=1)


def _over_groups(value_NT: Tensor, batch: Batch, of: str) -> Tensor:
    group_N, count = number(batch.group)
    group_M = group_N[:, None].expand_as(batch.mask)[batch.mask]
    value_M = value_NT[batch.mask]
    if of == "max":
        value_G = value_M.new_zeros(count).scatter_reduce(0, group_M, value_M, "amax")
    else:
        value_G = (segment_sum if of == "sum" else segment_mean)(value_M, group_M, count)
    return value_G[group_N][:, None].expand_as(value_NT)


def _mean(weight_NT: Tensor, level: Level, batch: Batch) -> Tensor:
    """The mean of tokens, or of rows if all tokens of a row have one weight; 1 if there is nothing."""
    mean = masked_mean(weight_NT, batch.mask)
    if level != "token":
        row_N = masked_mean(weight_NT, batch.mask, dim=1)
        mean = masked_mean(row_N, batch.lengths > 0)
    return torch.where(mean > 1e-8, mean, 1.0)


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r}; known: {', '.join(known)}")


def whole_batch(weights: tuple[Weight, ...]) -> Callable[[Batch], Batch]:
    """Fill `batch.weights` with the product of those weights that need the whole batch."""
    over_batch = [one for one in weights if isinstance(one, BatchWeight)]
    return partial(_fill, over_batch) if over_batch else lambda batch: batch


def _fill(weights: list[BatchWeight], batch: Batch) -> Batch:
    product_NT = batch.mask.float()
    logp_NT = batch.logprobs if batch.old_logprobs is None else batch.old_logprobs
    for weight in weights:
        if weight.needs_old and batch.old_logprobs is None:
            batch.need(
                "old_logprobs", "a weight compares the learner with the engine: compute them"
            )
        product_NT = product_NT * weight(logp_NT, batch)[0]
    return batch.replace(weights=product_NT)

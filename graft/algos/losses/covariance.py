"""Losses that treat the tokens with the largest covariance of log-prob and advantage differently.

    Cov of a token = (log p - mean log p) (A - mean A), over all trained tokens of the batch

Likely tokens with a high advantage lower the entropy most: a few of them cause most of its collapse (Cui
et al. 2025). Which ones is a question about the whole batch, so it is answered once, before the batch is
cut into micro-batches, by the log-probs of the old policy: `SelectiveLoss.select`. The learner finds the
answer in `batch.selected`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.losses.clipped import clip
from graft.algos.losses.loss import Loss, Metrics, advantages, log_ratio, policy_metrics
from graft.algos.masked import keep, masked_mean

Selection = Callable[[Batch], Tensor]
"""The whole batch -> [N, T] bool."""


@dataclass(frozen=True, slots=True)
class SelectiveLoss:
    """A loss that needs `batch.selected`, and the function that makes it from the whole batch."""

    select: Selection
    loss: Loss

    def __call__(self, logp: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        return self.loss(logp, entropy, batch)


def clip_cov(
    share: float = 2e-4,
    low_cov: float = 1.0,
    high_cov: float = 5.0,
    low: float = 0.2,
    high: float = 0.2,
    seed: int = 0,
) -> Loss:
    """`clip` without the gradient of `share` of the tokens, drawn among those with a covariance between
    `low_cov` and `high_cov` (Clip-Cov).

    Log-probs -1, -1, -4 and A = 3, -1, -2 have the means -2 and 0: the covariances are 3, -1 and 4.
    """
    _check_share(share)
    clipped = clip(low, high)

    def select(batch: Batch) -> Tensor:
        cov_NT = covariance(batch)
        cells = ((cov_NT > low_cov) & (cov_NT < high_cov) & batch.mask).nonzero()
        count = max(int(share * batch.num_tokens), 1)
        # another draw for each version of the weights, the same in every process and in a replay
        version = int(batch.versions[batch.mask].max()) if batch.num_tokens else 0
        drawn = torch.Generator().manual_seed(seed * 1_000_003 + version)
        chosen = cells[torch.randperm(len(cells), generator=drawn).to(cells.device)[:count]]
        selected_NT = torch.zeros_like(batch.mask)
        selected_NT[chosen[:, 0], chosen[:, 1]] = True
        return selected_NT

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        selected_NT = _selected(batch)
        loss_NT, metrics = clipped(logp_NT, entropy_NT, batch)
        loss_NT = loss_NT * ~selected_NT
        return loss_NT, metrics | {
            "loss/policy": loss_NT.detach(),
            "loss/selected": selected_NT.float(),
        }

    return SelectiveLoss(select, loss)


def kl_cov(share: float = 2e-3, coef: float = 1.0) -> Loss:
    """-A r without clipping, plus coef * |log r| on the `share` of tokens with the largest covariance.

    This is KL-Cov. The penalty begins with the second update of a batch: at ratio 1 it is 0, and so is its
    gradient.
    """
    _check_share(share)

    def select(batch: Batch) -> Tensor:
        cov_M = covariance(batch)[batch.mask]
        selected_M = torch.zeros_like(cov_M, dtype=torch.bool)
        if len(cov_M):
            selected_M[cov_M.topk(max(1, int(share * len(cov_M)))).indices] = True
        return torch.zeros_like(batch.mask).masked_scatter(batch.mask, selected_M)

    def loss(logp_NT: Tensor, entropy_NT: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        selected_NT = _selected(batch)
        moved_NT = log_ratio(logp_NT, batch)
        policy_NT = -advantages(batch) * torch.exp(moved_NT)
        loss_NT = policy_NT + coef * keep(moved_NT.abs(), selected_NT)
        metrics = policy_metrics(loss_NT, entropy_NT, batch)
        return loss_NT, metrics | {"loss/selected": selected_NT.float()}

    return SelectiveLoss(select, loss)


def covariance(batch: Batch) -> Tensor:
    """[N, T] 0 where masked; by the old policy's log-probs, or the engine's where there are no others."""
    old_NT = batch.logprobs if batch.old_logprobs is None else batch.old_logprobs
    adv_NT = advantages(batch)
    logp_off_NT = old_NT - masked_mean(old_NT, batch.mask)
    return keep(logp_off_NT * (adv_NT - masked_mean(adv_NT, batch.mask)), batch.mask)


def _selected(batch: Batch) -> Tensor:
    selected_NT = batch.need("selected", "this loss chooses tokens on the whole batch: prepare it")
    return selected_NT & batch.mask


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"share={share}: the share of trained tokens must lie in (0, 1]")

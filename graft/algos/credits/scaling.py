"""Credits that compare the advantages they are given over the whole batch.

N rows, T tokens, M trained tokens, K tokens, turns or leaves
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.credits.credit import Credit
from graft.algos.masked import keep, masked_whiten, number, segment_mean, standardise


def whiten(per: str = "token", unbiased: bool = False, eps: float = 1e-6) -> Credit:
    """Mean 0 and std 1 over all trained tokens of the batch, or over its turns or leaves.

    A turn or leaf counts once, with the mean of its tokens, however many it has. `unbiased` divides
    the squares by n - 1.
    """
    if per not in ("token", "turn", "leaf"):
        raise ValueError(f"whiten(per={per!r}): give 'token', 'turn' or 'leaf'")

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        adv_M = adv_NT[batch.mask]
        unit_M, num_units = torch.arange(adv_M.numel(), device=adv_M.device), adv_M.numel()
        if per != "token":
            ids_NT = batch.turn_ids() if per == "turn" else batch.leaf[:, None].expand_as(adv_NT)
            unit_M, num_units = number(ids_NT[batch.mask])
        value_K = segment_mean(adv_M, unit_M, num_units)
        white_K = standardise(
            value_K, torch.zeros_like(value_K, dtype=torch.long), 1, eps, unbiased
        )
        out_NT = torch.zeros_like(adv_NT)
        out_NT[batch.mask] = white_K[unit_M]
        return out_NT

    return credit


def rebn(eps: float = 1e-6) -> Credit:
    """Return batch normalisation (GEM): whiten over all trained turns, each counted once.

    Returns 1, 0, 0 of three turns: 1.414, -0.707, -0.707, whatever their lengths.
    """
    # published with eps 1e-9, which scales returns that differ only by rounding to about +-1
    return whiten(per="turn", eps=eps)


def entropy_aware(weight: float = 0.2) -> Credit:
    """Scale advantages up where the policy was less certain than usual (AEPO).

    A * (1 + weight * (H - mean H) / std H), over all trained tokens of the batch. H is the entropy
    under which the engine drew the token: always at hand. Entropies 0.5, 1.5 and A = -1 on both:
    -0.8, -1.2. All equally unsure: A as it was.
    """

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        # the mask excludes tokens that were not chosen: observations, the rest of a description
        unsure_NT = masked_whiten(batch.entropies, batch.mask)
        return keep(adv_NT * (1 + weight * unsure_NT), batch.mask)

    return credit

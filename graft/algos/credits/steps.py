"""The decisions of each leaf side by side, and a walk backwards over them.

M decisions, L leaves, S decisions of a leaf
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.algos.masked import keep, segment_count


def check_discounts(credit: str, **given: float) -> None:
    """Refuse gammas and lambdas that would weigh what lies further away more."""
    for name, value in given.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{credit}({name}={value}): it must lie in [0, 1]; 1 is no discount")


def grid(x_M: Tensor, leaf_M: Tensor, num_leaves: int) -> tuple[Tensor, Tensor, Tensor]:
    """Entries sorted by leaf, laid out one leaf per row: x_LS, count_L, column of each entry.

    a b c of leaves 0 0 1 -> [[a b] [c 0]], [2 1], [0 1 0]
    """
    count_L = segment_count(leaf_M, num_leaves)
    start_L = count_L.cumsum(0) - count_L
    column_M = torch.arange(leaf_M.numel(), device=leaf_M.device) - start_L[leaf_M]
    x_LS = x_M.new_zeros(num_leaves, int(count_L.max()) if num_leaves else 0)
    x_LS[leaf_M, column_M] = x_M
    return x_LS, count_L, column_M


def estimate(
    reward_LS: Tensor,
    value_LS: Tensor,
    count_L: Tensor,
    cut_off_L: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """Backwards over the columns, all leaves at once; beyond a leaf's count nothing happens."""
    adv_LS = torch.zeros_like(value_LS)
    if not adv_LS.numel():
        return adv_LS
    last_L = value_LS.gather(1, (count_L - 1).clamp(min=0)[:, None])[:, 0]
    next_value_L = keep(last_L, cut_off_L)
    next_adv_L = torch.zeros_like(last_L)
    for s in reversed(range(value_LS.shape[1])):
        is_live_L = s < count_L
        delta_L = reward_LS[:, s] + gamma * next_value_L - value_LS[:, s]
        next_adv_L = keep(delta_L + gamma * lam * next_adv_L, is_live_L)
        next_value_L = torch.where(is_live_L, value_LS[:, s], next_value_L)
        adv_LS[:, s] = next_adv_L
    return adv_LS

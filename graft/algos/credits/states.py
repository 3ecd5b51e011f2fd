"""The credit of turns that begin in the same state of the environment.

N rows, T tokens, M trained tokens, K turns, G states
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.credits.credit import Credit
from graft.algos.credits.groups import grpo
from graft.algos.credits.returns import discounted
from graft.algos.masked import first_of, number, segment_mean, segment_std


def gigpo(
    gamma: float = 0.95,
    weight: float = 1.0,
    scale: bool = True,
    unbiased: bool = False,
    eps: float = 1e-6,
) -> Credit:
    """A leaf against its group, and each turn against the turns that began in the same state (GiGPO).

    A = A_leaf + weight * A_turn; A_leaf is `grpo`, A_turn is (G - mean) / (std + eps) of the discounted
    returns G (`discounted`) of all turns of the group that began in this state, in any attempt, at any
    time. A state that was met once compares nothing: A_turn is 0.

    rewards 1 and 0 of two attempts of two turns, gamma 0.5, not scaled; states a, b and a, c:
    A_leaf  0.5 and -0.5     G 0.5, 1 and 0, 0     in a: 0.5 and 0     A  [0.75, 0.5] [-0.75, -0.5]
    """
    whole, returns = grpo(scale, unbiased, eps), discounted(gamma)

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        states_NT = batch.need("states", "the credit gigpo needs the environment's states")
        mask_NT, group_N = batch.mask, number(batch.group)[0]
        if mask_NT.any() and not (states_NT[mask_NT] >= 0).any():
            raise ValueError(
                "the credit gigpo compares turns that began in the same state, and the environment names "
                'none: give info["state"] in reset() and step(), or take the credit grpo'
            )
        turn_M, num_turns = number(batch.turn_ids()[mask_NT])
        first_K = first_of(turn_M, num_turns)
        return_K = returns(adv_NT, batch)[mask_NT][first_K]
        state_K, num_states = number(states_NT[mask_NT][first_K])
        group_K = group_N[:, None].expand_as(mask_NT)[mask_NT][first_K]
        met_K, num_met = number(group_K * (num_states + 1) + state_K)
        better_K = return_K - segment_mean(return_K, met_K, num_met)[met_K]
        if scale:
            better_K = better_K / (segment_std(return_K, met_K, num_met, unbiased)[met_K] + eps)
        is_known_K = states_NT[mask_NT][first_K] >= 0
        out_NT = whole(adv_NT, batch)
        out_NT[mask_NT] += weight * torch.where(is_known_K, better_K, 0.0)[turn_M]
        return out_NT

    return credit

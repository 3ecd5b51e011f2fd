"""Credits of the rewards alone, compared with nothing.

N rows, T tokens, M played tokens, L leaves, K turns, S turns of a leaf
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.credits.credit import Credit, on_all_tokens
from graft.algos.credits.critic import gae
from graft.algos.credits.steps import check_discounts, estimate, grid
from graft.algos.masked import keep, number, segment_sum


def reinforce() -> Credit:
    """The leaf's reward on all its tokens."""

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        return on_all_tokens(batch.reward, batch)

    return credit


def discounted(gamma: float = 1.0, per: str = "turn") -> Credit:
    """Every token of turn t gets the return from there on: G_t = r_t + gamma * G_{t+1}.

    Turns with rewards 0, 0, 1 and gamma 0.9: [0.81 0.81] [0.9] [1.0 1.0]. The turns of a leaf
    form one sequence, over however many contexts they are spread.

    With `per` "token" gamma applies from one trained token to the next, and observations take no
    time, as in `gae`: [0.656 0.729] [0.81] [0.9 1.0]
    """
    if per not in ("token", "turn"):
        raise ValueError(f"discounted(per={per!r}): give 'token' or 'turn'")
    check_discounts("discounted", gamma=gamma)
    # a return is the advantage over a critic that is always 0
    return _per_turn(gamma) if per == "turn" else _per_token(gamma)


def _per_token(gamma: float) -> Credit:
    over_nothing = gae(gamma, lam=1.0)

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        never_N = torch.zeros_like(batch.truncated)
        return over_nothing(adv_NT, batch.replace(values=batch.zeros(), truncated=never_N))

    return credit


def _per_turn(gamma: float) -> Credit:
    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        played_NT = batch.turns >= 0
        turn_M, num_turns = number(batch.turn_ids()[played_NT])  # ascending: by leaf, then by turn
        reward_K = segment_sum(batch.rewards[played_NT].float(), turn_M, num_turns)
        leaf_N, num_leaves = number(batch.leaf)
        leaf_K = torch.zeros_like(reward_K, dtype=torch.long)
        leaf_K[turn_M] = leaf_N[:, None].expand_as(played_NT)[played_NT]

        reward_LS, count_L, column_K = grid(reward_K, leaf_K, num_leaves)
        never_L = torch.zeros_like(count_L, dtype=torch.bool)
        zero_LS = torch.zeros_like(reward_LS)
        return_LS = estimate(reward_LS, zero_LS, count_L, never_L, gamma, lam=1.0)
        out_NT = batch.zeros()
        out_NT[played_NT] = return_LS[leaf_K, column_K][turn_M]
        return keep(out_NT, batch.mask)

    return credit

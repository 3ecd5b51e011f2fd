"""Credits from a critic's values.

N rows, T tokens, M trained tokens, L leaves, K decisions, S decisions of a leaf
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.credits.credit import Credit
from graft.algos.credits.steps import check_discounts, estimate, grid
from graft.algos.masked import first_of, number, segment_count, segment_sum


def gae(gamma: float = 1.0, lam: float = 0.95, per: str = "token") -> Credit:
    """Generalised advantage estimation over the decisions of a leaf, from the critic's values.

    delta_t = r_t + gamma * V_{t+1} - V_t and A_t = delta_t + gamma * lam * A_{t+1}. Observations
    between two decisions take no time. After the last decision V is 0, or its own V where a
    budget of ours cut the leaf off: the world would have gone on.

    gamma = lam = 1, values [0.5 0.2], reward 1 at the end: [0.5 0.8]; truncated instead: [0.7 1.0]

    A decision is a trained token, or with `per` "turn" a whole turn (GEM): its value is that of the
    state in which it begins, gamma and lambda apply from turn to turn, and all its tokens get its A.

    gamma = 0.5, lam = 1, turns of two tokens and one, values [0.4 0.9] [0.6], rewards 0 and 1:
    A of the second turn is 1 - 0.6 = 0.4, of the first 0 + 0.5 * 0.6 - 0.4 + 0.5 * 0.4 = 0.1
    """
    return _gae_credit(gamma, lam, per, is_return=False)


def gae_returns(gamma: float = 1.0, lam: float = 0.95, per: str = "token") -> Credit:
    """The critic's targets: A + V, with A from `gae`. It fills `Batch.returns`.

    With `per` "turn" all tokens of a turn have its target; the critic learns it where the turn begins
    (`reductions.turn_starts`).
    """
    return _gae_credit(gamma, lam, per, is_return=True)


def _gae_credit(gamma: float, lam: float, per: str, is_return: bool) -> Credit:
    check_discounts("gae", gamma=gamma, lam=lam)
    if per not in ("token", "turn"):
        raise ValueError(f"gae(per={per!r}): give 'token' or 'turn'")

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        values_NT = batch.need("values", "gae needs a critic: let it value the batch first").float()
        leaf_N, num_leaves = number(batch.leaf)
        order_N = torch.argsort(leaf_N, stable=True)  # rows of a leaf side by side, in their order
        mask_NT = batch.mask[order_N]
        leaf_NT = leaf_N[order_N][:, None].expand_as(mask_NT)
        leaf_M = leaf_NT[mask_NT]
        count_L = segment_count(leaf_M, num_leaves)
        start_L = count_L.cumsum(0) - count_L

        # a reward may lie on a token that is not trained: it goes to the last decision before it
        latest_NT = mask_NT.flatten().cumsum(0).view_as(leaf_NT) - 1
        earned_NT = latest_NT >= start_L[leaf_NT]  # else it came before the leaf's first decision
        rewards_NT = batch.rewards[order_N].float()
        reward_M = segment_sum(rewards_NT[earned_NT], latest_NT[earned_NT], leaf_M.numel())

        # K decisions: the trained tokens, or the turns they are in
        decision_M = first_K = torch.arange(leaf_M.numel(), device=leaf_M.device)
        if per == "turn":
            decision_M, num_turns = number(batch.turn_ids()[order_N][mask_NT])
            first_K = first_of(decision_M, num_turns)
        leaf_K, value_K = leaf_M[first_K], values_NT[order_N][mask_NT][first_K]
        reward_K = segment_sum(reward_M, decision_M, leaf_K.numel())
        reward_LS, count_L, column_K = grid(reward_K, leaf_K, num_leaves)
        value_LS, _, _ = grid(value_K, leaf_K, num_leaves)
        cut_off_L = segment_count(leaf_N[batch.truncated], num_leaves) > 0
        adv_LS = estimate(reward_LS, value_LS, count_L, cut_off_L, gamma, lam)

        found_K = adv_LS[leaf_K, column_K] + (value_K if is_return else 0.0)
        sorted_NT = torch.zeros_like(values_NT)
        sorted_NT[mask_NT] = found_K[decision_M]
        out_NT = torch.empty_like(sorted_NT)
        out_NT[order_N] = sorted_NT
        return out_NT

    return credit

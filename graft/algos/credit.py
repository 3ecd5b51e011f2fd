"""Credit: pure functions advantages_NT -> advantages_NT, the value of each decision.

    N rows, T tokens, M trained tokens, L leaves, G groups, K turns or spans,
    S turns or trained tokens of a leaf

A chain starts from zeros. Some credits write advantages from the rewards of the batch and ignore
what came before (reinforce, discounted, grpo, dr_grpo, rloo, cpo, gae); others change what they are
given (rebn, whiten, share_over_spans, entropy_aware). Tokens outside the mask stay 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.masked import (
    first_of,
    keep,
    masked_whiten,
    number,
    segment_count,
    segment_mean,
    segment_std,
    segment_sum,
    standardise,
)

Credit = Callable[[Tensor, Batch], Tensor]
"""(adv_NT, batch) -> adv_NT"""


def chain(*credits: Credit) -> Credit:
    """Apply credits in the given order."""

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        for step in credits:
            adv_NT = step(adv_NT, batch)
        return keep(adv_NT, batch.mask)  # a user's credit may ignore the mask

    return credit


def reinforce() -> Credit:
    """The leaf's reward on all its tokens."""

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        return _on_all_tokens(batch.reward, batch)

    return credit


def discounted(gamma: float = 1.0) -> Credit:
    """Every token of turn t gets the return from there on: G_t = r_t + gamma * G_{t+1}.

    Turns with rewards 0, 0, 1 and gamma 0.9: [0.81 0.81] [0.9] [1.0 1.0]. The turns of a leaf
    form one sequence, over however many contexts they are spread.
    """

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        played_NT = batch.turns >= 0
        turn_M, num_turns = number(batch.turn_ids()[played_NT])  # ascending: by leaf, then by turn
        reward_K = segment_sum(batch.rewards[played_NT].float(), turn_M, num_turns)
        leaf_N, num_leaves = number(batch.leaf)
        leaf_K = torch.zeros_like(reward_K, dtype=torch.long)
        leaf_K[turn_M] = leaf_N[:, None].expand_as(played_NT)[played_NT]

        # a return is the advantage over a critic that is always 0
        reward_LS, count_L, column_K = _grid(reward_K, leaf_K, num_leaves)
        never_L = torch.zeros_like(count_L, dtype=torch.bool)
        zero_LS = torch.zeros_like(reward_LS)
        return_LS = _gae(reward_LS, zero_LS, count_L, never_L, gamma, lam=1.0)
        out_NT = batch.zeros()
        out_NT[played_NT] = return_LS[leaf_K, column_K][turn_M]
        return keep(out_NT, batch.mask)

    return credit


def rebn(eps: float = 1e-6) -> Credit:
    """Return batch normalisation (GEM): whiten over all trained turns, each counted once.

    Returns 1, 0, 0 of three turns: 1.414, -0.707, -0.707, whatever their lengths.
    """
    # published with eps 1e-9, which scales returns that differ only by rounding to about +-1

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        turn_M, num_turns = number(batch.turn_ids()[batch.mask])
        value_K = segment_mean(adv_NT[batch.mask], turn_M, num_turns)
        white_K = standardise(value_K, torch.zeros_like(value_K, dtype=torch.long), 1, eps)
        out_NT = torch.zeros_like(adv_NT)
        out_NT[batch.mask] = white_K[turn_M]
        return out_NT

    return credit


def grpo(scale: bool = True, unbiased: bool = False, eps: float = 1e-6) -> Credit:
    """A leaf's reward relative to its group: (r - mean) / (std + eps), on all its tokens.

    Rewards 1, 0, 0: 1.414, -0.707, -0.707 (`unbiased` divides by n - 1: 1.155, -0.577, -0.577). A
    leaf counts once, over however many rows it is spread, trained or not. A group of one has mean
    0 and std 1, so its reward is its advantage.
    """

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        leaf_N, reward_L, group_L, num_groups = _leaves(batch)
        alone_G = segment_count(group_L, num_groups) == 1
        mean_G = segment_mean(reward_L, group_L, num_groups).masked_fill(alone_G, 0.0)
        better_L = reward_L - mean_G[group_L]
        if scale:
            std_G = segment_std(reward_L, group_L, num_groups, unbiased).masked_fill(alone_G, 1.0)
            better_L = better_L / (std_G[group_L] + eps)
        return _on_all_tokens(better_L[leaf_N], batch)

    return credit


def dr_grpo() -> Credit:
    """GRPO without the division, which favours groups that are nearly always right or wrong."""
    return grpo(scale=False)


def rloo() -> Credit:
    """The reward minus the mean of the others in the group. Rewards 1, 0, 0: 1, -0.5, -0.5.

    Alone in its group, a leaf has nothing to be compared with and keeps its reward, as in `grpo`.
    """

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        leaf_N, reward_L, group_L, num_groups = _leaves(batch)
        count_L = segment_count(group_L, num_groups)[group_L]
        # r - (sum - r)/(n-1) = (r - mean) * n/(n-1), which is exactly 0 in a flat group
        mean_L = segment_mean(reward_L, group_L, num_groups)[group_L]
        better_L = (reward_L - mean_L) * count_L / (count_L - 1).clamp(min=1)
        return _on_all_tokens(torch.where(count_L > 1, better_L, reward_L)[leaf_N], batch)

    return credit


def cpo(eps: float = 1e-6) -> Credit:
    """The gain of a forced call, on all tokens of the counterfactual row: R(y') - R(y).

    Rewards 1, 0, 0 and a counterfactual 1 of the second: 1.155, -0.577, -0.577 and 1. Every other
    row is compared with its group as in `grpo(unbiased=True)`, where counterfactual leaves, which
    are not the policy's own doing, count neither in the mean nor in the std.
    """
    among_themselves = grpo(unbiased=True, eps=eps)

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        rewritten_N = batch.twin_reward.isfinite()
        own = batch.rows(~rewritten_N)
        gain_N = keep(batch.reward.float() - batch.twin_reward, rewritten_N)
        out_NT = _on_all_tokens(gain_N, batch)
        out_NT[~rewritten_N] = among_themselves(own.zeros(), own)
        return out_NT

    return credit


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
        reward_LS, count_L, column_K = _grid(reward_K, leaf_K, num_leaves)
        value_LS, _, _ = _grid(value_K, leaf_K, num_leaves)
        cut_off_L = segment_count(leaf_N[batch.truncated], num_leaves) > 0
        adv_LS = _gae(reward_LS, value_LS, count_L, cut_off_L, gamma, lam)

        found_K = adv_LS[leaf_K, column_K] + (value_K if is_return else 0.0)
        sorted_NT = torch.zeros_like(values_NT)
        sorted_NT[mask_NT] = found_K[decision_M]
        out_NT = torch.empty_like(sorted_NT)
        out_NT[order_N] = sorted_NT
        return out_NT

    return credit


def whiten(eps: float = 1e-6) -> Credit:
    """Mean 0 and std 1 over all trained tokens of the batch."""

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        return masked_whiten(adv_NT, batch.mask, eps)

    return credit


def share_over_spans() -> Credit:
    """Give each span the mean advantage of the trajectories that pass through it.

    rewards 1, 0, 0 in one group; rows 0 and 1 share span 7:
    grpo    [1.41, 1.41] [-0.71, -0.71] [-0.71, -0.71]
    shared  [0.35, 1.41] [ 0.35, -0.71] [-0.71, -0.71]
    """

    def credit(adv_NT: Tensor, batch: Batch) -> Tensor:
        span_M, num_spans = number(batch.spans[batch.mask])
        mean_K = segment_mean(adv_NT[batch.mask], span_M, num_spans)
        out_NT = torch.zeros_like(adv_NT)
        out_NT[batch.mask] = mean_K[span_M]
        return out_NT

    return credit


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


CREDITS: dict[str, Callable[..., Credit]] = {
    "reinforce": reinforce,
    "discounted": discounted,
    "rebn": rebn,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "cpo": cpo,
    "gae": gae,
    "gae_returns": gae_returns,
    "whiten": whiten,
    "share_over_spans": share_over_spans,
    "entropy_aware": entropy_aware,
}


def _on_all_tokens(value_N: Tensor, batch: Batch) -> Tensor:
    return keep(batch.zeros() + value_N[:, None], batch.mask)


def _leaves(batch: Batch) -> tuple[Tensor, Tensor, Tensor, int]:
    """The leaf of each row, reward and group of each leaf, number of groups."""
    leaf_N, num_leaves = number(batch.leaf)
    group_N, num_groups = number(batch.group)
    reward_L = torch.zeros(num_leaves, device=leaf_N.device)
    reward_L[leaf_N] = batch.reward.float()  # all rows of a leaf have its total: any of them serves
    group_L = torch.zeros_like(reward_L, dtype=torch.long)
    group_L[leaf_N] = group_N
    return leaf_N, reward_L, group_L, num_groups


def _grid(x_M: Tensor, leaf_M: Tensor, num_leaves: int) -> tuple[Tensor, Tensor, Tensor]:
    """Entries sorted by leaf, laid out one leaf per row: x_LS, count_L, column of each entry.

    a b c of leaves 0 0 1 -> [[a b] [c 0]], [2 1], [0 1 0]
    """
    count_L = segment_count(leaf_M, num_leaves)
    start_L = count_L.cumsum(0) - count_L
    column_M = torch.arange(leaf_M.numel(), device=leaf_M.device) - start_L[leaf_M]
    x_LS = x_M.new_zeros(num_leaves, int(count_L.max()) if num_leaves else 0)
    x_LS[leaf_M, column_M] = x_M
    return x_LS, count_L, column_M


def _gae(
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

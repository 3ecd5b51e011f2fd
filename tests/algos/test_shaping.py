from __future__ import annotations

import pytest
import torch

from graft.algos.credits.returns import discounted, reinforce
from graft.algos.shaping import kl_in_reward, mask_truncated, overlong, shape_in_turn

NAN = float("nan")


def check(got, want):
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32), atol=1e-6, rtol=0)


def test_overlong_grows_evenly_over_the_buffer_and_stops(toy_batch):
    """max 10, buffer 4: 6 tokens free, 8 cost a half, 12 cost the whole."""
    turns = torch.full((4, 12), -1)
    for row, length in enumerate([6, 8, 10, 12]):
        turns[row, :length] = 0
    batch = overlong(10, 4)(toy_batch(turns=turns, reward=[1, 1, 1, 1]))
    check(batch.reward, [1, 0.5, 0, 0])
    half = overlong(10, 4, penalty=0.5)(toy_batch(turns=turns, reward=[1, 1, 1, 1]))
    check(half.reward, [1, 0.75, 0.5, 0.5])


def test_overlong_counts_policy_tokens_and_not_observations(toy_batch):
    turns = [[-1, 0, 0, -1, -1, -1, 1, 1]]
    assert overlong(6, 2)(toy_batch(turns=turns, reward=[1])).reward.item() == 1


def test_overlong_falls_on_the_last_policy_token(toy_batch):
    batch = toy_batch(
        turns=[[0, 0, -1, 1, -1]], rewards=[[0, 0.5, 0, 1, 0]], reward=[1.5], mask=[[1, 1, 0, 0, 0]]
    )
    shaped = overlong(3, 3)(batch)
    check(shaped.rewards, [[0, 0.5, 0, 0, 0]])
    check(shaped.reward, [0.5])
    check(discounted(1.0)(shaped.zeros(), shaped), [[0.5, 0.5, 0, 0, 0]])


def test_overlong_adds_up_the_contexts_of_a_leaf(toy_batch):
    batch = toy_batch(
        turns=[[0, 0], [0, -1], [1, -1]],
        leaf=[9, 2, 9],
        reward=[1, 1, 1],
        rewards=[[0, 0], [1, 0], [1, 0]],
    )
    shaped = overlong(4, 4)(batch)  # leaf 9 has 3 tokens, leaf 2 one
    check(shaped.reward, [0.25, 0.75, 0.25])
    check(shaped.rewards, [[0, 0], [0.75, 0], [0.25, 0]])


def test_overlong_leaves_a_row_without_policy_tokens_alone(toy_batch):
    shaped = overlong(2, 2)(toy_batch(turns=[[-1, -1], [0, 0]], reward=[1, 1]))
    check(shaped.reward, [1, 0])
    check(shaped.rewards, [[0, 1], [0, 0]])


def test_a_buffer_longer_than_the_limit_is_refused():
    with pytest.raises(ValueError, match=r"buffer=11 must lie in 1..max_length=10"):
        overlong(10, 11)


def test_truncated_rows_lose_their_mask_and_keep_their_reward(toy_batch):
    batch = mask_truncated()(toy_batch(reward=[1, 2, 3], truncated=[0, 1, 0]))
    assert batch.mask.tolist() == [[True, True], [False, False], [True, True]]
    assert batch.reward.tolist() == [1, 2, 3]


def test_moving_away_from_the_reference_lowers_the_reward(toy_batch):
    batch = toy_batch(
        reward=[1, 1, 0],
        logprobs=[[-1, -1], [-1, NAN], [-3, -1]],
        ref_logprobs=[[-2, -1], [-3, NAN], [-1, -1]],
        mask=[[1, 1], [1, 0], [1, 1]],
    )
    shaped = kl_in_reward(0.1)(batch)
    check(shaped.rewards, [[-0.1, 1], [-0.2, 1], [0.2, 0]])
    check(shaped.reward, [0.9, 0.8, 0.2])
    check(reinforce()(shaped.zeros(), shaped), [[0.9, 0.9], [0.8, 0], [0.2, 0.2]])


def test_both_rows_of_a_leaf_pay_the_sum(toy_batch):
    batch = toy_batch(
        reward=[1, 1],
        leaf=[6, 6],
        logprobs=[[0, 0], [0, 0]],
        ref_logprobs=[[-1, 0], [-2, 0]],
    )
    check(kl_in_reward(0.1, "k1")(batch).reward, [0.7, 0.7])
    check(kl_in_reward(0.1, "k2")(batch).reward, [0.75, 0.75])  # 0.5 * (1 + 4)


def test_kl_in_reward_needs_a_reference_and_a_known_estimate(toy_batch):
    with pytest.raises(ValueError, match=r"ref_logprobs is None"):
        kl_in_reward(0.1)(toy_batch(reward=[1]))
    with pytest.raises(ValueError, match=r"unknown KL estimate 'k4'; known: k1, k2, k3"):
        kl_in_reward(0.1, "k4")


def test_shapings_run_in_the_order_written_and_none_is_the_identity(toy_batch):
    batch = toy_batch(reward=[1, 1], truncated=[1, 0], ref_logprobs=[[-2, -2], [-2, -2]])
    check(shape_in_turn(mask_truncated(), kl_in_reward(0.1))(batch).reward, [1, 0.8])
    check(shape_in_turn(kl_in_reward(0.1), mask_truncated())(batch).reward, [0.8, 0.8])
    assert shape_in_turn()(batch) is batch

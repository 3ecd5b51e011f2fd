"""Credits on batches of three rows, worked by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.algos.credits.credit import chain
from graft.algos.credits.critic import gae, gae_returns
from graft.algos.credits.groups import cpo, dr_grpo, grpo, rloo
from graft.algos.credits.returns import discounted, reinforce
from graft.algos.credits.scaling import rebn, whiten
from graft.algos.credits.table import CREDITS
from graft.algos.credits.trees import share_over_spans
from graft.algos.parts import make

NAN = float("nan")
MASK = [[1, 1], [0, 1], [1, 0]]


def check(got, want, atol=1e-3):
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32), atol=atol, rtol=0)


def test_reinforce_puts_the_leaf_reward_on_its_trained_tokens(toy_batch):
    batch = toy_batch(reward=[1, 0.5, -2], mask=MASK)
    check(reinforce()(batch.zeros(), batch), [[1, 1], [0, 0.5], [-2, 0]])


def test_grpo_gives_each_leaf_its_distance_in_stds(toy_batch):
    batch = toy_batch(reward=[1, 0, 0], mask=MASK)
    check(grpo()(batch.zeros(), batch), [[1.414, 1.414], [0, -0.707], [-0.707, 0]])
    unbiased = grpo(unbiased=True)(batch.zeros(), batch)
    check(unbiased, [[1.1547, 1.1547], [0, -0.5774], [-0.5774, 0]])


def test_dr_grpo_only_centres(toy_batch):
    batch = toy_batch(reward=[1, 0, 0], mask=MASK)
    check(dr_grpo()(batch.zeros(), batch), [[2 / 3, 2 / 3], [0, -1 / 3], [-1 / 3, 0]])


def test_rloo_compares_with_the_others(toy_batch):
    batch = toy_batch(reward=[1, 0, 0.5], mask=MASK)  # others: 0.25, 0.75, 0.5
    check(rloo()(batch.zeros(), batch), [[0.75, 0.75], [0, -0.75], [0, 0]])


def test_groups_are_compared_apart_and_need_not_be_neighbours(toy_batch):
    batch = toy_batch(reward=[3, 100, 1, 102], group=[9, 4, 9, 4])
    check(dr_grpo()(batch.zeros(), batch)[:, 0], [1, -1, -1, 1])
    check(grpo()(batch.zeros(), batch)[:, 0], [1, -1, -1, 1])


def test_cpo_gives_a_counterfactual_row_what_it_earned_more_than_its_twin(toy_batch):
    batch = toy_batch(
        reward=[1, 0, 0, 1, 0.25],
        twin_reward=[NAN, NAN, NAN, 0, 0.5],
        mask=[[1, 1], [0, 1], [1, 0], [1, 1], [0, 1]],
    )
    want = [[1.1547, 1.1547], [0, -0.5774], [-0.5774, 0], [1, 1], [0, -0.25]]
    check(cpo()(batch.zeros(), batch), want)


def test_cpo_without_counterfactual_rows_is_unbiased_grpo_and_with_nothing_else_only_gains(
    toy_batch,
):
    plain = toy_batch(reward=[1, 0, 0.5, 0.5], group=[0, 0, 1, 1])
    want = grpo(unbiased=True)(plain.zeros(), plain)
    assert torch.equal(cpo()(plain.zeros(), plain), want)
    replaced = toy_batch(reward=[1, 0, 1], twin_reward=[0, 0, 0])  # of a group that failed
    check(cpo()(replaced.zeros(), replaced)[:, 0], [1, 0, 1], atol=0)


def test_cpo_keeps_the_groups_apart(toy_batch):
    batch = toy_batch(
        reward=[0, 1, 3, 1, 7], twin_reward=[0, NAN, NAN, NAN, 6], group=[0, 1, 1, 2, 1]
    )
    half = 0.5 / 2**0.5 * 2
    check(cpo()(batch.zeros(), batch)[:, 0], [0, -half, half, 1, 1], atol=1e-5)


ALONE = ["dr_grpo", "rloo", "opo", "gpg", "grpo_passk", "pass_at_k", "treerpo", "maxrl"]
ALONE += ["optimal_token_baseline"]
GROUPED = ["grpo", "cpo", "gigpo", *ALONE]
"""Credits that compare the leaves of a group; the first two divide by a std of 1 where there is one."""


@pytest.mark.parametrize("credit", [grpo(eps=0.0), *(CREDITS[name]() for name in ALONE)])
def test_a_group_of_one_keeps_its_reward(full_batch, credit):
    batch = full_batch(reward=[0.7, 1, 0], group=[1, 0, 0])
    check(credit(batch.zeros(), batch)[0], [0.7, 0.7], atol=1e-6)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("reward", [0.1, 0.3])
def test_a_flat_group_has_advantage_zero_to_the_bit(full_batch, name, reward):
    credit = CREDITS[name]()
    batch = full_batch(reward=[reward] * 7)
    assert credit(batch.zeros(), batch).abs().max().item() == 0


@pytest.mark.parametrize("name", GROUPED)
def test_a_leaf_of_two_rows_counts_once_in_its_group(full_batch, name):
    credit = CREDITS[name]()
    apart = full_batch(reward=[1, 0, 0])
    spread = full_batch(
        reward=[1, 1, 0, 0],
        leaf=[5, 5, 2, 8],
        mask=[[1, 0], [0, 1], [1, 1], [1, 1]],  # as many trained tokens as apart
        turns=[[0, -1], [-1, 0], [0, 0], [0, 0]],
        rewards=[[0, 0], [0, 1], [0, 0], [0, 0]],
    )
    want = credit(apart.zeros(), apart)
    check(credit(spread.zeros(), spread), (want[[0, 0, 1, 2]] * spread.mask).tolist(), 1e-6)


def test_discounted_gives_every_token_the_return_of_its_turn(toy_batch):
    batch = toy_batch(
        turns=[[0, 0, -1, 1, -1, 2], [0, -1, 1, 1, -1, -1], [0, 0, 0, 0, 0, 0]],
        rewards=[[0, 0, 0, 0, 0, 1], [2, 0, 0, -1, 0, 0], [0, 0, 0, 0, 0, 0.5]],
    )
    want = [
        [0.81, 0.81, 0, 0.9, 0, 1],
        [2 - 0.9, 0, -1, -1, 0, 0],
        [0.5] * 6,
    ]
    check(discounted(0.9)(batch.zeros(), batch), want, atol=1e-6)


def test_discounting_goes_on_across_the_contexts_of_a_leaf(toy_batch):
    """Leaf 7: turns 0 and 1 in rows 0 and 2, another leaf between them."""
    batch = toy_batch(
        turns=[[0, -1], [0, 0], [1, 1]],
        rewards=[[1, 0], [0, 4], [0, 2]],
        leaf=[7, 3, 7],
    )
    check(discounted(0.5)(batch.zeros(), batch), [[2, 0], [4, 4], [2, 2]], atol=1e-6)


def test_a_reward_on_an_untrained_policy_token_still_counts_in_its_turn(toy_batch):
    turns, mask = [[0, 0, -1, 1, 1]], [[1, 0, 0, 1, 0]]  # both turns end with a forced token
    batch = toy_batch(turns=turns, mask=mask, rewards=[[0, 1, 0, 0, 2]])
    check(discounted(1.0)(batch.zeros(), batch), [[3, 0, 0, 2, 0]])


def test_rebn_counts_every_turn_once_whatever_its_length(toy_batch):
    batch = toy_batch(
        turns=[[0, 0, 0, 0], [0, -1, -1, -1], [0, 0, -1, -1]],
        rewards=[[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]],
    )
    got = chain(discounted(1.0), rebn())(batch.zeros(), batch)
    want = [[1.414] * 4, [-0.707, 0, 0, 0], [-0.707, -0.707, 0, 0]]
    check(got, want)


def test_rebn_of_two_turns_in_one_row(toy_batch):
    batch = toy_batch(turns=[[0, 0, 1]], rewards=[[0, 1, 3]])  # returns 4 and 3
    check(chain(discounted(1.0), rebn())(batch.zeros(), batch), [[1, 1, -1]])


@pytest.mark.parametrize("value", [-0.1, 0.1, 0.3, 0.7])
def test_equal_returns_give_zero_not_nan(toy_batch, value):
    """E[G^2] - E[G]^2 in fp32 can go below 0 here, whose root is NaN."""
    columns = 1 + torch.arange(128) % 5  # turns of unequal length
    turns = torch.where(torch.arange(5) < columns[:, None], 0, -1)
    rewards = torch.zeros(128, 5).scatter(1, columns[:, None] - 1, value)
    batch = toy_batch(turns=turns, rewards=rewards)
    got = chain(discounted(1.0), rebn(eps=1e-9))(batch.zeros(), batch)
    assert got.abs().max().item() == 0


def test_gae_by_hand(toy_batch):
    """gamma 0.5, lambda 0.5. Row 0: delta_1 = 1 - 0.4, delta_0 = 0.5 * 0.4 - 1."""
    batch = toy_batch(
        mask=[[0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]],
        rewards=[[0, 0, 0, 1], [0, 0.5, 1, 0], [0, 0, 0, 1]],
        values=[[NAN, 1, NAN, 0.4], [9, 0.2, 0.6, 9], [NAN, 1, 1, 1]],
        truncated=[0, 1, 0],
    )
    a1, a0 = 0.6, -0.8 + 0.25 * 0.6
    b1 = 1 + 0.5 * 0.6 - 0.6  # truncated: the value after the last token is its own
    b0 = 0.5 + 0.5 * 0.6 - 0.2 + 0.25 * b1
    want = [[0, a0, 0, a1], [0, b0, b1, 0], [0, 0, 0, 0]]
    check(gae(0.5, 0.5)(batch.zeros(), batch), want, atol=1e-6)
    want = [[0, a0 + 1, 0, a1 + 0.4], [0, b0 + 0.2, b1 + 0.6, 0], [0, 0, 0, 0]]
    check(gae_returns(0.5, 0.5)(batch.zeros(), batch), want, atol=1e-6)


def test_the_docstring_case_of_gae(toy_batch):
    case = {"values": [[0.5, 0.2]], "rewards": [[0, 1]]}
    batch = toy_batch(**case)
    check(gae(1.0, 1.0)(batch.zeros(), batch), [[0.5, 0.8]], atol=1e-6)
    batch = toy_batch(**case, truncated=[1])
    check(gae(1.0, 1.0)(batch.zeros(), batch), [[0.7, 1.0]], atol=1e-6)


def test_gae_per_turn_by_hand(toy_batch):
    """gamma 0.5. Row 0, lambda 1: 1 - 0.6 = 0.4, then 0.5 * 0.6 - 0.4 + 0.5 * 0.4 = 0.1.

    Row 1 is truncated: 2 + 0.5 * 0.2 - 0.2 = 1.9, then 1 + 0.5 * 0.2 - 0.8 + 0.5 * 1.9 = 1.25; the
    reward on an observation belongs to the turn before it.
    """
    batch = toy_batch(
        turns=[[0, 0, -1, 1, -1], [0, -1, 1, 1, -1]],
        values=[[0.4, 0.9, 9, 0.6, 9], [0.8, 9, 0.2, 0.7, NAN]],
        rewards=[[0, 0, 0, 1, 0], [0, 1, 0, 2, 0]],
        truncated=[0, 1],
    )
    want = [[0.1, 0.1, 0, 0.4, 0], [1.25, 0, 1.9, 1.9, 0]]
    check(gae(0.5, 1.0, per="turn")(batch.zeros(), batch), want, atol=1e-6)
    got = gae_returns(0.5, 1.0, per="turn")(batch.zeros(), batch)
    check(got, [[0.5, 0.5, 0, 1.0, 0], [2.05, 0, 2.1, 2.1, 0]], atol=1e-6)
    short = gae(0.5, 0.5, per="turn")(batch.zeros(), batch)
    assert short[0, 0].item() == pytest.approx(-0.1 + 0.25 * 0.4)
    with pytest.raises(ValueError, match="give 'token' or 'turn'"):
        gae(per="step")


def test_turns_of_one_token_make_both_kinds_of_gae_the_same(toy_batch):
    torch.manual_seed(0)
    batch = toy_batch(
        values=torch.rand(3, 4),
        rewards=torch.rand(3, 4),
        turns=[[0, 1, 2, 3], [0, 1, -1, -1], [2, 3, 4, -1]],
        leaf=[1, 0, 0],
    )
    for kind in (gae, gae_returns):
        want = kind(0.9, 0.8)(batch.zeros(), batch)
        torch.testing.assert_close(kind(0.9, 0.8, per="turn")(batch.zeros(), batch), want)


def test_gae_of_a_leaf_does_not_depend_on_longer_ones_beside_it(toy_batch):
    batch = toy_batch(
        mask=[[1, 1, 0, 0], [1, 1, 1, 1]],
        values=[[0.5, 0.2, 7, 7], [0, 0, 0, 0]],
        rewards=[[0, 1, 0, 0], [0, 0, 0, 1]],
        truncated=[1, 0],
    )
    check(gae(1.0, 1.0)(batch.zeros(), batch), [[0.7, 1, 0, 0], [1, 1, 1, 1]], atol=1e-6)


def test_gae_runs_through_the_contexts_of_a_leaf_as_one_sequence(toy_batch):
    one = toy_batch(values=[[0.1, 0.2, 0.3, 0.4]], rewards=[[0, 1, 0, 2]])
    two = toy_batch(
        values=[[0.1, 0.2], [5, 5], [0.3, 0.4]],
        rewards=[[0, 1], [0, 0], [0, 2]],
        leaf=[4, 0, 4],
    )
    want = gae(0.9, 0.8)(one.zeros(), one)[0]
    got = gae(0.9, 0.8)(two.zeros(), two)
    check(torch.cat([got[0], got[2]]), want.tolist(), atol=1e-6)


def test_gae_credits_a_reward_on_an_untrained_token_to_the_decision_before_it(toy_batch):
    batch = toy_batch(
        mask=[[0, 1, 0, 1, 0], [0, 1, 0, 0, 0]],
        rewards=[[0, 0, 2, 0, 1], [7, 0, 0, 0, 0]],  # the 7 comes before any decision of its leaf
        values=[[0.0] * 5, [0.0] * 5],
    )
    check(gae(1.0, 1.0)(batch.zeros(), batch), [[0, 3, 0, 1, 0], [0, 0, 0, 0, 0]])


def test_gae_with_lambda_one_and_no_discount_is_return_minus_value(toy_batch):
    torch.manual_seed(0)
    values, rewards = torch.rand(3, 6), torch.rand(3, 6)
    batch = toy_batch(values=values, rewards=rewards)
    left = rewards.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(gae(1.0, 1.0)(batch.zeros(), batch), left - values)
    torch.testing.assert_close(gae_returns(1.0, 1.0)(batch.zeros(), batch), left)


def test_gae_without_a_critic_is_an_error(toy_batch):
    batch = toy_batch(reward=[1.0])
    with pytest.raises(ValueError, match=r"values is None.*critic"):
        gae()(batch.zeros(), batch)


def test_whiten_is_over_trained_tokens(toy_batch):
    batch = toy_batch(reward=[3, 1, 1], mask=[[1, 1], [1, 0], [1, 0]])
    check(chain(reinforce(), whiten())(batch.zeros(), batch), [[1, 1], [-1, 0], [-1, 0]])


def test_a_shared_span_gets_the_mean_of_its_leaves(toy_batch):
    batch = toy_batch(reward=[1, 0, 0], group=[0, 0, 0], spans=[[7, 8], [7, 9], [5, 5]])
    adv_NT = chain(grpo(), share_over_spans())(batch.zeros(), batch)
    check(adv_NT, [[0.354, 1.414], [0.354, -0.707], [-0.707, -0.707]])


def test_a_row_that_is_not_trained_does_not_count_in_a_shared_span(toy_batch):
    batch = toy_batch(reward=[1, 0], spans=[[7, 8], [7, 9]], mask=[[1, 1], [0, 0]])
    adv_NT = chain(dr_grpo(), share_over_spans())(batch.zeros(), batch)
    check(adv_NT, [[0.5, 0.5], [0, 0]])


def test_chain_clears_what_a_careless_credit_wrote_outside_the_mask(toy_batch):
    batch = toy_batch(reward=[1, 0], mask=[[1, 0], [0, 1]])
    check(chain(lambda adv_NT, batch: adv_NT + 3)(batch.zeros(), batch), [[3, 0], [0, 3]])


@pytest.mark.parametrize("name", CREDITS)
def test_masked_tokens_stay_zero(full_batch, name):
    batch = full_batch(
        reward=[1, 2, 4],
        mask=[[1, 0, 1], [0, 1, 0], [0, 0, 0]],
        values=[[0.3, NAN, 0.1], [NAN, 0.5, NAN], [NAN, NAN, NAN]],
    )
    got = chain(reinforce(), CREDITS[name]())(batch.zeros(), batch)
    alone = CREDITS[name]()(reinforce()(batch.zeros(), batch), batch)
    for adv_NT in (got, alone):
        assert adv_NT[~batch.mask].abs().max().item() == 0
        assert adv_NT.isfinite().all()


@pytest.mark.parametrize("name", CREDITS)
def test_a_batch_without_trained_tokens_gives_zeros(full_batch, name):
    batch = full_batch(reward=[1, 2, 4], mask=[[0, 0]] * 3, values=[[0.0, 0.0]] * 3)
    check(chain(reinforce(), CREDITS[name]())(batch.zeros(), batch), [[0, 0]] * 3)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(CREDITS)))
def test_permuting_rows_permutes_advantages(full_batch, data, name):
    rows, columns = data.draw(st.integers(1, 6)), 3
    numbers = st.integers(-4, 4).map(float)

    def grid(entry):
        return st.lists(
            st.lists(entry, min_size=columns, max_size=columns), min_size=rows, max_size=rows
        )

    rewards = numbers.map(abs) if name == "maxrl" else numbers
    batch = full_batch(
        reward=data.draw(st.lists(rewards, min_size=rows, max_size=rows)),
        group=data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)),
        truncated=data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)),
        mask=data.draw(grid(st.booleans())),
        spans=data.draw(grid(st.integers(0, 4))),
        values=data.draw(grid(numbers)),
    )
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    credit = chain(reinforce(), CREDITS[name]())
    shuffled = batch.rows(order)
    torch.testing.assert_close(
        credit(shuffled.zeros(), shuffled), credit(batch.zeros(), batch)[order], atol=1e-4, rtol=0
    )


@settings(max_examples=25, deadline=None)
@given(
    rewards=st.lists(st.integers(-8, 8), min_size=2, max_size=8),
    constant=st.integers(-100, 100),
    name=st.sampled_from(sorted(set(GROUPED) - {"maxrl", "pass_at_k"})),
)
def test_adding_a_constant_to_all_rewards_changes_nothing(full_batch, rewards, constant, name):
    credit = CREDITS[name]()
    one, other = full_batch(reward=rewards), full_batch(reward=[r + constant for r in rewards])
    torch.testing.assert_close(
        credit(one.zeros(), one), credit(other.zeros(), other), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    "part", [("gae", {"lam": 3}), ("discounted", {"gamma": 1.1}), ("gigpo", {"gamma": -1})]
)
def test_a_discount_that_grows_is_refused(part):
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        make(part, CREDITS, "credit")

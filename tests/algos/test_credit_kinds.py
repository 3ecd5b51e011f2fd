"""Credits beyond the plain ones, on batches of three rows that are worked by hand."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from graft.algos.credits.baselines import RoleBaseline, remax
from graft.algos.credits.best_of_k import grpo_passk, pass_at_k
from graft.algos.credits.credit import chain
from graft.algos.credits.groups import gpg, grpo, maxrl, opo
from graft.algos.credits.parts import gdpo
from graft.algos.credits.returns import discounted
from graft.algos.credits.scaling import rebn, whiten
from graft.algos.credits.states import gigpo
from graft.algos.credits.table import CREDITS
from graft.algos.credits.token_baseline import optimal_token_baseline
from graft.algos.credits.trees import share_over_spans, treerpo
from graft.algos.parts import make

NAN = math.nan


def check(got, want, atol=1e-3):
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32), atol=atol, rtol=0)


def first_column(credit, batch):
    return credit(batch.zeros(), batch)[:, 0]


def test_batch_scaling_divides_by_the_std_of_all_rewards(toy_batch):
    batch = toy_batch(reward=[1, 0, 3, 3], group=[0, 0, 1, 1])  # mean 1.75, std 1.299
    check(first_column(grpo(scale="batch"), batch), [0.3849, -0.3849, 0, 0])
    unbiased = grpo(scale="batch", unbiased=True)  # std 1.5
    check(first_column(unbiased, batch), [1 / 3, -1 / 3, 0, 0])
    check(first_column(grpo(scale=False), batch), [0.5, -0.5, 0, 0])
    with pytest.raises(ValueError, match="'batch'"):
        grpo(scale="std")


def test_opo_weighs_the_baseline_with_lengths(toy_batch):
    batch = toy_batch(reward=[1, 0, 0], mask=[[1, 1], [0, 1], [1, 0]])
    check(opo()(batch.zeros(), batch), [[0.5, 0.5], [0, -0.5], [-0.5, 0]])
    untrained = toy_batch(reward=[1, 0, 0], mask=[[0, 0], [0, 1], [1, 0]])  # baseline 0
    check(opo()(untrained.zeros(), untrained), [[0, 0], [0, 0], [0, 0]])


def test_gpg_makes_up_for_leaves_without_a_gradient(toy_batch):
    batch = toy_batch(reward=[1, 0, 1, 1], group=[0, 0, 1, 1])
    check(first_column(gpg(), batch), [1, -1, 0, 0])  # alpha 4 / 2
    check(first_column(gpg(valid="rewards"), batch), [2 / 3, -2 / 3, 0, 0])  # alpha 4 / 3
    check(first_column(gpg(norm=2), batch), [0.5, -0.5, 0, 0])
    flat = toy_batch(reward=[0, 0, 0])
    check(first_column(gpg(), flat), [0, 0, 0])
    with pytest.raises(ValueError, match="'rewards'"):
        gpg(valid="groups")


def test_maxrl_divides_by_the_mean(toy_batch):
    check(first_column(maxrl(), toy_batch(reward=[1, 0, 0])), [2, -1, -1])
    check(first_column(maxrl(), toy_batch(reward=[1, 1, 0])), [0.5, 0.5, -1])
    check(first_column(maxrl(), toy_batch(reward=[0, 0, 0])), [0, 0, 0])
    with pytest.raises(ValueError, match=r"a reward is -0\.5.*grpo"):
        first_column(maxrl(), toy_batch(reward=[1, -0.5, 0]))


def test_grpo_passk_pays_the_best_leaf_what_it_adds(toy_batch):
    batch = toy_batch(reward=[1, 0.4, 0, 2, 2, 1], group=[0, 0, 0, 1, 1, 1])
    check(first_column(grpo_passk(scale=False), batch), [0.6, 0, 0, 0, 0, 0])
    # std with n - 1: 0.5033
    check(first_column(grpo_passk(), batch), [1.1921, 0, 0, 0, 0, 0])


def test_pass_at_k_by_hand_and_over_all_sets(toy_batch):
    check(first_column(pass_at_k(k=2), toy_batch(reward=[1, 0, 0])), [0.7071, -0.3536, -0.3536])
    rewards = [1, 0, 0, 1, 0]
    sets = list(itertools.combinations(range(5), 3))
    value = {chosen: max(rewards[i] for i in chosen) for chosen in sets}
    every = torch.tensor(list(value.values()), dtype=torch.float32)
    mean, std = every.mean(), every.std(correction=0)
    # a leaf's advantage is the mean of those of the sets that it is in
    want = [
        torch.stack([(value[s] - mean) / std for s in sets if leaf in s]).mean()
        for leaf in range(5)
    ]
    check(first_column(pass_at_k(k=3), toy_batch(reward=rewards)), [float(x) for x in want])


def test_pass_at_k_has_no_gradient_where_every_set_or_none_is_right(toy_batch):
    check(first_column(pass_at_k(k=2), toy_batch(reward=[1, 1, 0])), [0, 0, 0])
    check(first_column(pass_at_k(k=2), toy_batch(reward=[0, 0, 0.9])), [0, 0, 0])
    # k of 1 is the plain comparison, k beyond the group one set
    check(first_column(pass_at_k(k=1), toy_batch(reward=[1, 0, 0])), [1.4142, -0.7071, -0.7071])
    check(first_column(pass_at_k(k=9), toy_batch(reward=[1, 0, 0])), [0, 0, 0])
    check(first_column(pass_at_k(k=1, right=0.5), toy_batch(reward=[0.5, 0.4])), [1, -1])
    with pytest.raises(ValueError, match="k=0"):
        pass_at_k(k=0)


def test_a_discount_per_token_counts_trained_tokens_only(toy_batch):
    batch = toy_batch(
        turns=[[0, 0, -1, 1, -1, 2, 2]],
        rewards=[[0, 0, 0, 0, 0, 0, 1]],
        truncated=[True],  # there is no critic whose value could follow
    )
    want = [[0.6561, 0.729, 0, 0.81, 0, 0.9, 1]]
    check(discounted(gamma=0.9, per="token")(batch.zeros(), batch), want)
    with pytest.raises(ValueError, match="'token' or 'turn'"):
        discounted(per="leaf")


def test_whitening_counts_tokens_turns_or_leaves(toy_batch):
    batch = toy_batch(turns=[[0, 0, 0], [0, -1, 1]], reward=[0, 0])
    given = torch.tensor([[1.0, 1, 1], [0, 9, 0]])
    check(whiten()(given, batch), [[0.8165] * 3, [-1.2247, 0, -1.2247]])  # 1 1 1 0 0
    check(whiten(per="turn")(given, batch), [[1.4142] * 3, [-0.7071, 0, -0.7071]])  # 1 0 0
    check(whiten(per="leaf")(given, batch), [[1] * 3, [-1, 0, -1]])  # 1 0
    check(whiten(per="leaf", unbiased=True)(given, batch), [[0.7071] * 3, [-0.7071, 0, -0.7071]])
    assert torch.equal(whiten(per="turn")(given, batch), rebn()(given, batch))
    with pytest.raises(ValueError, match="'leaf'"):
        whiten(per="row")


def test_treerpo_compares_a_segment_with_its_siblings(toy_batch):
    batch = toy_batch(reward=[1, 0, 0], spans=[[7, 8], [7, 9], [5, 5]])
    check(treerpo()(batch.zeros(), batch), [[1, 1], [1, -1], [-1, -1]])
    plain = treerpo(scale=False)(batch.zeros(), batch)
    check(plain, [[0.25, 0.5], [0.25, -0.5], [-0.25, -0.25]])
    unbiased = treerpo(unbiased=True)(batch.zeros(), batch)
    check(unbiased[1:], [[0.7071, -0.7071], [-0.7071, -0.7071]])


def test_treerpo_passes_over_turns_and_contexts_in_which_nothing_forks(toy_batch):
    """Leaf 3 has two rows: the second continues its segment. An observation lies between."""
    batch = toy_batch(
        reward=[1, 1, 0, 0.5],
        leaf=[3, 3, 4, 5],
        turns=[[0, -1, 1], [-1, 2, 2], [0, -1, 1], [0, -1, 1]],
        spans=[[1, 2, 3], [4, 5, 5], [1, 2, 6], [7, 8, 9]],
    )
    # at the prompt: values 0.5 and 0.5; behind the observation: 1 and 0
    check(treerpo()(batch.zeros(), batch), [[0, 0, 1], [0, 1, 1], [0, 0, -1], [0, 0, 0]])


def test_treerpo_forks_twice_and_keeps_groups_apart(toy_batch):
    batch = toy_batch(
        reward=[1, 0, 0, 5, 3],
        group=[0, 0, 0, 1, 1],
        spans=[[1, 2, 3], [1, 2, 4], [1, 5, 5], [6, 6, 6], [7, 7, 7]],
    )
    want = [[1 / 3, 0.25, 0.5], [1 / 3, 0.25, -0.5], [1 / 3, -0.25, -0.25], [1] * 3, [-1] * 3]
    check(treerpo(scale=False)(batch.zeros(), batch), want)


def test_treerpo_without_shared_spans_is_grpo(toy_batch):
    batch = toy_batch(
        reward=[1, 0, 0.5, 2], group=[0, 0, 0, 1], mask=[[1, 0], [1, 1], [0, 1], [1, 1]]
    )
    want = grpo()(batch.zeros(), batch)
    torch.testing.assert_close(treerpo()(batch.zeros(), batch), want, atol=1e-6, rtol=0)


def test_the_sum_of_treerpo_along_a_path_is_the_leafs_distance_from_the_root(toy_batch):
    """Without scaling the differences telescope in a tree of equal forks: r - the mean of all leaves."""
    batch = toy_batch(reward=[1, 0, 0, 4], spans=[[1, 3], [1, 4], [2, 5], [2, 6]])
    adv_NT = treerpo(scale=False)(batch.zeros(), batch)
    check(adv_NT.sum(1), [1 - 1.25, -1.25, -1.25, 4 - 1.25])
    # and on the shared spans it is what share_over_spans makes of dr_grpo
    shared = share_over_spans()(grpo(scale=False)(batch.zeros(), batch), batch)
    check(adv_NT[:, 0], shared[:, 0].tolist())


def test_gdpo_compares_each_reward_by_itself(toy_batch):
    batch = toy_batch(reward=[1, 0.1, 0]).replace(
        part_rewards=torch.tensor([[1.0, 0.0], [0.0, 0.1], [0.0, 0.0]]),
        part_weights=torch.ones(3, 2),
    )
    check(first_column(gdpo(), batch), [0.7071, 0.7071, -1.4142])
    check(first_column(grpo(), batch), [1.4084, -0.5930, -0.8154])
    half = batch.replace(
        reward=torch.tensor([1, 0.05, 0]), part_weights=torch.tensor([[1, 0.5]] * 3)
    )
    check(first_column(gdpo(), half), [1.0607, 0, -1.0607])
    check(
        first_column(gdpo(scale=False), batch), [2 / 3 - 1 / 30, -1 / 3 + 2 / 30, -1 / 3 - 1 / 30]
    )


def test_gdpo_leaves_out_rewards_that_a_leaf_does_not_have_and_adds_what_a_shaping_did(toy_batch):
    batch = toy_batch(reward=[1, 0, 4, 2], group=[0, 0, 1, 1]).replace(
        part_rewards=torch.tensor([[1.0, NAN], [0, NAN], [NAN, 4], [NAN, 2]]),
        part_weights=torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]]),
    )
    check(first_column(gdpo(), batch), [1, -1, 1, -1])
    penalised = batch.replace(reward=torch.tensor([0.5, 0, 4, 2]))  # -0.5 of the first
    check(first_column(gdpo(), penalised), [0, 0, 1, -1])


def test_gdpo_says_what_it_lacks(toy_batch):
    batch = toy_batch(reward=[1, 0])
    with pytest.raises(ValueError, match=r"give task\.reward a list"):
        gdpo()(batch.zeros(), batch)


def test_gigpo_compares_turns_that_begin_in_the_same_state(toy_batch):
    batch = toy_batch(
        reward=[1, 0],
        turns=[[0, 0, 1], [0, 1, 1]],
        rewards=[[0, 0, 1], [0, 0, 0]],
        states=[[5, 5, 6], [5, 7, 7]],
    )
    got = gigpo(gamma=0.5, scale=False)(batch.zeros(), batch)
    check(got, [[0.75, 0.75, 0.5], [-0.75, -0.5, -0.5]])
    scaled = gigpo(gamma=0.5, weight=2.0)(batch.zeros(), batch)  # 1 +- 2 in state 5, 1 elsewhere
    check(scaled, [[3, 3, 1], [-3, -1, -1]])


def test_gigpo_keeps_tasks_apart_and_knows_a_state_that_an_attempt_meets_twice(toy_batch):
    batch = toy_batch(
        reward=[1, 1],
        group=[0, 1],
        turns=[[0, 1, 2], [0, 1, 2]],
        rewards=[[0, 0, 1], [0, 0, 1]],
        states=[[5, 6, 5], [5, -1, -1]],  # -1: unknown, compared with nothing
    )
    got = gigpo(gamma=0.5, scale=False)(batch.zeros(), batch)
    check(got, [[1 - 0.375, 1, 1 + 0.375], [1, 1, 1]])  # returns 0.25 and 1 in state 5


def test_gigpo_says_what_it_lacks(toy_batch):
    batch = toy_batch(reward=[1, 0], states=[[-1, -1]] * 2)
    with pytest.raises(ValueError, match=r'give info\["state"\]'):
        gigpo()(batch.zeros(), batch)


def test_remax_compares_with_the_greedy_attempt(toy_batch):
    batch = toy_batch(reward=[1, 0, 0], mask=[[1, 1], [0, 1], [1, 0]])
    greedy = batch.replace(greedy_reward=torch.tensor([1.0, 1.0, NAN]))
    check(remax()(batch.zeros(), greedy), [[0, 0], [0, -1], [0, 0]])
    with pytest.raises(ValueError, match=r"rollout\.branch=greedy_baseline"):
        remax()(batch.zeros(), batch)


def test_rae_subtracts_the_running_mean_of_the_role(toy_batch):
    """Leaf 0 has two rows and counts once."""
    batch = toy_batch(reward=[1, 1, 0, 4], leaf=[0, 0, 1, 2], role=[7, 7, 7, 9])
    rae = RoleBaseline(decay=0.5)
    check(first_column(rae, batch), [1, 1, 0, 4])
    check(first_column(rae, batch), [1, 1, 0, 4])  # a call changes nothing
    rae.settle(batch)
    assert rae.baselines == {7: 0.375, 9: 2.0}
    check(first_column(rae, batch), [0.625, 0.625, -0.375, 2])
    again = RoleBaseline(decay=0.5)
    again.restore(json.loads(json.dumps(rae.state)))
    assert again.baselines == rae.baselines
    with pytest.raises(ValueError, match="decay=1"):
        RoleBaseline(decay=1)


def test_a_chain_finds_the_credits_with_state_behind_their_checks():
    rae = make("rae", CREDITS, "credit")
    both = chain(rae, whiten())
    assert [type(one) for one in both.stateful] == [RoleBaseline]
    assert both.stateful[0] is both.stateful[0]
    assert chain(make("optimal_token_baseline", CREDITS, "credit")).needs == {"collisions"}
    assert chain(grpo()).stateful == [] and chain(grpo()).needs == set()


def test_the_optimal_token_baseline_by_hand(toy_batch):
    """p 0.5 and 0.75 of two tokens: W 0.5 and 0.125, B = 0.8; then one leaf goes on alone."""
    batch = toy_batch(
        reward=[1, 0],
        mask=[[1, 0, 1], [0, 1, 0]],
        rewards=[[0, 0, 1], [0, 0, 0]],
        logprobs=[[math.log(0.5), 0, math.log(0.5)], [0, math.log(0.75), 0]],
        collisions=[[0.5, 9, 0.5], [9, 0.625, 9]],
    )
    check(optimal_token_baseline()(batch.zeros(), batch), [[0.2, 0, 1], [0, -0.8, 0]])
    # the learner's p differs from the engine's by a factor of 3, of which 2 are kept: W 2 and 0.125
    other = batch.replace(old_logprobs=batch.logprobs)
    other = other.replace(logprobs=batch.logprobs - torch.tensor([[math.log(3)], [0.0]]))
    got = optimal_token_baseline(cap=2.0)(batch.zeros(), other)
    check(got, [[1 - 2 / 2.125, 0, 1], [0, -2 / 2.125, 0]])
    with pytest.raises(ValueError, match=r"sums of p\^2"):
        optimal_token_baseline()(batch.zeros(), batch.replace(collisions=None))


def test_the_page_has_every_credit():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text("utf-8")
    assert [name for name in CREDITS if f"`{name}`" not in page] == []

"""The same advantages as from verl's estimators and TRL's GRPOTrainer, on 200 random ragged batches each.

verl has one row per attempt and its reward on the last token; groups of one are in the batches, where
both sides keep the reward.
"""

from __future__ import annotations

import inspect
import textwrap
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from graft.algos.credits.baselines import remax
from graft.algos.credits.best_of_k import grpo_passk
from graft.algos.credits.credit import chain
from graft.algos.credits.critic import gae, gae_returns
from graft.algos.credits.groups import dr_grpo, gpg, grpo, opo, rloo
from graft.algos.credits.parts import gdpo
from graft.algos.credits.returns import discounted
from graft.algos.credits.scaling import whiten
from graft.algos.credits.token_baseline import optimal_token_baseline

pytestmark = [pytest.mark.peer, pytest.mark.slow]  # importing either takes seconds
TIMES = 200


def draw(toy_batch, seed, *, gaps=True, least_group=1):
    """A batch of 2 to 12 rows in groups, with observations between the policy's tokens where `gaps`."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(least_group, 5, size=rng.integers(1, 4))
    rows, columns = int(sizes.sum()), int(rng.integers(2, 9))
    group = np.repeat(np.arange(len(sizes)), sizes)
    length = rng.integers(1, columns + 1, size=rows)
    mask = np.arange(columns) < length[:, None]
    if gaps:
        mask &= rng.random(mask.shape) < 0.7
    mask[np.arange(rows), length - 1] = True
    reward = rng.choice([0, 0, 1, 0.5, -0.25], size=rows).astype(np.float32)
    rewards = np.zeros(mask.shape, np.float32)
    rewards[np.arange(rows), length - 1] = reward
    logp = np.log(rng.uniform(0.05, 0.95, size=mask.shape)).astype(np.float32)
    parts = rng.choice([0.0, 1.0, 0.3], size=(rows, 2)).astype(np.float32)
    batch = toy_batch(
        mask=torch.from_numpy(mask),
        turns=torch.from_numpy(np.where(mask, 0, -1)),
        rewards=torch.from_numpy(rewards),
        reward=torch.from_numpy(reward),
        group=torch.from_numpy(group),
        values=torch.from_numpy(rng.normal(size=mask.shape).astype(np.float32)),
        old_logprobs=torch.from_numpy(logp),
        logprobs=torch.from_numpy(logp + rng.normal(size=mask.shape).astype(np.float32) / 5),
    )
    p = np.exp(logp)
    collisions = p**2 + (1 - p) ** 2 * rng.random(
        size=mask.shape
    )  # between one other token and many
    batch = batch.replace(
        greedy_reward=torch.from_numpy(rng.choice([0, 1.0], size=rows).astype(np.float32)),
        collisions=torch.from_numpy(collisions.astype(np.float32)),
    )
    return batch, parts


def with_parts(batch, parts, weights):
    parts = torch.from_numpy(parts)
    weights = torch.tensor(weights)
    return batch.replace(
        part_rewards=parts,
        part_weights=weights.expand_as(parts).clone(),
        reward=(parts * weights).sum(1),
    )


def of_verl(batch):
    """The first three arguments of most estimators."""
    return batch.rewards.clone(), batch.mask.float(), batch.group.numpy()


def settings(**given):
    return SimpleNamespace(**given, get=lambda name, default=None: given.get(name, default))


def over_tokens(unbiased_credit):
    """verl's whitening: over tokens, with n - 1, and 1e-8 in the root."""
    return chain(unbiased_credit, whiten(unbiased=True, eps=0.0))


CASES: dict[str, Any] = {
    "grpo": (grpo(unbiased=True), lambda v, b: v.compute_grpo_outcome_advantage(*of_verl(b))),
    "grpo_vectorized": (
        grpo(unbiased=True),
        lambda v, b: v.compute_grpo_vectorized_outcome_advantage(*of_verl(b)),
    ),
    "grpo without std": (
        dr_grpo(),
        lambda v, b: v.compute_grpo_outcome_advantage(*of_verl(b), norm_adv_by_std_in_grpo=False),
    ),
    "rloo": (rloo(), lambda v, b: v.compute_rloo_outcome_advantage(*of_verl(b))),
    "opo": (opo(), lambda v, b: v.compute_opo_outcome_advantage(*of_verl(b))),
    "gpg": (gpg(valid="rewards"), lambda v, b: v.compute_gpg_outcome_advantage(*of_verl(b))),
    "grpo_passk": (
        grpo_passk(),
        lambda v, b: v.compute_grpo_passk_outcome_advantage(*of_verl(b), config=settings()),
    ),
    "grpo_passk without std": (
        grpo_passk(scale=False),
        lambda v, b: v.compute_grpo_passk_outcome_advantage(
            *of_verl(b), config=settings(norm_adv_by_std_in_grpo=False)
        ),
    ),
    "reinforce_plus_plus": (
        over_tokens(discounted(gamma=0.9, per="token")),
        lambda v, b: v.compute_reinforce_plus_plus_outcome_advantage(
            *of_verl(b)[:2], config=settings(gamma=0.9)
        ),
    ),
    "reinforce_plus_plus_baseline": (
        over_tokens(dr_grpo()),
        lambda v, b: v.compute_reinforce_plus_plus_baseline_outcome_advantage(*of_verl(b)),
    ),
    "remax": (
        remax(),
        lambda v, b: v.compute_remax_outcome_advantage(
            b.rewards.clone(), b.greedy_reward, b.mask.float()
        ),
    ),
    "gae": (
        over_tokens(gae(gamma=0.97, lam=0.9)),
        lambda v, b: v.compute_gae_advantage_return(
            b.rewards.clone(), b.values, b.mask.float(), 0.97, 0.9
        ),
    ),
    "gae_returns": (
        chain(gae_returns(gamma=0.97, lam=0.9)),
        lambda v, b: v.compute_gae_advantage_return(
            b.rewards.clone(), b.values, b.mask.float(), 0.97, 0.9
        )[::-1],
    ),
    "tir_optimal_token_baseline": (
        optimal_token_baseline(),
        lambda v, b: v.compute_multi_turn_optimal_token_baseline_advantage(
            *of_verl(b), b.old_logprobs, b.collisions
        ),
    ),
    "tir_optimal_token_baseline with weights": (
        optimal_token_baseline(cap=1.1),
        lambda v, b: v.compute_multi_turn_optimal_token_baseline_advantage(
            *of_verl(b),
            b.old_logprobs,
            b.collisions,
            rollout_is_weights=(b.old_logprobs - b.logprobs).exp().clamp(max=1.1),
        ),
    ),
    # in one turn the two are the same
    "optimal_token_baseline": (
        optimal_token_baseline(),
        lambda v, b: v.compute_optimal_token_baseline_advantage(
            *of_verl(b), b.old_logprobs, b.collisions
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_advantages_are_verls(toy_batch, verl, name):
    credit, estimate = CASES[name]
    is_whitened = name in (
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "gae",
        "gae_returns",
    )
    for seed in range(TIMES):
        gaps = name != "optimal_token_baseline"
        batch, _ = draw(toy_batch, seed, gaps=gaps, least_group=2 if "passk" in name else 1)
        if is_whitened and flat(credit, batch):
            continue  # verl divides by the root of 1e-8
        got = credit(batch.zeros(), batch)
        want = estimate(verl, batch)[0] * batch.mask
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def flat(credit, batch):
    """verl refuses a single token."""
    before = credit.credits[0](batch.zeros(), batch)[batch.mask]
    return len(before) < 2 or float(before.std()) < 1e-3


@pytest.mark.parametrize("weights", [None, [1.0, 0.2]])
def test_gdpo_is_verls(toy_batch, verl, weights):
    credit = over_tokens(gdpo(unbiased=True))
    compared = 0
    for seed in range(TIMES):
        batch, parts = draw(toy_batch, seed)
        batch = with_parts(batch, parts, weights or [1.0, 1.0])
        if flat(credit, batch):
            continue
        compared += 1
        columns = batch.mask.shape[1]
        # the last policy token is where verl finds the end of the attention mask
        ends = torch.arange(columns) <= batch.mask.long().cumsum(1).argmax(1)[:, None]
        want, _ = verl.compute_gdpo_outcome_advantage(
            *of_verl(batch),
            config=settings(gdpo_reward_keys=["a", "b"], gdpo_reward_weights=weights),
            non_tensor_batch={"a": parts[:, 0], "b": parts[:, 1]},
            batch={"prompts": torch.zeros(len(parts), 0), "attention_mask": ends.long()},
        )
        got = credit(batch.zeros(), batch)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert compared > TIMES / 2


@pytest.fixture(scope="module")
def trl_advantages():
    """The lines of TRL's trainer from the rewards of each function to the advantages, as a function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    source = inspect.getsource(trainer.GRPOTrainer._generate_and_score_completions)
    start = source.index("        unscorable_mask = ")
    end = source.index("        advantages = torch.nan_to_num")
    head = "def advantages_of(self, rewards_per_func, num_generations, device):\n"
    code = (
        head
        + textwrap.indent(textwrap.dedent(source[start:end]), "    ")
        + "\n    return advantages"
    )
    found: dict[str, Any] = {}
    exec(code, vars(trainer) | found, found)
    return found["advantages_of"]


@pytest.mark.parametrize(
    ("settings_of_trl", "credit"),
    [
        ({"scale_rewards": "group"}, grpo(unbiased=True, eps=1e-4)),
        ({"scale_rewards": "batch"}, grpo("batch", unbiased=True, eps=1e-4)),
        ({"scale_rewards": "none"}, dr_grpo()),
        (
            {"multi_objective_aggregation": "normalize_then_sum"},
            chain(gdpo(unbiased=True, eps=1e-4), whiten("leaf", unbiased=True, eps=1e-4)),
        ),
    ],
)
def test_advantages_are_trls(toy_batch, trl_advantages, settings_of_trl, credit):
    generations, groups = 4, 3
    for seed in range(TIMES):
        rng = np.random.default_rng(seed)
        parts = rng.choice([0.0, 1.0, 0.3], size=(generations * groups, 2)).astype(np.float32)
        weights = [1.0, 0.4]
        batch = with_parts(
            toy_batch(reward=np.zeros(len(parts)), group=np.repeat(np.arange(groups), generations)),
            parts,
            weights,
        )
        trainer = SimpleNamespace(
            **{"multi_objective_aggregation": "sum_then_normalize", **settings_of_trl},
            reward_weights=torch.tensor(weights),
            reward_funcs=[0, 1],
        )
        want = trl_advantages(trainer, torch.from_numpy(parts), generations, "cpu")
        got = credit(batch.zeros(), batch)
        torch.testing.assert_close(got, want[:, None].expand_as(got), atol=1e-4, rtol=1e-4)

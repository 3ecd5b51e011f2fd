"""What the learner adds to a policy loss: observations, a moving reference, ratios to the engine, weights."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graft.algos.losses.plain import reinforce
from graft.algos.losses.terms import with_kl
from graft.algos.presets import PRESETS, algorithm_of, build, needs_old_logprobs, prepare_of
from graft.algos.reductions import token
from graft.config import ConfigError, check
from graft.models.decoder import Decoder, causal
from graft.models.lora.training import Lora
from graft.models.shape import ModelShape
from graft.replay.replay import replay
from graft.rollout.batching import to_batch, trajectories_of
from graft.train.algorithm import preset_of
from graft.train.learner import Learner
from graft.train.optimizer import Optimizer, schedule
from graft.train.reference_sync import sync_reference
from graft.types import Author
from tests.training import metrics_of, train_recipe
from tests.trees import random_tree

SHAPE = ModelShape(vocab_size=30, width=32, layers=2, heads=4, kv_heads=2, head_dim=16, ff=48)


def learner_of(loss=None, tokens_per_micro=10_000, module=None, **more) -> Learner:
    policy = more.pop("policy", None) or Decoder(SHAPE).initialise(1)
    optimizer = Optimizer([module or policy], lr=1e-2, schedule=schedule("constant", 0, 1, 0.0))
    return Learner(policy, optimizer, loss or reinforce(), token(), tokens_per_micro, **more)


def random_batch():
    batch = to_batch(trajectories_of([random_tree(seed) for seed in (1, 2, 3, 7)]))
    return batch.replace(advantages=torch.where(batch.mask, 0.5, 0.0))


def gradients_of(learner: Learner, batch):
    taken = {}

    def record() -> dict[str, float]:
        taken.update({n: p.grad.clone() for n, p in learner.policy.named_parameters()})
        learner.discard()
        return {}

    learner.optimizer.step = record  # type: ignore[method-assign]
    return taken, learner.update(batch)


def plainly(policy: Decoder, rows, coef: float) -> tuple[torch.Tensor, float]:
    """-A log p over trained tokens, and coef times the cross-entropy of observations, each row by itself."""
    trained, observed = [], []
    for row in rows:
        tokens = torch.tensor(row.tokens)
        hidden = policy(tokens, torch.arange(len(tokens)), causal)
        logp = policy.logits(hidden).log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        at = 0
        for span in row.spans:
            own = logp[max(at - 1, 0) : at + len(span) - 1]
            at += len(span)
            if span.author is Author.POLICY:
                trained.append(own)
            elif span.author is Author.ENV:
                observed.append(own)
    surprise = -torch.cat(observed).mean()
    return -0.5 * torch.cat(trained).mean() + coef * surprise, surprise.item()


def test_observations_are_learned_as_in_separate_rows_in_any_micro_batches():
    """Shared observations of the trees are computed once; their gradient is that of every row."""
    batch = random_batch()
    assert batch.observed is not None and batch.observed.any()
    assert not (batch.observed & batch.mask).any()
    plain = Decoder(SHAPE).initialise(1)
    loss, surprise = plainly(plain, batch.trajectories, coef=0.3)
    loss.backward()
    for budget in (10_000, 25, 1):
        learner = learner_of(tokens_per_micro=budget, observation_coef=0.3)
        grads, metrics = gradients_of(learner, batch)
        assert metrics["loss/observations"] == pytest.approx(surprise, rel=1e-5)
        for name, weight in plain.named_parameters():
            torch.testing.assert_close(grads[name], weight.grad, atol=1e-5, rtol=1e-4)
    without, metrics = gradients_of(learner_of(), batch)
    assert "loss/observations" not in metrics
    assert any((without[name] - grads[name]).abs().max() > 1e-3 for name in grads)


def test_a_batch_without_observations_is_trained_as_ever():
    batch = random_batch()
    none = batch.replace(observed=torch.zeros_like(batch.mask))
    grads, metrics = gradients_of(learner_of(observation_coef=0.3), none)
    want, _ = gradients_of(learner_of(), batch)
    assert metrics["loss/observations"] == 0
    for name, grad in want.items():
        torch.testing.assert_close(grads[name], grad)


def test_ratios_to_the_engine_need_no_pass_and_the_others_one():
    batch = random_batch()
    learner = learner_of(epochs=2)
    own = learner.annotate(batch).old_logprobs
    engine = replace(learner, old_is_engine=True)
    assert engine.annotate(batch).old_logprobs is batch.logprobs
    assert (own - batch.logprobs)[batch.mask].abs().max() > 0.1
    once = replace(learner, epochs=1)
    assert once.annotate(batch).old_logprobs is None
    needed = replace(once, needs_old=True).annotate(batch).old_logprobs
    torch.testing.assert_close(needed, own)


def is_share(policy: Decoder, reference: Decoder, before: dict, share: float) -> None:
    for name, weight in reference.named_parameters():
        want = share * policy.get_parameter(name)[: len(weight)] + (1 - share) * before[name]
        torch.testing.assert_close(weight, want)


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_the_reference_follows_the_policy_every_few_steps(share):
    policy, reference = Decoder(SHAPE).initialise(1), Decoder(SHAPE).initialise(2)
    learner = learner_of(policy=policy, reference=reference, reference_sync=(3, share))
    before = copy.deepcopy(dict(reference.named_parameters()))
    for step in (1, 2, 4):
        sync_reference(learner, step)
        is_share(policy, reference, before, 0.0)
    assert not learner.reference_moved
    sync_reference(learner, 3)
    is_share(policy, reference, before, share)
    assert learner.reference_moved


def test_a_reference_has_no_rows_for_actions_and_a_policy_keeps_its_own():
    policy = Decoder(replace(SHAPE, extra=64)).initialise(1)
    reference = Decoder(SHAPE).initialise(2)
    more = {"allowed": torch.ones(1, 94, dtype=torch.bool), "reference_sync": (1, 0.5)}
    learner = learner_of(policy=policy, reference=reference, **more)
    before = copy.deepcopy(dict(reference.named_parameters()))
    sync_reference(learner, 1)
    is_share(policy, reference, before, 0.5)


def test_adapters_of_the_reference_follow_too():
    policy = Decoder(SHAPE).initialise(1)
    lora = Lora(policy, rank=2, alpha=4, targets=["q_proj"])
    learner = learner_of(policy=policy, module=lora, lora=lora, anchor=lora.snapshot())
    learner.reference_sync = (2, 1.0)
    with torch.no_grad():
        lora.up[0].fill_(0.3)
    sync_reference(learner, 1)
    assert not any(torch.equal(value, lora.up[0]) for value in learner.anchor.values())
    sync_reference(learner, 2)
    assert any(torch.equal(value, lora.up[0]) for value in learner.anchor.values())


HALF_OF_THE_GROUPS = ("reject", {"level": "group", "by": "k2", "high": 6.15})


@pytest.mark.parametrize(
    ("loss", "weights"),
    [
        ("clip_cov", ("top_entropy",)),
        ("kl_cov", (HALF_OF_THE_GROUPS,)),
        ("clip", (HALF_OF_THE_GROUPS, ("importance", {"normalise": True}))),
    ],
)
def test_choices_over_the_batch_do_not_depend_on_micro_batches(loss, weights):
    batch = random_batch()
    preset = replace(PRESETS["grpo"], loss=loss, weights=weights, reduction="token")
    more = {"needs_old": needs_old_logprobs(preset), "epochs": 2}
    learners = [learner_of(build(preset)[2], budget, **more) for budget in (10_000, 25)]
    generator = torch.Generator().manual_seed(0)
    adv = torch.randn(batch.mask.shape, generator=generator) * batch.mask
    entropies = torch.rand(batch.mask.shape, generator=generator)
    batch = learners[0].annotate(batch.replace(advantages=adv, entropies=entropies))
    batch = prepare_of(preset)(batch)
    whole, parts = (learner.update(batch) for learner in learners)
    assert whole == pytest.approx(parts, rel=1e-4, abs=1e-5)
    assert whole["grad_norm"] > 0
    for a, b in zip(*(one.policy.parameters() for one in learners), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)


def recipe(**sections):
    values = {
        "model": {"shape": {"width": 16, "layers": 1, "heads": 2, "head_dim": 8, "ff": 16}},
        "task": {"env": "calculator"},
    }
    return check({**values, **sections})


def test_a_recipe_sets_every_term():
    preset = preset_of(
        recipe(
            algo={
                "name": "grpo",
                "loss": {"dppo": {"divergence": "kl"}},
                "weights": ["off_policy_rows", {"importance": {"level": "geometric"}}],
                "old_policy": "engine",
                "kl_coef": 0.02,
                "kl_kind": "k3+",
                "kl_corrected": True,
                "kl_control": {"target": 0.1},
                "entropy_control": {"target": 0.5},
                "reference_sync": [4, 0.6],
                "observation_coef": 0.05,
            }
        )
    )
    assert preset.weights == ("off_policy_rows", ("importance", {"level": "geometric"}))
    assert (preset.old_policy, preset.kl_kind, preset.kl_corrected) == ("engine", "k3+", True)
    assert (preset.reference_sync, preset.observation_coef) == ((4, 0.6), 0.05)
    algo = algorithm_of(preset, lambda builder: builder)
    assert algo.state["coefficients"] == {
        "kl": {"value": 0.02},
        "entropy": {"value": 0.0, "entropy": None},
    }
    kept = preset_of(recipe(algo={"name": "icepop"}))
    assert kept.weights == PRESETS["icepop"].weights and kept.old_policy == "learner"
    assert preset_of(recipe(algo={"name": "icepop", "weights": []})).weights == ()


@pytest.mark.parametrize(
    ("algo", "capped"),
    [
        ({"name": "grpo"}, True),
        ({"name": "grpo", "old_policy": "engine"}, False),
        ({"name": "icepop"}, False),
        ({"name": "vespo"}, False),
        ({"name": "grpo", "weights": ["off_policy_rows"]}, True),
    ],
)
def test_stale_tokens_get_a_cap_where_nothing_else_corrects_them(algo, capped):
    preset = preset_of(recipe(algo=algo, rollout={"staleness": 1}))
    assert (preset.importance_cap == 2.0) == capped


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"algo": {"kl_control": {"target": 0.1}}}, "algo.kl_coef is 0"),
        ({"algo": {"reference_sync": [8, 1.0]}}, "there is none"),
        ({"algo": {"old_policy": "engine", "importance_cap": 2.0}}, "importance_cap=2"),
        (
            {
                "algo": {"kl_coef": 0.1, "reference_sync": [8, 0.5]},
                "lora": {"rank": 2},
                "model": {"path": "somewhere"},
            },
            "[8, 1]",
        ),
        ({"algo": {"name": "echo"}, "actions": {"file": "compact"}}, "actions.file"),
        ({"algo": {"name": "dr_grpo", "critic_lr": 1e-3}}, "trains none"),
        ({"algo": {"name": "ppo", "credit": ["grpo"]}}, "does not read its values"),
        ({"algo": {"credit": ["gae"]}}, "algo.name=ppo"),
        ({"algo": {"credit": ["whiten"]}}, "there are none yet"),
        ({"algo": {"credit": ["rebn", "grpo"]}}, "begins with 'rebn'"),
        ({"algo": {"credit": ["grpo", "discounted"]}}, "replaces those of 'grpo'"),
        ({"algo": {"name": "gkd", "credit": ["grpo"]}}, "'distillation' reads none"),
        ({"algo": {"name": "opd", "kl_coef": 0.1, "kl_in": "reward"}}, "changes rewards"),
        ({"algo": {"name": "opd", "overlong": [8, 2]}}, "changes rewards"),
        ({"algo": {"kl_kind": "k1"}}, "set algo.kl_coef"),
        ({"algo": {"name": "pass_at_k"}, "rollout": {"samples": 4}}, "above 4"),
        (
            {"algo": {"name": "gdpo"}, "task": {"env": "calculator", "reward": ["exact"]}},
            "per part",
        ),
        ({"algo": {"credit": [3]}}, "algo.credit has 3"),
        ({"algo": {"name": "echo"}, "rollout": {"top_p": 0.9}}, "whole distributions"),
    ],
)
def test_combinations_without_a_meaning_are_refused(sections, words):
    with pytest.raises(ConfigError) as caught:
        preset_of(recipe(**sections))
    assert words in str(caught.value)


def test_a_kl_in_the_rewards_moves_its_coefficient_too():
    kl = {"kl_coef": 0.1, "kl_in": "reward", "kl_kind": "k1"}
    preset = preset_of(recipe(algo={**kl, "kl_control": {"target": 0.1, "horizon": 2}}))
    algo = algorithm_of(preset, lambda builder: builder)
    batch = random_batch()
    batch = batch.replace(ref_logprobs=batch.logprobs - 1.0)  # k1 = 1 on every token
    assert algo.shape(batch).reward[0] == batch.reward[0] - 0.1 * batch.lengths[0]
    assert algo.adapt(batch, {"entropy": 1.0}) == {"loss/kl_coef": 0.1}
    factor = 1 + 0.2 * batch.num_rows / 2
    assert algo.state["coefficients"]["kl"]["value"] == pytest.approx(0.1 * factor)
    assert algo.shape(batch).reward[0].item() == pytest.approx(
        float(batch.reward[0] - 0.1 * factor * batch.lengths[0]), rel=1e-5
    )


TINY = (
    "model.shape={family: qwen3, width: 16, layers: 1, heads: 2, kv_heads: 2, head_dim: 8, ff: 16, "
    "tied: false, rope_theta: 100.0, max_positions: 128}",
    "rollout.tasks=3",
    "rollout.samples=4",
    "rollout.max_context=96",
    "sft.steps=8",
    "sft.batch=8",
    "sft.warmup=0",
    "run.eval_tasks=0",
    "run.eval_every=0",
    "run.trackers=[]",
    "train.epochs=2",
    "train.lr=1e-2",
    "train.warmup=0",
)


def trained(folder: Path, *changes: str) -> list[dict]:
    train_recipe("quickstart", *TINY, f"run.dir={folder}", "run.name=a", *changes)
    return metrics_of(folder / "a", "rl")


EVERYTHING = (
    "algo.kl_coef=0.1",
    "algo.kl_control={target: 0.001, horizon: 24}",
    "algo.kl_kind=k3+",
    "algo.kl_corrected=true",
    "algo.entropy_control={target: 9.0}",
    "algo.reference_sync=[2, 0.5]",
    "algo.observation_coef=0.05",
    "algo.weights=[top_entropy, {importance: {normalise: true}}]",
    "run.save_every=1",
    "run.keep_last=9",
)


@pytest.mark.slow
def test_a_resumed_run_has_the_coefficients_and_the_reference_of_one_that_was_not(tmp_path):
    whole = trained(tmp_path / "whole", *EVERYTHING, "train.steps=5")
    for steps in (1, 3, 5):
        resumed = trained(tmp_path / "cut", *EVERYTHING, f"train.steps={steps}")
    assert resumed == whole
    coefs = [row["loss/kl_coef"] for row in whole]
    assert coefs[0] == 0.1 and len(set(coefs)) == 5
    assert [round(row["loss/entropy_coef"], 6) for row in whole[:3]] == [0.0, 0.005, 0.01]
    found = replay(tmp_path / "whole" / "a", 4, overrides=["algo.kl_coef=0.1"])
    assert found.first is None
    other = found.other
    assert other is not None and other.metrics["loss"] == found.metrics["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["sapo", "gmpo", "luspo", "vespo", "dppo", "clip_cov", "kl_cov", "top_entropy", "icepop",
     "deepseek_v32", "echo"],
)  # fmt: skip
def test_every_preset_trains_a_few_steps(tmp_path, name):
    rows = trained(tmp_path, f"algo.name={name}", "train.steps=2")
    assert len(rows) == 2
    assert all(row["grad_norm"] > 0 or row["frac_reward_zero_std"] == 1 for row in rows)
    expected = {
        "vespo": "loss/row_weight",
        "clip_cov": "loss/selected",
        "top_entropy": "weights/mean",
        "icepop": "sampling/importance_sampling_ratio/ess",
        "deepseek_v32": "weights/rejected",
        "echo": "loss/observations",
    }
    assert expected.get(name, "loss/policy") in rows[0]


def test_a_kl_needs_no_second_pass_of_the_ratio():
    """`corrected` without old log-probs: ratio 1, and the gradient of the ratio is added."""
    batch = random_batch()
    batch = batch.replace(ref_logprobs=batch.logprobs)
    logp = (batch.logprobs + 0.5).requires_grad_()
    zero = batch.replace(advantages=batch.zeros())
    loss, _ = with_kl(reinforce(), 1.0, "k1", corrected=True)(logp, batch.zeros(), zero)
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, torch.where(batch.mask, 1.5, 0.0))

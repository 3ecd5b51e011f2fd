"""The same numbers through TRL's GRPOTrainer: its loss, its gradient, its metrics.

Its `_compute_loss` is called as it stands, on a stand-in for the trainer that holds settings only
and returns our log-probs in place of a model's.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from graft.algos.credits.groups import grpo, rloo
from graft.algos.losses.clipped import cispo, clip
from graft.algos.losses.rows import gspo
from graft.algos.losses.terms import with_entropy, with_kl, with_weights
from graft.algos.masked import masked_mean
from graft.algos.reductions import constant, sequence, token
from graft.algos.weights import importance

pytestmark = [pytest.mark.peer, pytest.mark.slow]  # importing TRL alone takes seconds
ROWS, COLUMNS = 4, 6
RATIOS = [  # with advantages 1.2, -0.7, -1.5, 1.0 every bound of every case below is crossed
    [1.5, 1.24, 0.6, 1.0, 0.9, 1.35],
    [0.7, 0.75, 0.9, 1.0, 1.0, 1.0],
    [1.5, 1.25, 0.7, 1.1, 0.9, 1.0],
    [1.02, 1.0, 1.0, 1.0, 1.0, 1.0],
]


@pytest.fixture(scope="module")
def trl_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("trl.trainer.grpo_trainer")


@pytest.fixture
def numbers(toy_batch):
    generator = torch.Generator().manual_seed(3)

    def draw():
        return torch.rand(ROWS, COLUMNS, generator=generator)

    old = -2 * draw()
    logp = old + torch.tensor(RATIOS).log()
    mask = torch.arange(COLUMNS) < torch.tensor([6, 3, 5, 1])[:, None]
    adv_N = torch.tensor([1.2, -0.7, -1.5, 1.0])
    batch = toy_batch(
        mask=mask,
        advantages=adv_N[:, None].expand(ROWS, COLUMNS) * mask,
        old_logprobs=old,
        ref_logprobs=old + 0.6 * (draw() - 0.5),
        logprobs=old + 0.6 * (draw() - 0.5),
    )
    return batch, logp, draw(), adv_N


def trl_loss(trl_module, numbers, trainer_class=None, **settings):
    batch, logp, entropy, adv_N = numbers
    logp = logp.clone().requires_grad_()
    entropy = entropy.clone().requires_grad_()
    metrics = defaultdict(lambda: defaultdict(list))
    cap = settings.pop("cap", None)
    given = ("delta", "use_bias_correction_kl", "sapo_temperature_pos", "sapo_temperature_neg")
    args = SimpleNamespace(
        steps_per_generation=1,
        **{name: settings.pop(name, None) for name in given},
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
    )
    accelerator = SimpleNamespace(
        num_processes=1,
        sync_gradients=False,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        pad_across_processes=lambda x, **_: x,
        reduce=lambda x, reduction: x,
    )
    defaults = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "entropy_coef": 0.0,
        "max_completion_length": 16,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
    }
    options = {**defaults, **settings}
    trainer = SimpleNamespace(
        **options,
        args=args,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        use_vllm=cap is not None,
        vllm_importance_sampling_correction=cap is not None,
        _entropy_bonus_enabled=options["entropy_coef"] > 0,
        _metrics=metrics,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, entropy, None),
    )
    kind = trainer_class or trl_module.GRPOTrainer
    trainer.get_off_policy_mask, trainer.get_gamma_weights = (
        trl_module.GRPOTrainer.get_off_policy_mask,
        trl_module.GRPOTrainer.get_gamma_weights,
    )
    trainer.get_high_entropy_mask = partial(trl_module.GRPOTrainer.get_high_entropy_mask, trainer)
    ids = torch.zeros_like(logp, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": batch.mask.long(),
        "advantages": adv_N,
        "old_per_token_logps": batch.old_logprobs,
        "ref_per_token_logps": batch.ref_logprobs,
        "num_items_in_batch": batch.mask.sum().float(),
        "sampling_per_token_logps": batch.logprobs,
    }
    if cap is not None:
        inputs["importance_sampling_ratio"] = (
            (batch.old_logprobs - batch.logprobs).exp().clamp(max=cap)
        )
    loss = kind._compute_loss(trainer, None, inputs)
    loss.backward()
    logged = {key: values[-1] for key, values in metrics["train"].items()}
    return loss.detach(), logp.grad, entropy.grad, logged


def our_loss(loss, reduction, numbers):
    batch, logp, entropy, _ = numbers
    logp, entropy = logp.clone().requires_grad_(), entropy.clone().requires_grad_()
    loss_NT, metrics = loss(logp, entropy, batch)
    total = (loss_NT * reduction(batch)).sum()
    total.backward()
    logged = {key: masked_mean(metric, batch.mask).item() for key, metric in metrics.items()}
    return total.detach(), logp.grad, entropy.grad, logged


CASES = {
    "grpo": (clip(), sequence(), {}),
    "grpo with KL": (with_kl(clip(), 0.04), sequence(), {"beta": 0.04}),
    "bnpo": (clip(), token(), {"loss_type": "bnpo"}),
    "dr_grpo": (clip(), constant(16), {"loss_type": "dr_grpo"}),
    "dapo": (clip(0.2, 0.28), token(), {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dual clip": (clip(dual=1.3), token(), {"loss_type": "bnpo", "delta": 1.3}),
    "gspo": (
        gspo(0.05, 0.04),
        sequence(),
        {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.04},
    ),
    # TRL's epsilon_high for CISPO is the largest weight itself
    "cispo": (cispo(1.0, 0.3), token(), {"loss_type": "cispo", "epsilon_high": 1.3}),
    "importance": (
        with_kl(with_weights(clip(), [importance(cap=1.2)]), 0.1),
        token(),
        {"loss_type": "bnpo", "cap": 1.2, "beta": 0.1},
    ),
    # TRL means the entropy over tokens whatever the policy reduction is, so compare under `token`
    "entropy": (
        with_entropy(clip(), 0.03),
        token(),
        {"loss_type": "bnpo", "entropy_coef": 0.03},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_trl(trl_module, numbers, case):
    loss, reduction, settings = CASES[case]
    ours = our_loss(loss, reduction, numbers)
    theirs = trl_loss(trl_module, numbers, **settings)
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1])
    if theirs[2] is not None:
        torch.testing.assert_close(ours[2], theirs[2])
    assert ours[1].abs().sum() > 0


def far_apart(numbers):
    """Some tokens 25, 30 and 60 above their old and their reference log-prob, one 60 below."""
    batch, logp, entropy, adv_N = numbers
    drift = torch.zeros(ROWS, COLUMNS)
    drift[0, 0], drift[1, 1], drift[2, 0], drift[2, 1] = 25.0, 30.0, 60.0, -60.0
    moved = {"old_logprobs": batch.old_logprobs - drift, "ref_logprobs": logp - drift.clamp(min=0)}
    return batch.replace(**moved), logp, entropy, adv_N


def check_far_apart(ours, theirs):
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-5)
    assert (ours[1].abs() > 0).sum() >= 3


def test_gspo_equals_trl_where_tokens_have_drifted_far(trl_module, numbers):
    """Clipped at 1e5 only, so that the rows keep their gradient."""
    far = far_apart(numbers)
    settings = {"epsilon_low": 1.0, "epsilon_high": 1e5, "importance_sampling_level": "sequence"}
    theirs = trl_loss(trl_module, far, **settings)
    check_far_apart(our_loss(gspo(1.0, 1e5), sequence(), far), theirs)


def test_the_kl_equals_trl_where_tokens_have_drifted_far(trl_module, numbers):
    """Without advantages: single ratios are held at e^20 as in verl, where TRL lets them overflow."""
    batch, logp, entropy, adv_N = far_apart(numbers)
    batch = batch.replace(advantages=torch.zeros_like(logp), old_logprobs=logp)
    still = (batch, logp, entropy, torch.zeros_like(adv_N))
    theirs = trl_loss(trl_module, still, beta=0.04)
    check_far_apart(our_loss(with_kl(clip(), 0.04), sequence(), still), theirs)


@pytest.mark.parametrize("case", ["grpo", "grpo with KL", "dapo"])
def test_metrics_equal_trl(trl_module, numbers, case):
    loss, reduction, settings = CASES[case]
    ours = our_loss(loss, reduction, numbers)[3]
    theirs = trl_loss(trl_module, numbers, **settings)[3]
    shared = {"entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}
    shared |= {"kl"} if "kl" in ours else set()
    for key in shared:
        assert ours[key] == pytest.approx(theirs[key], abs=1e-6), key
    assert 0 < ours["clip_ratio/region_mean"] < 1


def test_advantages_follow_the_formula_trl_documents(toy_batch):
    """A = (r - mean) / (std + 1e-4) with the n - 1 std; RLOO against the mean of the others."""
    reward = torch.tensor([1.0, 0.0, 0.25, 0.5, 3.0, 3.0, 1.0, 0.0])
    batch = toy_batch(reward=reward, group=[0] * 4 + [1] * 4)
    grouped = reward.view(2, 4)
    mean, std = grouped.mean(1, keepdim=True), grouped.std(1, keepdim=True)
    got = grpo(unbiased=True, eps=1e-4)(batch.zeros(), batch)[:, 0]
    torch.testing.assert_close(got, ((grouped - mean) / (std + 1e-4)).flatten())
    others = (grouped.sum(1, keepdim=True) - grouped) / 3
    torch.testing.assert_close(rloo()(batch.zeros(), batch)[:, 0], (grouped - others).flatten())

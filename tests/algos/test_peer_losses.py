"""The same values and gradients as verl's losses, weights and KL and TRL's GRPO, on 200 random batches each.

Rows are ragged, with observations between the policy's tokens; every row has a trained token.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from graft.algos.coefficients import EntropyController, KlController
from graft.algos.kl import KL_KINDS, kl
from graft.algos.losses.clipped import cispo, clip, dppo, sapo
from graft.algos.losses.covariance import clip_cov, kl_cov
from graft.algos.losses.plain import dro, reinforce
from graft.algos.losses.rows import gmpo, gspo, luspo, vespo
from graft.algos.losses.terms import with_kl, with_weights
from graft.algos.presets import PRESETS
from graft.algos.reductions import sequence, token
from graft.algos.weights import importance, off_policy_rows, reject, top_entropy, whole_batch
from graft.models.decoder import Decoder
from graft.models.shape import ModelShape
from graft.train.learner import Learner
from graft.train.reference_sync import sync_reference
from tests.algos.conftest import make_batch, selected
from tests.algos.test_peer_trl import our_loss, trl_loss

pytestmark = [pytest.mark.peer, pytest.mark.slow]  # importing either takes seconds
TIMES = 200


@pytest.fixture(scope="module")
def actor(verl):
    """Makes verl's settings of an actor."""
    from verl.workers.config.actor import ActorConfig, PolicyLossConfig

    def make(**settings):
        ours = {key: settings.pop(key) for key in [*settings] if hasattr(PolicyLossConfig, key)}
        return ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            policy_loss=PolicyLossConfig(**ours),
            **settings,
        )

    return make


@pytest.fixture(scope="module")
def trl_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("trl.trainer.grpo_trainer")


def draw(seed: int, shift: float | None = None):
    """A batch, present log-probs, entropies and one advantage per row; `shift` moves all log-probs alike."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = 1 + seed % 5, 1 + seed // 5 % 7

    def uniform():
        return torch.rand(rows, columns, generator=generator)

    length = 1 + (torch.rand(rows, generator=generator) * columns).long()
    mask = (torch.arange(columns) < length[:, None]) & (uniform() < 0.8)
    mask[torch.arange(rows), length - 1] = True
    adv_N = torch.randn(rows, generator=generator) * (torch.rand(rows, generator=generator) > 0.1)
    old = (0.02 + 0.96 * uniform()).log()
    moved = 1.2 * (uniform() - 0.5) if shift is None else torch.full_like(old, shift)
    batch = make_batch(
        mask=mask,
        advantages=adv_N[:, None] * mask,
        old_logprobs=old,
        logprobs=old + uniform() - 0.5,
        ref_logprobs=old + 2 * (uniform() - 0.5),
        entropies=uniform(),
        group=torch.arange(rows) // 2,
    )
    return batch, (old + moved).clamp(max=-1e-3) if shift is None else old + moved, uniform(), adv_N


def check(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4)


VERL = {
    "vanilla": (clip(0.2, 0.3, dual=3.0), token(), {"clip_ratio_high": 0.3, "clip_ratio_c": 3.0}),
    "gspo": (gspo(0.1, 0.2), sequence(), {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}),
    "sapo": (sapo(1.0, 1.5), sequence(), {"tau_pos": 1.0, "tau_neg": 1.5}),
    "gpg": (reinforce(), token(), {}),
    "geo_mean": (gmpo(0.2, 0.3), sequence(), {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}),
    "dro": (dro(0.3), token(), {"dro_beta": 0.3}),
    "cispo": (cispo(0.2, 0.3), token(), {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}),
    "dppo_tv": (
        dppo("tv", 0.1, 0.15, cap=1.3),
        token(),
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 1.3},
    ),
    "dppo_kl": (
        dppo("kl", 0.02, 0.05, cap=1.3),
        token(),
        {"clip_ratio_low": 0.02, "clip_ratio_high": 0.05, "clip_ratio_c": 1.3},
    ),
    # all tokens between the bounds, since the draws among them differ
    "clip_cov": (
        clip_cov(share=1.0, low_cov=0.1, high_cov=0.8),
        token(),
        {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.8},
    ),
    "kl_cov": (kl_cov(share=0.3, coef=0.7), token(), {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7}),
}


@pytest.mark.parametrize("name", VERL)
def test_a_loss_equals_verl(verl, actor, name):
    """Covariances are verl's at the present log-probs and ours at the old ones: there all move alike."""
    loss, reduction, settings = VERL[name]
    config, moved = actor(**settings), 0
    mode = "token-mean" if reduction.__qualname__.startswith("token") else "seq-mean-token-mean"
    for seed in range(TIMES):
        batch, logp, entropy, adv_N = draw(seed, shift=0.1 if "cov" in name else None)
        if "cov" in name and batch.num_tokens == 2:
            continue  # their covariances are equal: rounding decides which is the larger
        ours = our_loss(loss, reduction, (selected(loss, batch), logp, entropy, adv_N))
        theirs = logp.clone().requires_grad_()
        mask = batch.mask.float()
        value, _ = verl.get_policy_loss_fn(name)(
            batch.old_logprobs, theirs, batch.advantages, mask, mode, config
        )
        value.backward()
        check(ours[0], value.detach())
        check(ours[1], theirs.grad)
        moved += int(ours[1].abs().sum() > 0)
    assert moved > 0.8 * TIMES


@pytest.mark.parametrize("kind", ["ppo_clip", "reinforce"])
def test_ratios_to_the_engine_equal_verls_bypass(verl, actor, kind):
    from omegaconf import OmegaConf

    config = actor()
    correction = {"loss_type": kind, "rollout_is": "token", "rollout_is_threshold": 1.3}
    config.policy_loss._mutable_fields = {"rollout_correction"}
    object.__setattr__(config.policy_loss, "rollout_correction", OmegaConf.create(correction))
    weighted = with_weights(reinforce(), [importance(cap=1.3, policy="current")])
    loss = clip(0.2, 0.2, dual=3.0) if kind == "ppo_clip" else weighted
    for seed in range(TIMES):
        batch, logp, entropy, adv_N = draw(seed)
        bypassed = batch.replace(old_logprobs=batch.logprobs)
        ours = our_loss(loss, token(), (bypassed, logp, entropy, adv_N))
        theirs = logp.clone().requires_grad_()
        value, _ = verl.compute_policy_loss_bypass_mode(
            batch.logprobs, theirs, batch.advantages, batch.mask.float(), "token-mean", config
        )
        value.backward()
        check(ours[0], value.detach())
        check(ours[1], theirs.grad)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("bounds", [1.2, "0.8_1.3"])
def test_importance_weights_equal_verl(verl, level, normalise, bounds):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    how = {"cap": bounds}
    if isinstance(bounds, str):
        floor, cap = map(float, bounds.split("_"))
        how = {"cap": cap, "floor": floor, "outside": "mask"}
    weight = importance(level=level, normalise=normalise, **how)
    for seed in range(TIMES):
        batch, logp, _, _ = draw(seed)
        gap, mask = batch.old_logprobs - batch.logprobs, batch.mask.float()
        ours, _ = weight(logp, batch)
        if not ours.any():
            continue  # verl divides by their sum
        theirs, _ = compute_rollout_correction_weights(gap, mask, level, bounds, normalise)
        check(ours, theirs)


@pytest.mark.parametrize(
    ("option", "how", "threshold"),
    [
        ("token_k1", {"level": "token", "by": "k1", "low": 0.8, "high": 1.3}, "0.8_1.3"),
        ("token_k1", {"level": "token", "by": "k1", "high": 1.3}, 1.3),
        ("token_k2", {"level": "token", "by": "k2", "high": 0.03}, 0.03),
        ("token_k3", {"level": "token", "by": "k3", "high": 0.03}, 0.03),
        ("seq_sum_k1", {"by": "k1", "of": "sum", "high": 1.5}, 1.5),
        ("seq_sum_k2", {"by": "k2", "of": "sum", "high": 0.1}, 0.1),
        ("seq_sum_k3", {"by": "k3", "of": "sum", "high": 0.1}, 0.1),
        ("seq_mean_k1", {"by": "k1", "low": 0.9, "high": 1.1}, "0.9_1.1"),
        ("seq_mean_k2", {"by": "k2", "high": 0.04}, 0.04),
        ("seq_mean_k3", {"by": "k3", "high": 0.04}, 0.04),
        ("seq_max_k2", {"by": "k2", "of": "max", "high": 0.07}, 0.07),
        ("seq_max_k3", {"by": "k3", "of": "max", "high": 0.07}, 0.07),
    ],
)
def test_what_is_rejected_equals_verl(verl, option, how, threshold):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    weight, kept, trained = reject(**how), 0.0, 0.0
    for seed in range(TIMES):
        batch, logp, _, _ = draw(seed)
        gap, mask = batch.old_logprobs - batch.logprobs, batch.mask.float()
        theirs, _ = compute_rollout_rejection_mask(gap, mask, option, threshold)
        ours, _ = weight(logp, batch)
        assert torch.equal(ours, theirs)
        kept, trained = kept + float(ours.sum()), trained + float(mask.sum())
    assert 0.1 < kept / trained < 0.95  # both happen


@pytest.mark.parametrize("kind", KL_KINDS)
def test_an_estimate_of_the_kl_equals_verl(verl, kind):
    for seed in range(TIMES):
        batch, logp, _, _ = draw(seed)
        grads = []
        for estimate in (kl, verl.kl_penalty):
            leaf = logp.clone().requires_grad_()
            value = estimate(leaf, batch.ref_logprobs, kind)
            value.sum().backward()
            grads.append((value.detach(), leaf.grad))
        check(grads[0][0], grads[1][0])
        check(grads[0][1], grads[1][1])


def test_the_coefficient_of_the_kl_equals_verls(verl):
    generator = torch.Generator().manual_seed(0)
    ours, theirs = KlController(0.2, 0.1, 300.0), verl.AdaptiveKLController(0.2, 0.1, 300)
    for drawn in torch.rand(TIMES, generator=generator).tolist():
        ours.update({"kl": 0.2 * drawn}, 8)
        theirs.update(0.2 * drawn, 8)
        assert ours() == pytest.approx(theirs.value)


TRL = {
    "sapo": (
        sapo(1.0, 1.05),
        sequence(),
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    ),
    "luspo": (
        luspo(0.1, 0.2),
        sequence(),
        {"loss_type": "luspo", "epsilon_low": 0.1, "importance_sampling_level": "sequence"},
    ),
    "gspo with delta": (
        gspo(0.1, 0.2, dual=1.3),
        sequence(),
        {"epsilon_low": 0.1, "importance_sampling_level": "sequence", "delta": 1.3},
    ),
    "vespo": (vespo(), token(), {"loss_type": "vespo"}),
    "a corrected KL": (
        with_kl(clip(), 0.3, corrected=True),
        token(),
        {"loss_type": "bnpo", "beta": 0.3, "use_bias_correction_kl": True},
    ),
    "off-policy rows": (
        with_weights(clip(), [off_policy_rows(0.1)]),
        token(),
        {"loss_type": "bnpo", "off_policy_mask_threshold": 0.1},
    ),
    "top entropy": (
        with_weights(clip(), [top_entropy(0.3)]),
        token(),
        {"loss_type": "bnpo", "top_entropy_quantile": 0.3},
    ),
}


@pytest.mark.parametrize("case", TRL)
def test_loss_and_gradient_equal_trl(trl_module, case):
    loss, reduction, settings = TRL[case]
    for seed in range(TIMES):
        batch, logp, entropy, adv_N = draw(seed)
        # ours takes the entropies that the engine drew under
        batch = whole_batch((top_entropy(0.3),))(batch.replace(entropies=entropy))
        numbers = (batch, logp, entropy, adv_N)
        ours, theirs = our_loss(loss, reduction, numbers), trl_loss(trl_module, numbers, **settings)
        check(ours[0], theirs[0])
        check(ours[1], theirs[1])


def test_vespo_to_the_engine_equals_trl_with_its_samplers_ratios(trl_module):
    """The row weight contains p_old / p_engine; without a bound on single tokens, which is TRL's alone."""
    assert PRESETS["vespo"].old_policy == "engine"
    for seed in range(TIMES):
        batch, logp, entropy, adv_N = draw(seed)
        # TRL adds up the ratios of masked tokens too
        engine = torch.where(batch.mask, batch.logprobs, batch.old_logprobs)
        batch = batch.replace(logprobs=engine)
        settings = {"loss_type": "vespo", "cap": 1e9}
        theirs = trl_loss(trl_module, (batch, logp, entropy, adv_N), **settings)
        measured = batch.replace(old_logprobs=batch.logprobs)
        ours = our_loss(vespo(), token(), (measured, logp, entropy, adv_N))
        check(ours[0], theirs[0])
        check(ours[1], theirs[1])


def test_gmpo_equals_trl(trl_module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gmpo_module = pytest.importorskip("trl.experimental.gmpo.gmpo_trainer")
    for seed in range(TIMES):
        numbers = draw(seed)
        ours = our_loss(gmpo(0.2, 0.3), sequence(), numbers)
        how = {"epsilon_low": 0.2, "epsilon_high": 0.3, "trainer_class": gmpo_module.GMPOTrainer}
        theirs = trl_loss(trl_module, numbers, **how)
        check(ours[0], theirs[0])
        check(ours[1], theirs[1])


def test_the_coefficient_of_the_entropy_equals_trls(trl_module):
    """Every step: the bonus that is paid, and the coefficient after it."""
    ours = EntropyController(0.01, 0.5, 0.004, 0.0, 0.02)
    args = SimpleNamespace(
        entropy_target=0.5, entropy_coef_delta=0.004, entropy_coef_min=0.0, entropy_coef_max=0.02,
        delta=None, use_bias_correction_kl=False, steps_per_generation=1,
    )  # fmt: skip
    logp, entropy = torch.zeros(1, 4), torch.zeros(1, 4)
    trainer = SimpleNamespace(
        args=args, entropy_coef=0.01, use_adaptive_entropy=True, _last_world_entropy=float("inf"),
        _entropy_window_stats=None, _entropy_bonus_enabled=True, loss_type="bnpo", beta=0.0,
        importance_sampling_level="token", epsilon_low=0.2, epsilon_high=0.2, use_vllm=False,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, aux_loss_enabled=False,
        current_gradient_accumulation_steps=1, model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(
            gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, entropy, None),
    )  # fmt: skip
    ids = torch.zeros(1, 4, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
        "completion_mask": torch.ones_like(ids), "advantages": torch.zeros(1),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for drawn in torch.rand(TIMES, generator=generator).tolist():
        entropy.fill_(drawn)
        paid = ours()
        loss = trl_module.GRPOTrainer._compute_loss(trainer, None, inputs)
        assert float(loss) == pytest.approx(-paid * drawn, abs=1e-7)
        ours.update({"entropy": float(entropy.mean())}, 1)
        assert ours.value == pytest.approx(trainer.entropy_coef)


def test_a_reference_moves_as_in_trl(trl_module):
    from trl.trainer.callbacks import SyncRefModelCallback

    shape = ModelShape(vocab_size=30, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ff=16)
    policy, reference = Decoder(shape).initialise(1), Decoder(shape).initialise(2)
    theirs = copy.deepcopy(reference)
    learner = Learner(policy, None, reinforce(), token(), 64, reference=reference)  # type: ignore[arg-type]
    learner = replace(learner, reference_sync=(4, 0.6))
    for step in range(1, 9):
        sync_reference(learner, step)
        if step % 4 == 0:
            SyncRefModelCallback._sync_target_model(policy, theirs, 0.6)
        for a, b in zip(reference.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b)

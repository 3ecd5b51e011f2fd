"""Values and gradients on a few tokens, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from graft.algos.kl import kl
from graft.algos.losses.clipped import cispo, clip
from graft.algos.losses.plain import reinforce, sft
from graft.algos.losses.rows import gspo
from graft.algos.losses.table import LOSSES
from graft.algos.losses.terms import value_loss, with_entropy, with_kl, with_weights
from graft.algos.shaping import kl_in_reward
from graft.algos.weights import importance
from tests.algos.conftest import selected

NAN, INF = float("nan"), float("inf")
LN = math.log
WITHOUT_ADVANTAGES = {"sft", "sampled_kl", "distillation"}


def run(loss, batch, logp, entropy=None):
    """loss_NT, metrics, d sum(loss) / d logp, d sum(loss) / d entropy."""
    logp = torch.tensor(logp, dtype=torch.float32, requires_grad=True)
    if entropy is None:
        entropy = [[0.5] * logp.shape[1]] * logp.shape[0]
    entropy = torch.tensor(entropy, dtype=torch.float32, requires_grad=True)
    loss_NT, metrics = loss(logp, entropy, batch)
    loss_NT.sum().backward()
    grad = torch.zeros_like(logp) if logp.grad is None else logp.grad
    entropy_grad = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
    return loss_NT.detach(), metrics, grad, entropy_grad


def check(got, want):
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32), atol=2e-5, rtol=1e-5)


def test_reinforce_pushes_by_the_advantage(toy_batch):
    batch = toy_batch(advantages=[[2, 2], [-1, -1], [9, 9]], mask=[[1, 1], [1, 0], [0, 0]])
    loss, metrics, grad, _ = run(reinforce(), batch, [[-1, -2], [-3, -4], [-5, -6]])
    check(loss, [[2, 4], [-3, 0], [0, 0]])
    check(grad, [[-2, -2], [1, 0], [0, 0]])
    check(metrics["loss/policy"], [[2, 4], [-3, 0], [0, 0]])
    check(metrics["entropy"], [[0.5, 0.5], [0.5, 0], [0, 0]])


def test_sft_is_cross_entropy_of_the_trained_tokens(toy_batch):
    batch = toy_batch(mask=[[1, 1], [0, 1], [0, 0]])
    loss, _, grad, _ = run(sft(), batch, [[-1, -2], [-3, -4], [-5, -6]])
    check(loss, [[1, 2], [0, 4], [0, 0]])
    check(grad, [[-1, -1], [0, -1], [0, 0]])


RATIOS = [[1.5, 1.0, 0.5], [1.5, 1.0, 0.5], [1.1, 0.9, 1.0]]
ADVANTAGES = [[1, 1, 1], [-1, -1, -1], [2, -2, 0]]


def batch_of_ratios(toy_batch, **changes):
    """The old policy gave every token log-prob -1; `run` with log_ratios moves it by RATIOS."""
    return toy_batch(advantages=ADVANTAGES, old_logprobs=[[-1.0] * 3] * 3, **changes)


def log_ratios(ratios=RATIOS):
    return [[-1 + LN(r) for r in row] for row in ratios]


def test_clip_stops_tokens_that_moved_far_enough_and_no_others(toy_batch):
    loss, metrics, grad, _ = run(clip(0.2, 0.2), batch_of_ratios(toy_batch), log_ratios())
    check(loss, [[-1.2, -1, -0.5], [1.5, 1, 0.8], [-2.2, 1.8, 0]])
    check(grad, [[0, -1, -0.5], [1.5, 1, 0], [-2.2, 1.8, 0]])
    check(metrics["clip_ratio/high_mean"], [[1, 0, 0], [0, 0, 0], [0, 0, 0]])
    check(metrics["clip_ratio/low_mean"], [[0, 0, 0], [0, 0, 1], [0, 0, 0]])
    check(metrics["clip_ratio/region_mean"], [[1, 0, 0], [0, 0, 1], [0, 0, 0]])


def test_clip_higher_lets_a_rare_token_rise_further(toy_batch):
    ratios = [[1.25, 1.25, 1.25]] * 3
    batch = batch_of_ratios(toy_batch)
    _, metrics, grad, _ = run(clip(0.2, 0.28), batch, log_ratios(ratios))
    assert grad[0, 0].item() == pytest.approx(-1.25, abs=1e-4)
    assert metrics["clip_ratio/high_mean"].sum().item() == 0
    _, _, grad, _ = run(clip(0.2, 0.2), batch, log_ratios(ratios))
    assert grad[0, 0].item() == 0


def test_dual_clip_bounds_a_bad_token_that_has_become_likely(toy_batch):
    ratios = [[5.0, 1.0, 2.0]] * 3
    loss, _, grad, _ = run(clip(dual=3.0), batch_of_ratios(toy_batch), log_ratios(ratios))
    check(loss, [[-1.2, -1, -1.2], [3, 1, 2], [-2.4, 2, 0]])  # only A=-1, r=5 is bounded
    check(grad, [[0, -1, 0], [0, 1, 2], [0, 2, 0]])


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_that_of_reinforce(toy_batch):
    batch = toy_batch(advantages=ADVANTAGES)
    want = run(reinforce(), batch, log_ratios())[2]
    for loss in (clip(0.2, 0.2), gspo(), cispo(), clip(0.0, 0.0)):
        _, metrics, grad, _ = run(loss, batch, log_ratios())
        check(grad, want.tolist())
        assert metrics["clip_ratio/region_mean"].sum().item() == 0


def test_gspo_moves_a_row_by_the_geometric_mean_of_its_ratios(toy_batch):
    """Ratios 1.21 and 1.0: 1.1 for both; the masked third token does not count."""
    batch = toy_batch(
        advantages=[[1, 1, 0], [-1, -1, 0], [1, 1, 0]],
        old_logprobs=[[-1.0] * 3] * 3,
        mask=[[1, 1, 0]] * 3,
    )
    ratios = [[1.21, 1.0, 7.0], [1.21, 1.0, 7.0], [1.44, 1.21, 1.0]]
    loss, metrics, grad, _ = run(gspo(0.2, 0.2), batch, log_ratios(ratios))
    check(loss, [[-1.1, -1.1, 0], [1.1, 1.1, 0], [-1.2, -1.2, 0]])
    check(grad, [[-1.1, -1.1, 0], [1.1, 1.1, 0], [0, 0, 0]])  # row 2 at 1.32 is clipped whole
    check(metrics["clip_ratio/high_mean"], [[0, 0, 0], [0, 0, 0], [1, 1, 0]])


def test_gspo_holds_the_mean_of_a_row_and_none_of_its_tokens(toy_batch):
    """Log-ratios -39 and 40 average to 0.5, not to (-20 + 20) / 2; 30 and 30 stay at 10 without gradient."""
    batch = toy_batch(
        advantages=[[-1.0, -1.0]] * 3, old_logprobs=[[-41.0, -41.0], [-41, -41], [-2, -2]]
    )
    loss, _, grad, _ = run(gspo(0.9, 0.9), batch, [[-80.0, -1.0], [-11, -11], [-62, -2.0]])
    want = [[math.exp(0.5)] * 2, [math.exp(10)] * 2, [0.1] * 2]  # the third: exp(-30), clipped
    check(loss, want)
    check(grad, [want[0], [0.0, 0.0], [0.0, 0.0]])


def test_gspo_has_the_gradient_of_the_sequence_ratio_under_the_sequence_mean(toy_batch):
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)
    adv_N, old = torch.tensor([1.0, -2.0, 0.5]), -torch.rand(3, 4)
    batch = toy_batch(mask=mask, advantages=adv_N[:, None].expand(3, 4), old_logprobs=old)
    logp = (old + 0.05 * torch.randn(3, 4)).requires_grad_()
    loss_NT, _ = gspo(0.9, 0.9)(logp, torch.zeros(3, 4), batch)
    (loss_NT / mask.sum(1, keepdim=True)).sum().backward()
    got = logp.grad
    logp = logp.detach().requires_grad_()
    ratio_N = (((logp - old) * mask).sum(1) / mask.sum(1)).exp()
    (-ratio_N * adv_N).sum().backward()
    torch.testing.assert_close(got, logp.grad)


def test_cispo_clips_the_weight_and_keeps_the_gradient(toy_batch):
    ratios = [[6.0, 1.0, 0.5], [6.0, 1.0, 0.5], [1.0, 0.1, 1.0]]
    logp = log_ratios(ratios)
    loss, metrics, grad, _ = run(cispo(1.0, 4.0), batch_of_ratios(toy_batch), logp)
    weights = [[5, 1, 0.5], [5, 1, 0.5], [1, 0.1, 1]]
    want = [
        [-w * a for w, a in zip(*row, strict=True)] for row in zip(weights, ADVANTAGES, strict=True)
    ]
    check(grad, want)
    check(
        loss, [[g * x for g, x in zip(*row, strict=True)] for row in zip(want, logp, strict=True)]
    )
    check(metrics["clip_ratio/high_mean"], [[1, 0, 0], [0, 0, 0], [0, 0, 0]])
    _, _, grad, _ = run(cispo(0.2, 4.0), batch_of_ratios(toy_batch), logp)
    assert grad[0, 2].item() == pytest.approx(-0.8, abs=1e-5)  # with a lower bound


def test_importance_weights_are_capped_and_carry_no_gradient(toy_batch):
    """The engine gave -2, the learner before its update -1.5, -1, -3: weights e^.5, 2, e^-1."""
    batch = toy_batch(
        advantages=[[1, 1, 1]], logprobs=[[-2, -2, -2]], old_logprobs=[[-1.5, -1, -3]]
    )
    weights = [math.exp(0.5), 2.0, math.exp(-1)]
    loss, metrics, grad, _ = run(
        with_weights(clip(), [importance(cap=2.0)]), batch, [[-1.5, -1, -3]]
    )
    check(loss, [[-w for w in weights]])
    check(grad, [[-w for w in weights]])
    check(metrics["sampling/importance_sampling_ratio/mean"], [weights])
    check(metrics["loss/policy"], [[-w for w in weights]])


def test_importance_without_old_logprobs_compares_the_present_policy_with_the_engine(toy_batch):
    batch = toy_batch(advantages=[[1, 1]], logprobs=[[-2, -2]], mask=[[1, 0]])
    loss, metrics, grad, _ = run(
        with_weights(reinforce(), [importance(cap=9.0)]), batch, [[-1, -1]]
    )
    check(loss, [[math.e, 0]])
    check(grad, [[-math.e, 0]])
    check(metrics["sampling/importance_sampling_ratio/mean"], [[math.e, 0]])


def test_no_weights_leave_the_loss_as_it_is():
    loss = reinforce()
    assert with_weights(loss, []) is loss


def test_kl_estimates_by_hand():
    logp, ref = torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -0.5])  # d = 0.5, -0.5
    check(kl(logp, ref, "k1"), [0.5, -0.5])
    check(kl(logp, ref, "k2"), [0.125, 0.125])
    check(kl(logp, ref, "k3"), [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5])
    with pytest.raises(ValueError, match=r"unknown KL estimate 'k4'"):
        kl(logp, ref, "k4")


FAR = [-30.0, -21.0, -5.0, 5.0, 21.0, 30.0, 100.0]
"""Drifts log p - log p_ref on both sides of 20."""
TOP = math.exp(20.0)
KL_FAR = {
    "k1": (FAR, [1.0] * 7),
    "k2": ([450, 220.5, 12.5, 12.5, 220.5, 450, 5000], FAR),
    "k3": (
        [11 * TOP, 2 * TOP, math.exp(5) - 6, math.exp(-5) + 4, 20, 29, 99],
        [1 - TOP, 1 - TOP, 1 - math.exp(5), 1 - math.exp(-5), 1, 1, 1],
    ),
}


@pytest.mark.parametrize("kind", KL_FAR)
def test_a_kl_estimate_of_a_large_drift_has_its_value_and_its_slope(kind):
    logp = torch.tensor(FAR, requires_grad=True)
    value = kl(logp, torch.zeros(7), kind)
    value.sum().backward()
    torch.testing.assert_close(value.detach(), torch.tensor(KL_FAR[kind][0]), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(logp.grad, torch.tensor(KL_FAR[kind][1]), rtol=1e-6, atol=1e-5)


def test_a_price_on_a_large_drift_is_paid_in_full(toy_batch):
    batch = toy_batch(logprobs=[[-1.0, -1.0]], ref_logprobs=[[-41.0, -1.0]], reward=[1.0])
    shaped = kl_in_reward(0.1, "k1")(batch)
    check(shaped.rewards, [[-4.0, 1.0]])
    check(shaped.reward, [-3.0])


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimates_average_to_the_kl(kind):
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * kl(p.log(), q.log(), kind)).sum(), exact)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_a_kl_term_raises_the_loss_and_pulls_towards_the_reference(toy_batch, kind):
    """With the wrong sign, a step downhill would run away from the reference."""
    batch = toy_batch(
        advantages=[[0, 0], [0, 0]],
        ref_logprobs=[[-2, -1], [-2, NAN]],
        mask=[[1, 1], [1, 0]],
    )
    logp = [[-1.0, -1.5], [-2.0, -5.0]]  # above, below, at the reference; masked
    loss, metrics, grad, _ = run(with_kl(reinforce(), 0.1, kind), batch, logp)
    d = {"k2": (0.5, 0.125, 1, -0.5), "k3": (math.exp(-1), math.exp(0.5) - 1.5, 0, 0)}[kind]
    check(metrics["kl"], [[d[0], d[1]], [0, 0]])
    check(loss, [[0.1 * d[0], 0.1 * d[1]], [0, 0]])
    assert grad[0, 0] > 0 > grad[0, 1]
    slopes = {"k2": (1, -0.5), "k3": (1 - math.exp(-1), 1 - math.exp(0.5))}[kind]
    check(grad, [[0.1 * slopes[0], 0.1 * slopes[1]], [0, 0]])


def test_kl_is_to_the_reference_even_where_the_old_policy_is_present(toy_batch):
    batch = toy_batch(advantages=[[0.0]], old_logprobs=[[-1.0]], ref_logprobs=[[-2.0]])
    _, metrics, _, _ = run(with_kl(clip(), 1.0, "k2"), batch, [[-1.0]])
    check(metrics["kl"], [[0.5]])


def test_the_kl_compares_tokens_alone_and_only_where_one_was_chosen(toy_batch):
    """a, b and an action have 0.6, 0.2, 0.2; a was drawn, then the action, then an observation.

    The reference gives a 0.5: d = ln 0.75 - ln 0.5 = ln 1.5, k3 = 2/3 + ln 1.5 - 1.
    """
    any_word = torch.tensor([[LN(0.8), 0.0, NAN]], requires_grad=True)
    batch = toy_batch(
        advantages=[[0.0, 0.0, 0.0]],
        ref_logprobs=[[LN(0.5), NAN, NAN]],
        mask=[[1, 1, 0]],
    ).replace(is_vocab_token=torch.tensor([[True, False, True]]), vocab_logprobs=any_word)
    logp = [[LN(0.6), LN(0.2), -INF]]
    loss, metrics, grad, _ = run(with_kl(reinforce(), 0.1), batch, logp)
    check(metrics["kl"], [[2 / 3 + LN(1.5) - 1, 0, 0]])
    check(loss, [[0.1 * (2 / 3 + LN(1.5) - 1), 0, 0]])
    check(grad, [[0.1 * (1 - 2 / 3), 0, 0]])
    assert any_word.grad is not None
    check(any_word.grad, [[-0.1 * (1 - 2 / 3), 0, 0]])


def test_kl_without_a_reference_is_an_error(toy_batch):
    with pytest.raises(ValueError, match=r"ref_logprobs is None"):
        run(with_kl(sft(), 0.1), toy_batch(reward=[1]), [[-1, -1]])
    with pytest.raises(ValueError, match=r"unknown KL estimate"):
        with_kl(sft(), 0.1, "kl")


def test_the_entropy_bonus_reaches_trained_tokens_only(toy_batch):
    batch = toy_batch(advantages=[[0, 0, 0]], mask=[[0, 1, 1]])  # token 0 is the prompt
    loss, metrics, _, slope = run(
        with_entropy(reinforce(), 0.1), batch, [[-1, -1, -1]], [[5.0, 2.0, 1.0]]
    )
    check(loss, [[0, -0.2, -0.1]])
    check(slope, [[0, -0.1, -0.1]])
    check(metrics["entropy"], [[0, 2, 1]])


def test_importance_weighs_the_policy_term_alone_when_wrapped_innermost(toy_batch):
    batch = toy_batch(
        advantages=[[1.0]], logprobs=[[-3.0]], old_logprobs=[[-1.0]], ref_logprobs=[[-2.0]]
    )
    loss = with_entropy(with_kl(with_weights(clip(), [importance(cap=2.0)]), 0.1, "k2"), 0.01)
    got, _, _, _ = run(loss, batch, [[-1.0]], [[3.0]])
    check(got, [[-2.0 + 0.1 * 0.5 - 0.01 * 3]])


def test_value_loss_is_half_the_squared_error(toy_batch):
    batch = toy_batch(returns=[[3, 1], [2, NAN]], mask=[[1, 1], [1, 0]])
    values = torch.tensor([[2.0, 1.0], [4.0, NAN]], requires_grad=True)
    loss = value_loss(values, batch)
    loss.sum().backward()
    check(loss.detach(), [[0.5, 0], [2, 0]])
    assert values.grad is not None
    check(values.grad, [[-1, 0], [2, 0]])


def test_value_clip_takes_the_larger_error(toy_batch):
    """old 0, clip 0.5. Return 3, now 2: the held value 0.5 errs more. Return -1: 2 errs more."""
    batch = toy_batch(returns=[[3, -1, 3]], values=[[0, 0, 0]])
    values = torch.tensor([[2.0, 2.0, 0.25]], requires_grad=True)
    loss = value_loss(values, batch, clip=0.5)
    loss.sum().backward()
    check(loss.detach(), [[3.125, 4.5, 0.5 * 2.75**2]])
    assert values.grad is not None
    check(values.grad, [[0, 3, -2.75]])


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, -1e30])
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_garbage_at_masked_tokens_changes_nothing(toy_batch, name, old, garbage):
    mask = [[1, 0, 1], [0, 1, 0], [0, 0, 0]]

    def dirty(clean):
        kept = torch.tensor(mask, dtype=torch.bool)
        return torch.where(kept, torch.tensor(clean), torch.tensor(garbage))

    fields = {
        "mask": mask,
        "advantages": dirty([[1.0, 2.0, -1.0]] * 3),
        "logprobs": dirty([[-1.0, -2.0, -1.0]] * 3),
        "ref_logprobs": dirty([[-1.0, -2.0, -1.5]] * 3),
        "teacher_logprobs": dirty([[-1.4, -1.0, -0.5]] * 3),
        "divergences": dirty([[0.4, 0.1, 0.2]] * 3),
        "old_logprobs": dirty([[-1.0, -2.0, -1.2]] * 3) if old else None,
    }
    policy = LOSSES[name]()
    loss = with_entropy(with_kl(with_weights(policy, [importance(cap=2.0)]), 0.1), 0.01)
    logp, entropy = [[-1.1, -2.1, -1.0]] * 3, [[0.3, 0.2, 0.1]] * 3
    batch = selected(policy, toy_batch(**fields))
    got = run(loss, batch, dirty(logp).tolist(), dirty(entropy).tolist())
    clean = {**fields}
    for key in fields.keys() - {"mask"}:
        if clean[key] is not None:
            clean[key] = clean[key].nan_to_num(0.0, 0.0, 0.0).clamp(min=-9)
    want = run(loss, selected(policy, toy_batch(**clean)), logp, entropy)
    kept = torch.tensor(mask, dtype=torch.bool)
    for mine, theirs in ((got[0], want[0]), (got[2], want[2]), (got[3], want[3])):
        torch.testing.assert_close(mine, theirs)
        assert (mine[~kept] == 0).all()
    for key, metric in got[1].items():
        assert (metric[~kept] == 0).all(), key
        assert metric.isfinite().all() and not metric.requires_grad, key


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - WITHOUT_ADVANTAGES - {"dro", "reinforce"}))
def test_a_token_whose_ratio_explodes_does_not_end_the_run(toy_batch, name):
    batch = toy_batch(advantages=[[0.0, -1.0]], old_logprobs=[[-200.0, -200.0]])
    loss, _, grad, _ = run(LOSSES[name](), selected(LOSSES[name](), batch), [[-1.0, -1.0]])
    assert loss.isfinite().all() and grad.isfinite().all()


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - WITHOUT_ADVANTAGES))
def test_a_policy_loss_without_advantages_is_an_error(toy_batch, name):
    with pytest.raises(ValueError, match=r"advantages is None.*credit"):
        batch = toy_batch(reward=[1])
        run(LOSSES[name](), batch.replace(selected=batch.mask), [[-1, -1]])


def test_ranges_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"low=-0.1"):
        clip(low=-0.1)
    with pytest.raises(ValueError, match=r"high=-1"):
        gspo(high=-1)
    with pytest.raises(ValueError, match=r"dual=1.1 must be more than 1 [+] high = 1.2"):
        clip(dual=1.1)

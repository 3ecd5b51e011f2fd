"""SAPO, DPPO, DRO, GMPO, LUSPO, VESPO, Clip-Cov and KL-Cov on a few tokens, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from graft.algos.losses.clipped import dppo, sapo
from graft.algos.losses.covariance import clip_cov, covariance, kl_cov
from graft.algos.losses.plain import dro
from graft.algos.losses.rows import gmpo, gspo, luspo, vespo
from tests.algos.conftest import selected

LN = math.log


def run(loss, batch, logp):
    """loss_NT, metrics, d sum(loss) / d logp."""
    logp = torch.tensor(logp, dtype=torch.float32, requires_grad=True)
    loss_NT, metrics = loss(logp, torch.zeros_like(logp), batch)
    loss_NT.sum().backward()
    assert logp.grad is not None
    return loss_NT.detach(), metrics, logp.grad


def check(got, want):
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32), atol=2e-5, rtol=1e-4)


def moved(ratios):
    return [[-1 + LN(r) for r in row] for row in ratios]


@pytest.fixture
def three_rows(toy_batch):
    """Advantages 1, -1 and 2; the old policy gave every token the log-prob -1."""
    return toy_batch(
        advantages=[[1, 1], [-1, -1], [2, 2]],
        old_logprobs=[[-1.0, -1.0]] * 3,
        mask=[[1, 1], [1, 1], [1, 0]],
    )


def test_sapo_gates_a_ratio_softly_on_both_sides(three_rows):
    loss, _, grad = run(sapo(1.0, 2.0), three_rows, moved([[1, 3], [1, 3], [1, 9]]))

    def gate(tau, r):
        return 1 / (1 + math.exp(-tau * (r - 1)))

    near, far = gate(1, 3), gate(2, 3)
    check(loss, [[-2, -4 * near], [1, 2 * far], [-4, 0]])
    slopes = [-3 * 4 * near * (1 - near), 3 * 4 * far * (1 - far)]
    check(grad, [[-1, slopes[0]], [1, slopes[1]], [-2, 0]])
    assert slopes[1] < -slopes[0]  # the gate of a negative advantage is steeper


def test_dppo_stops_a_token_by_the_change_of_its_probability(toy_batch):
    """0.01 to 0.02 doubles a rare token and is trained; 0.6 to 0.78 is stopped at 0.15; with A < 0 only a
    fall stops. The weight of a trained token is its ratio."""
    old, new = [0.01, 0.6, 0.6], [0.02, 0.78, 0.4]
    batch = toy_batch(advantages=[[1, 1, 1], [-1, -1, -1]], old_logprobs=[[LN(p) for p in old]] * 2)
    logp = [[LN(p) for p in new]] * 2
    _, metrics, grad = run(dppo("tv", 0.15, 0.15), batch, logp)
    check(grad, [[-2, 0, -4 / 6], [2, 1.3, 0]])
    check(metrics["clip_ratio/high_mean"], [[0, 1, 0], [0, 0, 0]])
    check(metrics["clip_ratio/low_mean"], [[0, 0, 0], [0, 0, 1]])
    _, _, capped = run(dppo("tv", 0.15, 0.15, cap=1.2), batch, logp)
    check(capped, [[-1.2, 0, -4 / 6], [1.2, 1.2, 0]])


def test_dppo_measures_the_kl_of_drawing_a_token_or_not(toy_batch):
    """KL of the coins 0.6 and 0.78: 0.6 ln(0.6 / 0.78) + 0.4 ln(0.4 / 0.22) = 0.0817."""
    batch = toy_batch(advantages=[[1.0]], old_logprobs=[[LN(0.6)]])
    _, _, grad = run(dppo("kl", 0.05, 0.05), batch, [[LN(0.78)]])
    check(grad, [[0.0]])
    _, _, grad = run(dppo("kl", 0.05, 0.0818), batch, [[LN(0.78)]])
    check(grad, [[-1.3]])
    with pytest.raises(ValueError, match=r"divergence='js'.*tv and kl"):
        dppo("js")


def test_dro_pays_for_every_step_away_from_the_old_policy(three_rows):
    loss, _, grad = run(dro(0.5), three_rows, [[-1, -3], [-1, 1], [-1, 7]])
    check(loss, [[1, 3 + 0.25 * 4], [-1, 1 + 0.25 * 4], [2, 0]])
    check(grad, [[-1, -1 - 0.5 * 2], [1, 1 + 0.5 * 2], [-2, 0]])
    with pytest.raises(ValueError, match=r"beta=0.*reinforce"):
        dro(0)


def test_gmpo_clips_tokens_and_takes_their_geometric_mean(three_rows):
    """Log-ratios 0.9 and 0.1: with A > 0 held at 0.4 and 0.1, exp(0.25); with A < 0 as they are, exp(0.5)."""
    logp = [[-0.1, -0.9], [-0.1, -0.9], [-1.2, 5]]
    loss, metrics, grad = run(gmpo(0.4, 0.4), three_rows, logp)
    up, down, third = math.exp(0.25), math.exp(0.5), 2 * math.exp(-0.2)
    check(loss, [[-up, -up], [down, down], [-third, 0]])
    check(grad, [[0, -up], [down, down], [-third, 0]])
    check(metrics["clip_ratio/high_mean"], [[1, 0], [0, 0], [0, 0]])


def test_luspo_is_gspo_times_the_length_of_the_row(three_rows):
    logp = moved([[1.21, 1.0], [1.1, 1.1], [1.5, 3.0]])
    short, long = run(gspo(0.2, 0.2), three_rows, logp), run(luspo(0.2, 0.2), three_rows, logp)
    for ours, theirs in ((long[0], short[0]), (long[2], short[2])):
        torch.testing.assert_close(ours, theirs * torch.tensor([[2.0], [2.0], [1.0]]))
    check(long[0], [[-2.2, -2.2], [2.2, 2.2], [-2.4, 0]])


def test_gspo_with_dual_bounds_the_loss_of_a_row_that_has_become_likely(three_rows):
    loss, _, grad = run(gspo(0.2, 0.2, dual=3.0), three_rows, moved([[5, 5], [5, 5], [1, 1]]))
    check(loss, [[-1.2, -1.2], [3, 3], [-2, 0]])
    check(grad, [[0, 0], [0, 0], [-2, 0]])
    with pytest.raises(ValueError, match=r"dual=1.1"):
        gspo(0.2, 0.2, dual=1.1)


@pytest.mark.parametrize("loss", [gspo(0.9, 0.9), luspo(0.9, 0.9), gmpo()])
@pytest.mark.parametrize("mean", [9.9, 10.1, 50.0])
def test_a_row_beyond_the_bound_of_its_mean_has_no_gradient(toy_batch, loss, mean):
    """Up to it value and gradient are those of exp(mean), in float64."""
    batch = toy_batch(advantages=[[-1, -1]], old_logprobs=[[-60, -60]])
    value, _, grad = run(loss, batch, [[-60 + mean - 1, -60 + mean + 1]])
    logp = torch.tensor([[mean - 1, mean + 1]], dtype=torch.float64, requires_grad=True)
    ratio = logp.mean().clamp(max=10).exp()
    ratio.backward()
    assert logp.grad is not None
    scale = float(value[0, 0]) / float(ratio.detach())
    assert scale == pytest.approx(2 if loss.__qualname__.startswith("luspo") else 1, rel=1e-4)
    # the token form has the row's ratio on each token: the mean over the row is the reduction's
    torch.testing.assert_close(grad.double() / 2, scale * logp.grad, rtol=1e-4, atol=0)


def test_vespo_weighs_a_row_by_the_product_of_its_ratios(three_rows):
    """w = 2 in the first two rows, 1/2 in the third, whose second token is not trained."""
    logp = moved([[2, 1], [1, 2], [0.5, 7]])
    loss, metrics, grad = run(vespo(2, 3, 3, 2), three_rows, logp)
    up, down, third = 4 * math.exp(-3), 8 * math.exp(-2), 0.25 * math.exp(1.5)
    check(grad, [[-up, -up], [down, down], [-2 * third, 0]])
    check(
        loss,
        [[-up * x for x in logp[0]], [down * x for x in logp[1]], [-2 * third * logp[2][0], 0]],
    )
    check(metrics["loss/row_weight"], [[up, up], [down, down], [third, 0]])


@pytest.fixture
def covaried(toy_batch):
    """Log-probs -1, -1, -4 and advantages 3, -1, -2 have the covariances 3, -1 and 4."""
    return toy_batch(
        advantages=[[3, -1], [-2, 9]],
        old_logprobs=[[-1, -1], [-4, -7]],
        logprobs=[[-9, -9], [-9, -9]],
        mask=[[1, 1], [1, 0]],
    )


def test_covariances_are_over_the_trained_tokens_of_the_batch(covaried):
    check(covariance(covaried), [[3, -1], [4, 0]])
    alone = covaried.replace(logprobs=covaried.old_logprobs, old_logprobs=None)
    check(covariance(alone), [[3, -1], [4, 0]])  # one update: the engine's log-probs


def test_clip_cov_drops_tokens_with_a_covariance_between_its_bounds(covaried):
    logp = [[-1.0, -1.0], [-4.0, -7.0]]
    loss = clip_cov(share=1.0, low_cov=1.0, high_cov=3.5)
    batch = selected(loss, covaried)
    _, metrics, grad = run(loss, batch, logp)
    check(grad, [[0, 1], [2, 0]])
    check(metrics["loss/selected"], [[1, 0], [0, 0]])
    _, _, grad = run(loss, batch.replace(selected=torch.zeros_like(batch.mask)), logp)
    check(grad, [[-3, 1], [2, 0]])


def test_clip_cov_draws_a_share_of_them_and_others_after_each_update(toy_batch):
    generator = torch.Generator().manual_seed(0)
    logp = -torch.rand(40, 50, generator=generator) * 6
    batch = toy_batch(advantages=torch.randn(40, 50, generator=generator), old_logprobs=logp)
    loss = clip_cov(share=0.01, low_cov=0.5, high_cov=5.0)
    first, again = loss.select(batch), loss.select(batch)
    assert first.sum() == 20 and torch.equal(first, again)
    later = loss.select(batch.replace(versions=batch.versions + 1))
    assert later.sum() == 20 and not torch.equal(first, later)
    cov = covariance(batch)[first | later]
    assert (cov > 0.5).all() and (cov < 5).all()


def test_kl_cov_holds_the_tokens_with_the_largest_covariance(covaried):
    """One of three: the third. Ratio e^0.5 there, and the penalty pulls it back by 0.7."""
    loss = kl_cov(share=0.2, coef=0.7)
    batch = selected(loss, covaried)
    value, metrics, grad = run(loss, batch, [[-1, -1], [-3.5, -7.0]])
    up = 2 * math.exp(0.5)
    check(metrics["loss/selected"], [[0, 0], [1, 0]])
    check(value, [[-3, 1], [up + 0.35, 0]])
    check(grad, [[-3, 1], [up + 0.7, 0]])


def test_tokens_that_nobody_selected_are_an_error(covaried):
    with pytest.raises(ValueError, match=r"selected is None.*whole batch"):
        run(kl_cov(), covaried, [[-1, -1], [-4, -7]])
    with pytest.raises(ValueError, match=r"share=0"):
        clip_cov(share=0)

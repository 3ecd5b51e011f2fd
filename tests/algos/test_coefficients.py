from __future__ import annotations

import json
import math

import pytest
import torch

from graft.algos.coefficients import EntropyController, KlController
from graft.algos.kl import kl
from graft.algos.losses.clipped import clip
from graft.algos.losses.plain import reinforce
from graft.algos.losses.terms import with_entropy, with_kl
from graft.algos.shaping import kl_in_reward


def test_the_kl_coefficient_follows_the_kl_by_at_most_a_fifth():
    control = KlController.of(0.1, {"target": 0.1, "horizon": 640})
    control.update({"kl": 0.3}, rows=64)
    assert control() == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    control.update({"kl": 0.09}, rows=64)
    assert control() == pytest.approx(0.102 * (1 - 0.1 * 0.1))
    control.update({"kl": 0.0}, rows=640)
    assert control() == pytest.approx(0.102 * 0.99 * 0.8)


def test_the_entropy_bonus_is_paid_below_its_target_and_grows_there():
    control = EntropyController.of(0.01, {"target": 0.5, "delta": 0.005, "most": 0.012})
    assert control() == 0  # nothing has been measured
    for entropy, paid, value in ((0.6, 0, 0.005), (0.4, 0.01, 0.01), (0.5, 0.012, 0.012)):
        control.update({"entropy": entropy}, rows=8)
        assert (control(), control.value) == pytest.approx((paid, value))


def test_the_state_of_a_controller_goes_through_json():
    for made in (lambda: KlController(0.1, 0.2), lambda: EntropyController(0.1, 0.2)):
        for seen in ({}, {"kl": 0.5, "entropy": 0.1}):
            control, other = made(), made()
            if seen:
                control.update(seen, 8)
            other.restore(json.loads(json.dumps(control.state, allow_nan=False)))
            assert other == control


def test_settings_that_a_controller_does_not_have_are_named():
    with pytest.raises(ValueError, match=r"kl_control has no 'goal'; it has horizon, target"):
        KlController.of(0.1, {"goal": 1.0})
    with pytest.raises(ValueError, match=r"target above 0"):
        EntropyController.of(0.1, {"delta": 1.0})


def test_loss_and_rewards_read_the_present_coefficient(toy_batch):
    control = KlController(0.1, 0.1)
    batch = toy_batch(
        advantages=[[0.0]], logprobs=[[-1.0]], ref_logprobs=[[-2.0]], reward=[1.0], rewards=[[1.0]]
    )
    logp, entropy = torch.tensor([[-1.0]]), torch.tensor([[2.0]])
    loss, bonus = (
        with_kl(reinforce(), control, "k1"),
        with_entropy(reinforce(), lambda: control() / 2),
    )
    shape = kl_in_reward(control, "k1")
    for value in (0.1, 0.4):
        control.value = value
        assert loss(logp, entropy, batch)[0].item() == pytest.approx(value)
        assert bonus(logp, entropy, batch)[0].item() == pytest.approx(-value)
        assert shape(batch).reward.item() == pytest.approx(1 - value)


@pytest.mark.parametrize("kind", ["k1+", "k3+", "abs+"])
def test_a_plus_has_the_value_of_the_estimate_and_the_slope_of_k2(kind):
    """d = 0.5 and -2: k1 0.5, -2; k3 e^-0.5 - 0.5, e^2 - 3; abs 0.5, 2. Slope of k2: d."""
    logp = torch.tensor([-1.0, -3.0], requires_grad=True)
    value = kl(logp, torch.tensor([-1.5, -1.0]), kind)
    value.sum().backward()
    want = {"k1": [0.5, -2.0], "k3": [math.exp(-0.5) - 0.5, math.exp(2) - 3], "abs": [0.5, 2.0]}
    torch.testing.assert_close(value.detach(), torch.tensor(want[kind[:-1]]))
    torch.testing.assert_close(logp.grad, torch.tensor([0.5, -2.0]))


def test_a_corrected_kl_is_that_of_the_present_policy(toy_batch):
    """Ratio e^0.5 and k1 = 1: the term is e^0.5, and its slope e^0.5 (1 + 1): that of r d."""
    batch = toy_batch(advantages=[[0.0]], old_logprobs=[[-1.5]], ref_logprobs=[[-2.0]])
    logp = torch.tensor([[-1.0]], requires_grad=True)
    loss, metrics = with_kl(clip(), 0.1, "k1", corrected=True)(logp, torch.zeros(1, 1), batch)
    loss.sum().backward()
    assert loss.item() == pytest.approx(0.1 * math.exp(0.5))
    assert logp.grad is not None and logp.grad.item() == pytest.approx(0.2 * math.exp(0.5))
    assert metrics["kl"].item() == 1


def test_the_expected_slope_of_a_corrected_k3_is_that_of_the_kl():
    """Over all tokens, drawn by the old policy: the sum is the KL, and so is its gradient."""
    old, ref = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.4, 0.4, 0.2])
    scores = torch.tensor([0.3, -0.1, 0.4], requires_grad=True)
    logp = scores.log_softmax(0)
    exact = (logp.exp() * (logp - ref.log())).sum()
    (want,) = torch.autograd.grad(exact, scores, retain_graph=True)
    estimate = (old * (logp - old.log()).exp() * kl(logp, ref.log(), "k3")).sum()
    torch.testing.assert_close(estimate, exact)
    torch.testing.assert_close(torch.autograd.grad(estimate, scores)[0], want)

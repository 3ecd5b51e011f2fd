from __future__ import annotations

import dataclasses
import sys
import types

import pytest
import torch

from graft.algos.credits.table import CREDITS
from graft.algos.parts import make
from graft.algos.presets import PRESETS, Preset, build, prepare_of
from graft.registry import UnknownName


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_takes_a_finite_step_on_a_toy_batch(full_batch, name):
    preset = PRESETS[name]
    if name == "pass_at_k":  # the batch has three attempts
        preset = dataclasses.replace(preset, credit=(("pass_at_k", {"k": 2}),))
    shape, credit, loss, reduce = build(preset)
    batch = full_batch(
        reward=[1, 0, 0],
        mask=[[1, 1], [0, 1], [1, 0]],
        values=[[0.1, 0.2]] * 3 if preset.needs_critic else None,
        ref_logprobs=[[-1.0, -1.0]] * 3 if preset.kl_coef else None,
        teacher_logprobs=[[-0.5, -0.5]] * 3,
    )
    batch = shape(batch)
    batch = batch.replace(advantages=credit(batch.zeros(), batch))
    if preset.returns is not None:
        returns = make(preset.returns, CREDITS, "credit")(batch.zeros(), batch)
        batch = batch.replace(returns=returns)
    batch = prepare_of(preset)(batch)
    logp = torch.full((3, 2), -1.0, requires_grad=True)
    batch = batch.replace(divergences=(logp + 0.5).square())  # least where the teacher is
    loss_NT, metrics = loss(logp, torch.ones(3, 2), batch)
    (loss_NT * reduce(batch)).sum().backward()
    assert logp.grad is not None and logp.grad.isfinite().all()
    assert (logp.grad[0] < 0).all(), "the rewarded row must become likelier"
    assert (logp.grad[~batch.mask] == 0).all()
    assert {"loss/policy", "entropy"} <= metrics.keys()


def test_grpo_by_hand(toy_batch):
    """Rewards 1, 0, 0 and on-policy: gradient -A / (3 rows * tokens of the row)."""
    _, credit, loss, reduce = build("grpo")
    batch = toy_batch(reward=[1, 0, 0], mask=[[1, 1], [0, 1], [1, 0]])
    batch = batch.replace(advantages=credit(batch.zeros(), batch))
    logp = torch.full((3, 2), -1.0, requires_grad=True)
    (loss(logp, torch.ones(3, 2), batch)[0] * reduce(batch)).sum().backward()
    a, b = 2**0.5 / 3, -(0.5**0.5) / 3
    want = torch.tensor([[-a / 2, -a / 2], [0, -b], [-b, 0]])
    torch.testing.assert_close(logp.grad, want, atol=1e-5, rtol=0)


def test_published_settings():
    assert PRESETS["dapo"].loss == ("clip", {"low": 0.2, "high": 0.28})
    assert PRESETS["dapo"].dynamic_sampling and PRESETS["dapo"].reduction == "token"
    assert PRESETS["gspo"].loss == ("gspo", {"low": 3e-4, "high": 4e-4})
    assert PRESETS["rebn"].importance_cap == 2.0
    assert PRESETS["ppo"].needs_critic and PRESETS["ppo"].value_clip == 0.5
    assert [name for name, preset in PRESETS.items() if preset.needs_critic] == ["ppo", "ppo_turn"]
    cpo, earl_grpo = PRESETS["cpo"], PRESETS["earl_grpo"]
    assert cpo.loss == earl_grpo.loss == ("clip", {"low": 0.2, "high": 0.2, "dual": 3.0})
    assert (cpo.branch, earl_grpo.branch) == ("counterfactual", "independent")
    assert (cpo.reduction, cpo.kl_coef, cpo.kl_kind) == ("token", 1e-3, "k3")
    for preset in (PRESETS["ppo"], PRESETS["ppo_turn"]):
        assert preset.returns is not None
        assert preset.returns[1] == preset.credit[0][1], "one gamma, one lambda"


def test_terms_around_the_loss_come_from_the_preset(toy_batch):
    preset = dataclasses.replace(
        PRESETS["grpo"], importance_cap=2.0, kl_coef=0.1, kl_kind="k2", entropy_coef=0.01
    )
    loss = build(preset)[2]
    batch = toy_batch(
        advantages=[[1.0]], logprobs=[[-3.0]], old_logprobs=[[-1.0]], ref_logprobs=[[-2.0]]
    )
    loss_NT, metrics = loss(torch.tensor([[-1.0]]), torch.tensor([[3.0]]), batch)
    assert loss_NT.item() == pytest.approx(-2 + 0.1 * 0.5 - 0.01 * 3)
    assert {"kl", "sampling/importance_sampling_ratio/mean"} <= metrics.keys()


def test_users_bring_their_own_parts_by_module_and_name(toy_batch, monkeypatch):
    def twice(factor=2.0):
        return lambda adv_NT, batch: factor * adv_NT

    module = types.ModuleType("users_own_algos")
    mine = Preset(
        credit=("reinforce", ("users_own_algos:twice", {"factor": 3.0})), loss="reinforce"
    )
    vars(module).update(twice=twice, MINE=mine)
    monkeypatch.setitem(sys.modules, "users_own_algos", module)
    _, credit, _, _ = build("users_own_algos:MINE")
    batch = toy_batch(reward=[1, 2])
    assert credit(batch.zeros(), batch).tolist() == [[3, 3], [6, 6]]


def test_a_wrong_name_or_keyword_is_an_error_with_the_right_one():
    with pytest.raises(UnknownName, match=r"unknown algorithm 'grop'; did you mean 'grpo'"):
        build("grop")
    with pytest.raises(UnknownName, match=r"unknown loss 'clipp'; did you mean 'clip'"):
        build(dataclasses.replace(PRESETS["grpo"], loss="clipp"))
    with pytest.raises(ValueError, match=r"hihg=0.28.*it is clip\(low=0.2, high=0.2, dual=None\)"):
        build(dataclasses.replace(PRESETS["grpo"], loss=("clip", {"hihg": 0.28})))
    with pytest.raises(ValueError, match=r"constant.*length.*it is constant\(length\)"):
        build(dataclasses.replace(PRESETS["grpo"], reduction="constant"))

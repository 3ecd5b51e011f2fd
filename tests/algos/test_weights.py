"""Weights on three rows, worked by hand, and what holds for every one of the table."""

from __future__ import annotations

import math
import sys
import types
from dataclasses import replace

import pytest
import torch

from graft.algos.losses.plain import reinforce
from graft.algos.losses.terms import with_weights
from graft.algos.parts import make
from graft.algos.presets import PRESETS, build, needs_old_logprobs, prepare_of
from graft.algos.weights import (
    WEIGHTS,
    BatchWeight,
    importance,
    off_policy_rows,
    reject,
    top_entropy,
    whole_batch,
)
from graft.user_code import UserCodeError

NAN = float("nan")


def check(got, want):
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32), atol=2e-5, rtol=1e-4)


@pytest.fixture
def three_rows(toy_batch):
    """Log-ratios learner to engine: 1, 0 | -1, 0.5 | 0.2; two groups."""
    gap = torch.tensor([[1.0, 0.0], [-1.0, 0.5], [0.2, 0.0]])
    return toy_batch(
        advantages=[[1, 1], [-1, -1], [-1, -1]],
        logprobs=[[-2.0, -2.0]] * 3,
        old_logprobs=gap - 2,
        mask=[[1, 1], [1, 1], [1, 0]],
        group=[0, 0, 1],
    )


def of(weight, batch, logp=None):
    logp = batch.old_logprobs if logp is None else torch.tensor(logp)
    return weight(logp, batch)[0]


def test_importance_of_tokens_rows_and_their_geometric_mean(three_rows):
    e = math.exp
    check(of(importance(cap=9), three_rows), [[e(1), 1], [e(-1), e(0.5)], [e(0.2), 0]])
    rows = [[e(1)] * 2, [e(-0.5)] * 2, [e(0.2), 0]]
    check(of(importance("sequence", cap=9), three_rows), rows)
    rows = [[e(0.5)] * 2, [e(-0.25)] * 2, [e(0.2), 0]]
    check(of(importance("geometric", cap=9), three_rows), rows)


def test_importance_is_held_within_its_bounds_or_left_out_beyond_them(three_rows):
    e = math.exp
    check(of(importance(cap=2, floor=0.5), three_rows), [[2, 1], [0.5, e(0.5)], [e(0.2), 0]])
    masked = importance(cap=2, floor=0.5, outside="mask")
    check(of(masked, three_rows), [[0, 1], [0, e(0.5)], [e(0.2), 0]])


def test_importance_of_the_present_policy_moves_with_it(three_rows):
    present = [[-2.0, -1.0], [-2.0, -2.0], [-2.0, -2.0]]
    want = [[1, math.e], [1, 1], [1, 0]]
    check(of(importance(cap=9, policy="current"), three_rows, present), want)
    alone = three_rows.replace(old_logprobs=None)  # one update: the present policy is the old one
    check(of(importance(cap=9), alone, present), want)


def test_normalised_importance_has_the_mean_one(three_rows):
    tokens = importance(cap=9, normalise=True)
    assert isinstance(tokens, BatchWeight) and tokens.needs_old
    mean = of(tokens, three_rows)[three_rows.mask].mean()
    assert mean.item() == pytest.approx(1)
    rows = of(importance("sequence", cap=9, normalise=True), three_rows)
    assert rows[:, 0].mean().item() == pytest.approx(1)  # each row once, whatever its length


@pytest.mark.parametrize(
    ("how", "want"),
    [
        ({"by": "k1", "level": "token", "high": 2.0}, [[0, 1], [0, 1], [1, 0]]),
        # e^k1 is p_engine / p: e^-1, 1, e, e^-0.5, e^-0.2
        ({"by": "k1", "level": "token", "low": 0.5, "high": 3.0}, [[0, 1], [1, 1], [1, 0]]),
        ({"by": "k2", "level": "token", "high": 0.2}, [[0, 1], [0, 1], [1, 0]]),
        ({"by": "k3", "level": "token", "high": 0.5}, [[0, 1], [1, 1], [1, 0]]),
        # sums of k1: -1, 0.5, -0.2; means of k2: 0.25, 0.3125, 0.02
        ({"by": "k1", "of": "sum", "high": 2.0}, [[0, 0], [1, 1], [1, 0]]),
        ({"by": "k2", "of": "mean", "high": 0.3}, [[1, 1], [0, 0], [1, 0]]),
        ({"by": "k2", "of": "max", "high": 0.3}, [[0, 0], [0, 0], [1, 0]]),
        # the first group: mean of k2 (0.5 + 0 + 0.5 + 0.125) / 4 = 0.28
        ({"by": "k2", "level": "group", "high": 0.27}, [[0, 0], [0, 0], [1, 0]]),
        ({"by": "k2", "level": "group", "high": 0.29}, [[1, 1], [1, 1], [1, 0]]),
        ({"by": "k2", "level": "group", "of": "sum", "high": 1.2}, [[1, 1], [1, 1], [1, 0]]),
        ({"by": "k2", "level": "group", "of": "max", "high": 0.4}, [[0, 0], [0, 0], [1, 0]]),
    ],
)
def test_what_is_rejected(three_rows, how, want):
    weight = reject(**how)
    check(of(weight, three_rows), want)
    rejected = weight(three_rows.old_logprobs, three_rows)[1]["weights/rejected"]
    check(rejected, [[1 - a for a in row] for row in want[:2]] + [[1 - want[2][0], 0]])
    assert isinstance(weight, BatchWeight) == (how.get("level") == "group")


def test_rows_that_were_left_behind_teach_nothing_bad(three_rows):
    """The second row has the drift (1 + 0.4) / 2 = 0.7 and A = -1; the first as much, and A = 1."""
    logp = [[-3.0, -2.4], [-3.0, -2.4], [-2.3, -9.0]]
    check(of(off_policy_rows(0.5), three_rows, logp), [[1, 1], [0, 0], [1, 0]])
    check(of(off_policy_rows(0.8), three_rows, logp), [[1, 1], [1, 1], [1, 0]])


def test_the_tokens_drawn_under_the_highest_entropy(toy_batch):
    batch = toy_batch(entropies=[[0.1, 0.2, 0.3], [0.4, 2.0, 9.0]], mask=[[1, 1, 1], [1, 1, 0]])
    check(of(top_entropy(0.2), batch, [[0.0] * 3] * 2), [[0, 0, 0], [0, 1, 0]])
    check(of(top_entropy(0.4), batch, [[0.0] * 3] * 2), [[0, 0, 0], [1, 1, 0]])
    check(of(top_entropy(1.0), batch, [[0.0] * 3] * 2), [[1, 1, 1], [1, 1, 0]])
    assert of(top_entropy(), batch.replace(mask=batch.mask & False), [[0.0] * 3] * 2).sum() == 0


def test_weights_are_multiplied_and_those_of_the_batch_come_from_it(three_rows):
    batch = three_rows.replace(entropies=torch.tensor([[0.1, 2.0], [2.0, 0.1], [2.0, 0.0]]))
    weights = (importance(cap=2), top_entropy(0.6))
    batch = whole_batch(weights)(batch)
    loss, metrics = with_weights(reinforce(), weights)(batch.old_logprobs, batch.zeros(), batch)
    e = math.exp
    check(batch.weights, [[0, 1], [1, 0], [1, 0]])
    # -A log p: 1 and 2 | -3 and -1.5 | -1.8
    check(loss, [[0, 2], [-3 * e(-1), 0], [-1.8 * e(0.2), 0]])
    check(metrics["weights/mean"], [[0, 1], [1, 0], [1, 0]])
    check(
        metrics["sampling/importance_sampling_ratio/mean"], [[2, 1], [e(-1), e(0.5)], [e(0.2), 0]]
    )
    with pytest.raises(ValueError, match=r"weights is None.*whole batch"):
        with_weights(reinforce(), weights)(batch.old_logprobs, batch.zeros(), three_rows)


def test_a_weight_that_compares_with_the_engine_says_what_it_lacks(three_rows):
    with pytest.raises(ValueError, match=r"old_logprobs is None.*compute them"):
        whole_batch((reject(level="group"),))(three_rows.replace(old_logprobs=None))


@pytest.mark.parametrize("garbage", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("name", WEIGHTS)
def test_garbage_at_masked_tokens_changes_no_weight(three_rows, name, garbage):
    def dirty(x):
        return torch.where(three_rows.mask, x, garbage)

    names = ("logprobs", "old_logprobs", "advantages", "entropies")
    batch = three_rows.replace(**{key: dirty(getattr(three_rows, key)) for key in names})
    for variant in ({}, {"level": "sequence"}, {"level": "group"}, {"normalise": True}):
        try:
            weight = WEIGHTS[name](**variant)
        except (TypeError, ValueError):
            continue
        got, metrics = weight(batch.old_logprobs, batch)
        check(got, of(weight, three_rows).tolist())
        assert (got[~three_rows.mask] == 0).all() and not got.requires_grad
        assert all(x.isfinite().all() and (x[~batch.mask] == 0).all() for x in metrics.values())


def test_presets_say_what_their_weights_need():
    assert not needs_old_logprobs(PRESETS["rebn"]) and not needs_old_logprobs(
        PRESETS["top_entropy"]
    )
    grouped = replace(PRESETS["grpo"], weights=(("reject", {"level": "group"}),))
    assert needs_old_logprobs(grouped)


def test_a_weight_of_the_users_own_is_a_function_and_a_name(three_rows, monkeypatch):
    def calm(logp, batch):
        return (logp - batch.logprobs).abs() < 0.7  # a mask is enough

    def wild(logp, batch):
        return logp.mean()

    module = types.ModuleType("users_own_weights")
    vars(module).update(calm=calm, wild=wild)
    monkeypatch.setitem(sys.modules, "users_own_weights", module)
    mine = replace(PRESETS["reinforce"], weights=("users_own_weights:calm",))
    loss, batch = build(mine)[2], prepare_of(mine)(three_rows)
    got, _ = loss(batch.old_logprobs, batch.zeros(), batch)
    check(got, [[0, 2], [0, -1.5], [-1.8, 0]])
    weight = make("users_own_weights:wild", WEIGHTS, "weight")
    with pytest.raises(UserCodeError, match=r"wild.*shape \[3, 2\]"):
        weight(batch.old_logprobs, batch)


@pytest.mark.parametrize(
    ("make_one", "words"),
    [
        (lambda: importance(level="row"), "level='row'; known: token, sequence, geometric"),
        (lambda: importance(cap=0), "cap=0"),
        (lambda: importance(floor=3.0), "floor=3.0"),
        (lambda: reject(by="k1", of="max", high=2.0), "both signs"),
        (lambda: reject(by="k3", low=0.5), "only k1"),
        (lambda: reject(by="k1", high=0.5), "give low as well"),
        (lambda: top_entropy(0), "share=0"),
    ],
)
def test_bounds_without_a_meaning_are_refused(make_one, words):
    with pytest.raises(ValueError) as caught:
        make_one()
    assert words in str(caught.value)

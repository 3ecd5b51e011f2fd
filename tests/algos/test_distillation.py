"""Divergences, credits and losses of distillation, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from graft.algos.credits.table import CREDITS
from graft.algos.distillation import (
    DIVERGENCES,
    distillation,
    js,
    likeliest_tokens,
    sampled_kl,
    teacher_gap,
    teacher_kl,
    with_distillation,
    with_tail,
)
from graft.algos.losses.plain import reinforce
from graft.algos.parts import make
from graft.algos.presets import build
from graft.user_code import UserCodeError

STUDENT, TEACHER = torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor([0.25, 0.25, 0.5]).log()


def test_three_tokens_by_hand():
    """1/2 ln 2 + 1/4 ln 1 - 1/4 ln 2 in both directions; to the mean (3/8, 1/4, 3/8) by Jensen-Shannon."""
    quarter = 0.25 * math.log(2)
    assert float(DIVERGENCES["reverse"]()(STUDENT, TEACHER)) == pytest.approx(quarter, abs=1e-6)
    assert float(DIVERGENCES["forward"]()(STUDENT, TEACHER)) == pytest.approx(quarter, abs=1e-6)
    each = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)  # the same from both sides
    assert float(js(0.5)(STUDENT, TEACHER)) == pytest.approx(each, abs=1e-6)


def test_directions_differ_where_distributions_are_not_mirrored():
    student, teacher = torch.tensor([0.9, 0.1]).log(), torch.tensor([0.5, 0.5]).log()
    reverse = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    forward = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5)
    assert float(DIVERGENCES["reverse"]()(student, teacher)) == pytest.approx(reverse, abs=1e-6)
    assert float(DIVERGENCES["forward"]()(student, teacher)) == pytest.approx(forward, abs=1e-6)
    assert float(js(0)(student, teacher)) == pytest.approx(forward, abs=1e-6)
    assert float(js(1)(student, teacher)) == pytest.approx(reverse, abs=1e-6)
    small = js(1e-4)(student.double(), teacher.double())
    assert float(small) / 1e-4 == pytest.approx(forward, rel=1e-3)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_every_divergence_is_0_of_equals_positive_of_others_and_survives_forbidden_tokens(name):
    divergence = DIVERGENCES[name]()
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 9, generator=generator).requires_grad_()
    is_forbidden = torch.rand(6, 9, generator=generator) < 0.3
    is_forbidden[:, :2] = False
    masked = logits.masked_fill(is_forbidden, -math.inf).log_softmax(-1)
    other = torch.randn(6, 9, generator=generator).masked_fill(is_forbidden, -math.inf)
    same, apart = divergence(masked, masked.detach()), divergence(masked, other.log_softmax(-1))
    torch.testing.assert_close(same, torch.zeros(6), atol=1e-6, rtol=0)
    assert (apart > 0).all() and apart.isfinite().all()
    apart.sum().backward(retain_graph=True)
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert logits.grad[is_forbidden].eq(0).all()
    at_minimum = torch.autograd.grad(divergence(masked, masked.detach()).sum(), logits)[0]
    torch.testing.assert_close(at_minimum, torch.zeros(6, 9), atol=1e-6, rtol=0)


def test_the_tail_by_hand():
    some = torch.tensor([0.6, 0.2]).log()
    probabilities = {
        name: with_tail(some, name).exp() for name in ("bucket", "renormalise", "ignore")
    }
    torch.testing.assert_close(probabilities["bucket"], torch.tensor([0.6, 0.2, 0.2]))
    torch.testing.assert_close(probabilities["renormalise"], torch.tensor([0.75, 0.25]))
    torch.testing.assert_close(probabilities["ignore"], torch.tensor([0.6, 0.2]))
    whole = with_tail(torch.tensor([0.5, 0.5]).log(), "bucket")
    assert whole.isfinite().all() and float(whole[-1].exp()) < 1e-6


@pytest.mark.parametrize("support", ["teacher", "student", "union"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_rest_is_exact_however_small(name, support):
    """A teacher sure of what the student doubts: its rest is e^-45, not the 1e-7 that 1 - sum would say."""
    logits = [torch.tensor([[0.25, 0, 0, 0, 0.5]]), torch.tensor([[30.0, -18, -18, -20, -15]])]
    leaves = [x.clone().requires_grad_() for x in logits]
    got = DIVERGENCES[name]()(
        *likeliest_tokens(
            leaves[0].log_softmax(-1), leaves[1].log_softmax(-1), 2, support, "bucket"
        )
    )
    exact = [x.double().clone().requires_grad_() for x in logits]
    p, q = (x.softmax(-1) for x in exact)
    picked = {"teacher": [0, 4], "student": [4, 0], "union": [0, 4]}[support]
    others = [i for i in range(5) if i not in picked]
    both = [torch.cat([x[:, picked], x[:, others].sum(-1, keepdim=True)], -1) for x in (p, q)]
    m = (both[0] + both[1]) / 2
    kl = {
        "reverse": lambda p, q: (p * (p / q).log()).sum(-1),
        "forward": lambda p, q: (q * (q / p).log()).sum(-1),
        "js": lambda p, q: 0.5 * ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)),
    }[name]
    want = kl(*both)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)
    mine = torch.autograd.grad(got.sum(), leaves[0])[0]
    theirs = torch.autograd.grad(want.sum(), exact[0])[0]
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-6)


def test_a_rest_of_nothing_has_no_gradient():
    logits = torch.tensor([[0.0, 1.0, -math.inf, -math.inf]]).requires_grad_()
    teacher = torch.tensor([[1.0, 0.0, -math.inf, -math.inf]]).log_softmax(-1)
    some = likeliest_tokens(logits.log_softmax(-1), teacher, 2, "teacher", "bucket")
    value = DIVERGENCES["reverse"]()(*some)
    value.sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert value.item() == pytest.approx(0.4621, abs=1e-4)  # (e - 1) / (e + 1) * 1


def test_the_likeliest_tokens_of_one_or_of_both():
    student = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    teacher = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    found = {
        s: likeliest_tokens(student, teacher, 2, s, "ignore")
        for s in ("teacher", "student", "union")
    }
    torch.testing.assert_close(found["teacher"][0].exp(), torch.tensor([0.05, 0.15]))
    torch.testing.assert_close(found["student"][1].exp(), torch.tensor([0.1, 0.2]))
    torch.testing.assert_close(found["union"][0].exp(), torch.tensor([0.05, 0.15, 0.5, 0.3]))
    mine, theirs = likeliest_tokens(student, student, 2, "union", "ignore")
    torch.testing.assert_close(mine.exp(), torch.tensor([0.5, 0.3, 0, 0]))  # counted once
    torch.testing.assert_close(theirs.exp(), torch.tensor([0.5, 0.3, 0, 0]))


def test_the_advantage_of_a_token_is_what_the_teacher_thinks_of_it_more_than_the_student(toy_batch):
    batch = toy_batch(
        mask=[[1, 1, 0], [1, 1, 1]],
        logprobs=[[-2, -1, 9], [-1, -1, -1]],
        teacher_logprobs=[[-1, -3, math.nan], [-1, -2, 0]],
    )
    before = torch.tensor([[1.0, 1, 0], [0, 0, 0]])
    got = teacher_kl(coef=0.5)(before, batch)
    torch.testing.assert_close(got, torch.tensor([[1.5, 0, 0], [0, -0.5, 0.5]]))
    held = teacher_kl(clip=0.25)(batch.zeros(), batch)
    torch.testing.assert_close(held, torch.tensor([[0.25, -0.25, 0], [0, -0.25, 0.25]]))
    # row 0: |1|, |-2|: weights 1 + (1 - 0/3), 1 + (1 - 1/3); row 1: 0, -1, 1 of 2
    early = teacher_kl(early=1.0)(batch.zeros(), batch)
    want = torch.tensor([[2.0, -2 * (1 + 2 / 3), 0], [0, -2.0, 1.5]])
    torch.testing.assert_close(early, want)


def test_rows_without_a_teacher_and_actions_beyond_the_vocabulary_are_not_compared(toy_batch):
    batch = toy_batch(
        mask=[[1, 1], [1, 1]],
        logprobs=[[-2, -1], [-1, -1]],
        teacher_logprobs=[[-1, -3], [-5, -5]],
    ).replace(
        has_teacher=torch.tensor([True, False]),
        is_vocab_token=torch.tensor([[True, False], [True, True]]),
        divergences=torch.tensor([[0.5, math.nan], [math.nan, 0.25]]),
    )
    got = teacher_kl()(batch.zeros(), batch)
    torch.testing.assert_close(got, torch.tensor([[1.0, 0], [0, 0]]))
    loss, metrics = distillation()(batch.zeros(), batch.zeros(), batch)
    torch.testing.assert_close(loss, torch.tensor([[0.5, 0], [0, 0]]))
    assert float(metrics["distill/divergence"].sum()) == 0.5


def test_a_gap_to_a_teacher_is_between_tokens(toy_batch):
    """Probabilities 0.6 of a, 0.2 of b, 0.2 of an action: a is 0.75 of the tokens, the teacher's is 0.5."""
    batch = toy_batch(
        mask=[[1]], logprobs=[[math.log(0.6)]], teacher_logprobs=[[math.log(0.5)]]
    ).replace(vocab_logprobs=torch.tensor([[math.log(0.8)]]))
    assert float(teacher_gap(batch)) == pytest.approx(math.log(0.5 / 0.75), abs=1e-6)


def test_a_divergence_is_added_to_another_loss_with_its_weight(toy_batch):
    logp = torch.tensor([[-1.0, -2.0]]).requires_grad_()
    divergences = (2 * logp.square()).sum(1, keepdim=True).expand(1, 2)
    batch = toy_batch(mask=[[1, 1]], advantages=[[1, -1]]).replace(divergences=divergences)
    loss, metrics = with_distillation(reinforce(), 0.1)(logp, batch.zeros(), batch)
    torch.testing.assert_close(loss, torch.tensor([[1 + 1.0, -2 + 1.0]]))
    torch.testing.assert_close(metrics["distill/divergence"], torch.tensor([[10.0, 10.0]]))


def test_the_sampled_kl_of_one_token(toy_batch):
    """d = -1 - (-2) = 1: k1 1, k2 0.5, k3 e^-1 + 1 - 1."""
    batch = toy_batch(mask=[[1]], teacher_logprobs=[[-2]])
    for kind, want in {"k1": 1.0, "k2": 0.5, "k3": math.exp(-1)}.items():
        logp = torch.tensor([[-1.0]])
        loss, _ = sampled_kl(kind)(logp, batch.zeros(), batch)
        assert float(loss) == pytest.approx(want, abs=1e-6)


def test_without_a_teacher_the_error_names_the_key(toy_batch):
    batch = toy_batch(mask=[[1]]).replace(teacher_logprobs=None, divergences=None)
    with pytest.raises(ValueError, match=r"distill\.teacher"):
        teacher_kl()(batch.zeros(), batch)
    with pytest.raises(ValueError, match=r"distill\.teacher"):
        distillation()(batch.zeros(), batch.zeros(), batch)


@pytest.mark.parametrize("given", [{"coef": -1}, {"clip": 0}, {"early": -0.5}])
def test_settings_that_mean_nothing_are_refused(given):
    with pytest.raises(ValueError, match="teacher_kl"):
        teacher_kl(**given)
    with pytest.raises(ValueError, match="beta"):
        js(beta=1.5)


def test_opd_has_the_gradient_of_the_kl(toy_batch):
    """One row per token of a vocabulary of 3, each with its probability as weight, is the expectation:
    sum of p (log p - log q) grad log p = grad KL(p || q) = p (log p - log q - KL)."""
    student = torch.tensor([0.3, 1.2, -0.7], requires_grad=True)
    teacher = torch.tensor([1.0, -0.5, 0.2]).log_softmax(-1)
    logp = student.log_softmax(-1)
    sampled = logp.detach()
    batch = toy_batch(
        mask=[[1]] * 3,
        logprobs=sampled[:, None].tolist(),
        teacher_logprobs=teacher[:, None].tolist(),
    )
    _, credit, loss, _ = build("opd")
    batch = batch.replace(advantages=credit(batch.zeros(), batch))
    loss_NT, _ = loss(logp[:, None], batch.zeros(), batch)
    (got,) = torch.autograd.grad((loss_NT[:, 0] * sampled.exp()).sum(), student)
    probs, gap = sampled.exp(), sampled - teacher
    want = probs * (gap - (probs * gap).sum())
    torch.testing.assert_close(got, want)
    exact = DIVERGENCES["reverse"]()(student.log_softmax(-1), teacher)
    torch.testing.assert_close(torch.autograd.grad(exact, student)[0], want)


def test_a_batch_in_which_no_row_has_a_teacher_has_a_gradient_of_0(toy_batch):
    """As in the first steps of {success}, before any attempt succeeds."""
    batch = toy_batch(mask=[[1, 1]]).replace(has_teacher=torch.tensor([False]))
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss, _ = distillation()(logp, batch.zeros(), batch.replace(divergences=batch.zeros()))
    (grad,) = torch.autograd.grad(loss.sum(), logp)
    assert loss.eq(0).all() and grad.eq(0).all()


@pytest.mark.parametrize(
    "users, says",
    [
        (lambda student, teacher: (student - teacher).sum(), "shape [4]"),
        (lambda student, teacher: (student - teacher).sum(-1).detach(), "depend on the student"),
        (lambda student: student, "it must take (student, teacher)"),
    ],
)
def test_a_users_divergence_is_checked(users, says):
    student = torch.randn(4, 3).log_softmax(-1).requires_grad_()
    with pytest.raises(UserCodeError) as caught:
        make(users, DIVERGENCES, "divergence")(student, student.detach())
    assert says in str(caught.value)


def test_a_keyword_of_another_type_is_named():
    with pytest.raises(ValueError, match=r"credit 'teacher_kl' .*coef='much': must be a number"):
        make(("teacher_kl", {"coef": "much"}), CREDITS, "credit")

"""The chunked divergence: the same as whole distributions by autograd, and once per shared token."""

import pytest
import torch

from graft.algos.distillation import DIVERGENCES, likeliest_tokens, with_tail
from graft.models import logprobs
from graft.models.divergence import TeacherCandidates, TeacherComparison, TeacherPart, TeacherStates

PAIRS, VOCAB, TOKENS = 7, 19, 16
"""The student's head has three rows more than there are tokens: actions or padding."""


@pytest.fixture
def case():
    torch.manual_seed(0)
    student, head = torch.randn(5, 8, requires_grad=True), torch.randn(VOCAB, 8, requires_grad=True)
    teacher, teachers_head = torch.randn(PAIRS, 6), torch.randn(TOKENS + 1, 6)
    allowed = torch.rand(3, VOCAB) > 0.3
    allowed[:, :3] = True
    index, modes = torch.tensor([0, 1, 2, 3, 4, 1, 0]), torch.randint(0, 3, (PAIRS,))
    return student, head, teacher, teachers_head, allowed, index, modes


def both_of(case, temperature=0.8):
    student, head, teacher, teachers_head, allowed, index, modes = case
    forbidden = ~allowed[modes][:, :TOKENS]
    logits = [student[index] @ head[:TOKENS].T, teacher @ teachers_head[:TOKENS].T]
    found = [(x / temperature).masked_fill(forbidden, -torch.inf).log_softmax(-1) for x in logits]
    return found[0], found[1].detach()


def part_of(case, target):
    *_, index, modes = case
    # two cells of row 0 are one pair; the last cell of the grid has no teacher
    cells, pair = torch.arange(PAIRS), torch.tensor([0, 1, 1, 3, 4, 5, 6])
    return TeacherPart(cells, pair, index, modes, target)


def check(case, got, want_P):
    student, head = case[:2]
    pair = torch.tensor([0, 1, 1, 3, 4, 5, 6])
    want = torch.cat([want_P[pair], want_P.new_zeros(1)]).view(2, 4)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    weights = torch.randn(2, 4)
    mine = torch.autograd.grad((got * weights).sum(), (student, head))
    theirs = torch.autograd.grad((want * weights).sum(), (student, head))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize("elements", [1, 400, 1 << 20])  # one pair a chunk, two or three, all
@pytest.mark.parametrize("name", DIVERGENCES)
def test_chunks_change_neither_values_nor_gradients(case, monkeypatch, elements, name):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
    student, head, teacher, teachers_head, allowed, *_ = case
    how = TeacherComparison(DIVERGENCES[name](), 0.8, vocab_size=TOKENS, allowed=allowed)
    part = part_of(case, TeacherStates(teacher, teachers_head))
    got = how.grid(student, head, [part], torch.Size((2, 4)))
    check(case, got, DIVERGENCES[name]()(*both_of(case)))


@pytest.mark.parametrize("support", ["teacher", "student", "union"])
@pytest.mark.parametrize("tail", ["bucket", "renormalise", "ignore"])
def test_the_likeliest_tokens_and_the_rest(case, support, tail):
    student, head, teacher, teachers_head, allowed, *_ = case
    divergence = DIVERGENCES["js"]()
    how = TeacherComparison(divergence, 0.8, 3, support, tail, TOKENS, allowed)
    part = part_of(case, TeacherStates(teacher, teachers_head))
    got = how.grid(student, head, [part], torch.Size((2, 4)))
    check(case, got, divergence(*likeliest_tokens(*both_of(case), 3, support, tail)))


def test_candidates_of_a_server_are_the_teachers_likeliest_tokens(case):
    student, head, _, _, allowed, *_ = case
    mine, theirs = both_of(case)
    logprobs_PK, ids = theirs.topk(4, -1)
    logprobs_PK[0, 3] = -torch.inf  # it gave fewer here
    how = TeacherComparison(DIVERGENCES["forward"](), 0.8, 4, vocab_size=TOKENS, allowed=allowed)
    part = part_of(case, TeacherCandidates(ids, logprobs_PK))
    got = how.grid(student, head, [part], torch.Size((2, 4)))
    mine_PK = mine.gather(-1, ids).masked_fill(logprobs_PK == -torch.inf, -torch.inf)
    want = DIVERGENCES["forward"]()(with_tail(mine_PK, "bucket"), with_tail(logprobs_PK, "bucket"))
    check(case, got, want)


def test_without_gradient_for_the_head_there_is_none(case):
    student, head, teacher, teachers_head, allowed, *_ = case
    how = TeacherComparison(DIVERGENCES["reverse"](), vocab_size=TOKENS, allowed=allowed)
    part = part_of(case, TeacherStates(teacher, teachers_head))
    how.grid(student, head.detach(), [part], torch.Size((2, 4))).sum().backward()
    assert head.grad is None and student.grad.abs().sum() > 0

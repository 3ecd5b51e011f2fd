"""The same numbers and gradients in TRL's and verl's distillation, on random ragged batches."""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from graft.algos.distillation import (
    DIVERGENCES,
    distillation,
    js,
    likeliest_tokens,
    sampled_kl,
    teacher_kl,
)
from graft.algos.losses.plain import reinforce
from graft.algos.reductions import sequence, token
from graft.models.divergence import TeacherComparison, TeacherPart, TeacherStates

pytestmark = [pytest.mark.peer, pytest.mark.slow]  # importing them alone takes seconds
SEEDS = range(200)
VOCAB = 13


class Ragged:
    """Logits of both, [N, T, V], sampled tokens [N, T] and a mask of unequal lengths."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        rows, columns = [int(torch.randint(1, 5, (), generator=draw)) for _ in range(2)]
        size = (rows, columns, VOCAB)
        self.student = (2 * torch.randn(size, generator=draw)).requires_grad_()
        self.teacher = 2 * torch.randn(size, generator=draw)
        self.actions = torch.randint(0, VOCAB, (rows, columns), generator=draw)
        lengths = torch.randint(0, columns + 1, (rows,), generator=draw)
        lengths[0] = columns
        self.mask = torch.arange(columns) < lengths[:, None]
        self.beta = float(torch.rand((), generator=draw)) * 0.98 + 0.01
        self.temperature = float(torch.rand((), generator=draw)) + 0.5
        self.top_k = int(torch.randint(1, VOCAB - 1, (), generator=draw))

    def logprobs(self, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        return tuple((x / temperature).log_softmax(-1) for x in (self.student, self.teacher))  # type: ignore[return-value]

    def of_actions(self, logprobs: Tensor) -> Tensor:
        return logprobs.gather(-1, self.actions[..., None])[..., 0]

    def agree(self, mine: Tensor, theirs: Tensor) -> None:
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-5)
        a, b = (torch.autograd.grad(x, self.student, retain_graph=True)[0] for x in (mine, theirs))
        torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-5)


@pytest.fixture(scope="module")
def trl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
        import trl.experimental.iw_opd.iw_opd_trainer as iw_opd
        import trl.experimental.sdft.loss_utils as sdft
        import trl.experimental.sdpo.loss_utils as sdpo
        import trl.trainer.distillation_trainer as chunked
    return SimpleNamespace(gkd=gkd, iw_opd=iw_opd, sdft=sdft, sdpo=sdpo, chunked=chunked)


def mean(values_NT: Tensor, case: Ragged, toy_batch: Any, reduce: Any = token) -> Tensor:
    batch = toy_batch(mask=case.mask).replace(divergences=values_NT)
    loss_NT, _ = distillation()(values_NT, values_NT.detach(), batch)
    return (loss_NT * reduce()(batch)).sum()


@pytest.mark.parametrize("beta", [0.0, 1.0, None])  # None: drawn
def test_gkd(trl, toy_batch, beta):
    for seed in SEEDS:
        case = Ragged(seed)
        share = case.beta if beta is None else beta
        mine = mean(js(share)(*case.logprobs(case.temperature)), case, toy_batch)
        theirs = trl.gkd.GKDTrainer.generalized_jsd_loss(
            case.student,
            case.teacher,
            labels=torch.where(case.mask, case.actions, -100),
            beta=share,
            temperature=case.temperature,
        )
        case.agree(mine, theirs)


@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
@pytest.mark.parametrize("beta, support", [(0.0, "teacher"), (1.0, "student"), (0.4, "union")])
def test_the_likeliest_tokens_of_iw_opd(trl, toy_batch, beta, support, tail):
    for seed in SEEDS:
        case = Ragged(seed)
        some = likeliest_tokens(*case.logprobs(case.temperature), case.top_k, support, tail)
        mine = mean(js(beta)(*some), case, toy_batch)
        theirs = trl.iw_opd.IWOPDTrainer.generalized_jsd_loss(
            case.student,
            case.teacher,
            labels=torch.where(case.mask, case.actions, -100),
            beta=beta,
            temperature=case.temperature,
            top_k=case.top_k,
            add_tail=tail == "bucket",
        )
        case.agree(mine, theirs)


def test_chunks_of_the_distillation_trainer(trl, toy_batch):
    """Hidden states and heads of both, as `TeacherComparison` has them."""
    for seed in SEEDS:
        case = Ragged(seed)
        draw = torch.Generator().manual_seed(seed)
        rows, columns = case.mask.shape
        states = [torch.randn(rows * columns, d, generator=draw) for d in (5, 7)]
        heads = [torch.randn(VOCAB, d, generator=draw) for d in (5, 7)]
        leaves = [states[0].requires_grad_(), heads[0].requires_grad_()]
        cells = case.mask.flatten().nonzero()[:, 0]
        part = TeacherPart(
            cells,
            torch.arange(len(cells)),
            cells,
            torch.zeros_like(cells),
            TeacherStates(states[1][cells], heads[1]),
        )
        how = TeacherComparison(js(case.beta), case.temperature, vocab_size=VOCAB)
        grid = how.grid(states[0], heads[0], [part], case.mask.shape)
        mine = mean(grid, case, toy_batch)
        theirs, _, _ = trl.chunked._chunked_divergence_loss(
            states[0].view(rows, columns, 5),
            states[1].view(rows, columns, 7),
            *heads,
            case.mask.long(),
            case.beta,
            temperature=case.temperature,
        )
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-5)
        for a, b in zip(
            torch.autograd.grad(mine, leaves), torch.autograd.grad(theirs, leaves), strict=True
        ):
            torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("module", ["sdft", "sdpo"])
@pytest.mark.parametrize("add_tail", [True, False])
def test_sdft_and_sdpo(trl, toy_batch, module, add_tail):
    utils = getattr(trl, module)
    for seed in SEEDS:
        case = Ragged(seed)

        def per_row(values_NT: Tensor, case: Ragged = case) -> Tensor:
            own = (values_NT * case.mask).sum(-1) / case.mask.sum(-1).clamp(min=1)
            return own[case.mask.any(1)].mean()  # rows without a token count in no mean of graft's

        theirs = utils.compute_full_logit_self_distillation_loss(
            case.student, case.teacher, distillation_alpha=case.beta
        )
        case.agree(
            mean(js(case.beta)(*case.logprobs()), case, toy_batch, sequence), per_row(theirs)
        )
        theirs = utils.compute_topk_self_distillation_loss(
            case.student,
            case.teacher,
            distillation_topk=case.top_k,
            distillation_alpha=case.beta,
            distillation_add_tail=add_tail,
        )
        tail = "bucket" if add_tail else "renormalise"
        some = likeliest_tokens(*case.logprobs(), case.top_k, "student", tail)
        mine = js(case.beta)(*some)
        case.agree(mean(mine, case, toy_batch, sequence), per_row(theirs))
        theirs = utils.compute_sampled_token_self_distillation_loss(
            case.student, case.teacher, case.actions, distillation_alpha=1.0
        )
        logp, teacher = (case.of_actions(x) for x in case.logprobs())
        batch = toy_batch(mask=case.mask, teacher_logprobs=teacher)
        loss_NT, _ = sampled_kl("k2")(logp, logp.detach(), batch)
        # the same gradient; the value of theirs is no divergence
        grads = (
            torch.autograd.grad(x, case.student)[0]
            for x in ((loss_NT * sequence()(batch)).sum(), per_row(theirs))
        )
        torch.testing.assert_close(*grads, atol=2e-6, rtol=2e-5)


def test_iw_opd(trl, toy_batch):
    stand_in = SimpleNamespace(
        temperature=1.0,
        iw_opd_epsilon=1e-8,
        iw_opd_gamma=0.5,
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    for seed in SEEDS:
        case = Ragged(seed)
        logp, teacher = (case.of_actions(x) for x in case.logprobs())
        rollout = (logp + 0.1 * torch.randn(logp.shape)).detach()
        theirs = trl.iw_opd.IWOPDTrainer._compute_iw_opd_loss(
            stand_in,
            case.student,
            case.actions,
            torch.where(case.mask, case.actions, -100),
            teacher,
            rollout,
        )
        batch = toy_batch(mask=case.mask, teacher_logprobs=teacher, logprobs=rollout)
        batch = batch.replace(advantages=teacher_kl(early=0.5)(batch.zeros(), batch))
        loss_NT, _ = reinforce()(logp, logp.detach(), batch)
        case.agree((loss_NT * token()(batch)).sum(), theirs)


@pytest.fixture(scope="module")
def verl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = pytest.importorskip("verl.trainer.distillation.losses")
        import verl.trainer.distillation.fsdp.losses as of_logits
        import verl.trainer.ppo.core_algos as core
    return SimpleNamespace(losses=losses, of_logits=of_logits, core=core)


def test_verl_forward_kl_of_the_teachers_likeliest_tokens(verl, toy_batch):
    settings = SimpleNamespace(
        distillation_loss=SimpleNamespace(use_chunked_topk=False, log_prob_min_clamp=None)
    )
    for seed in SEEDS:
        case = Ragged(seed)
        _, teacher = case.logprobs()
        top, ids = teacher.topk(case.top_k, -1)
        nested = [
            torch.nested.nested_tensor([x.flatten(0, 1)], layout=torch.jagged) for x in (top, ids)
        ]
        found = verl.of_logits.compute_forward_kl_topk(
            case.student.flatten(0, 1)[None], *nested, settings, "thd"
        )
        values = found["distillation_losses"] if isinstance(found, dict) else found[0]
        theirs = (values[0].view(case.mask.shape) * case.mask).sum() / case.mask.sum()
        some = likeliest_tokens(*case.logprobs(), case.top_k, "teacher", "ignore")
        mine = mean(DIVERGENCES["forward"]()(*some), case, toy_batch)
        case.agree(mine, theirs)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_verl_estimates_and_the_policy_gradient_of_a_teacher(verl, toy_batch, kind):
    for seed in SEEDS:
        case = Ragged(seed)
        logp, teacher = (case.of_actions(x) for x in case.logprobs())
        teacher = logp.detach() + 0.2 * (
            teacher - logp.detach()
        )  # verl clamps k3 at 10, graft does not
        batch = toy_batch(mask=case.mask, teacher_logprobs=teacher, logprobs=logp.detach())
        estimate = verl.core.kl_penalty(logprob=logp, ref_logprob=teacher, kl_penalty=kind)
        loss_NT, _ = sampled_kl(kind)(logp, logp.detach(), batch)
        weights = token()(batch)
        case.agree((loss_NT * weights).sum(), (estimate * case.mask).sum() / case.mask.sum())
        if kind == "k1":  # -estimate as the advantage
            batch = batch.replace(advantages=teacher_kl()(batch.zeros(), batch))
            loss_NT, _ = reinforce()(logp, logp.detach(), batch)
            theirs = (logp * estimate.detach() * case.mask).sum() / case.mask.sum()
            case.agree((loss_NT * weights).sum(), theirs)

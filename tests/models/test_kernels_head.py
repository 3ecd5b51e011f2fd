"""The head's kernels against the chunked head of a CPU, and against autograd in float64."""

import pytest
import torch

from graft.models import logprobs
from graft.models.logprobs import score_actions
from graft.models.truncation import Truncation

pytest.importorskip("triton")
from graft.models.kernels import head

pytestmark = pytest.mark.usefixtures("poison")


def make(rows, num_actions, dtype=torch.float32, with_mask=True, width=16):
    generator = torch.Generator().manual_seed(rows * num_actions)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    weight = torch.randn(num_actions, width, generator=generator).to(dtype)
    actions = torch.randint(0, num_actions, (rows,), generator=generator)
    modes = torch.randint(0, 3, (rows,), generator=generator)
    allowed = None
    if with_mask:
        allowed = torch.rand(3, num_actions, generator=generator) > 0.4
        allowed[2, : num_actions - 30] = False  # the kernel's first step over a row finds nothing
        allowed[modes, actions] = True
    return hidden, weight, actions, modes, allowed


def run(function, case, temperature, grads, device, **settings):
    """Values and gradients of sum(grad * value), on a CPU."""
    hidden, weight, actions, modes, allowed = (x if x is None else x.to(device) for x in case)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    values = function(hidden, weight, actions, modes, allowed, temperature, **settings)
    loss = sum(
        (v * g.to(device)).sum() for v, g in zip(values, grads, strict=True) if g is not None
    )
    slopes = torch.autograd.grad(loss, (hidden, weight))
    return [x.detach().cpu() for x in (*values, *slopes)]


def plain(hidden, weight, actions, modes, allowed, temperature):
    return score_actions(hidden, weight, actions, modes, allowed, temperature)


def exact(hidden, weight, actions, modes, allowed, temperature):
    logits = hidden @ weight.T / temperature
    if allowed is not None:
        logits = logits.masked_fill(~allowed[modes], -1e30)
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)
    return log_p.gather(1, actions[:, None])[:, 0], entropy


def draw_grads(rows, wanted):
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, generator=generator) if want else None for want in wanted]


def assert_alike(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("num_actions", "with_mask", "wanted"),
    [
        (37, True, (1, 0)),
        (37, False, (0, 1)),
        (64, True, (1, 1)),
        (64, False, (1, 0)),
        (4099, True, (0, 1)),
        (4099, False, (1, 1)),
    ],
)
def test_values_and_gradients_equal_plain_pytorch(kernel_device, num_actions, with_mask, wanted):
    case = make(11, num_actions, with_mask=with_mask)
    grads = draw_grads(11, wanted)
    got = run(head.head_logprobs, case, 0.7, grads, kernel_device, chunk=4)  # 4, 4 and 3 rows
    assert_alike(got, run(plain, case, 0.7, grads, "cpu"), 2e-5)


@pytest.mark.parametrize("with_mask", [True, False])
def test_a_truncated_distribution_equals_plain_pytorch(kernel_device, with_mask):
    case, cut = make(11, 37, with_mask=with_mask), Truncation(top_k=9, top_p=0.8, min_p=0.02)
    grads = draw_grads(11, (1, 1, 1))
    how = {"vocab_size": 33, "truncation": cut}
    got = run(head.head_logprobs, case, 0.7, grads, kernel_device, chunk=4, **how)
    assert_alike(got, run(score_actions, case, 0.7, grads, "cpu", **how), 2e-5)
    whole = run(score_actions, case, 0.7, grads, "cpu", vocab_size=33)
    assert float((got[0] - whole[0]).max()) > 0.1


@pytest.mark.parametrize("num_actions", [37, 4099])
def test_values_and_gradients_are_those_of_autograd_in_float64(kernel_device, num_actions):
    case = make(6, num_actions)
    grads = draw_grads(6, (1, 1))
    wide = [x.double() if x.is_floating_point() else x for x in case]
    got = run(head.head_logprobs, case, 1.3, grads, kernel_device)
    assert_alike(got, run(exact, wide, 1.3, grads, "cpu"), 2e-5)


@pytest.mark.parametrize(
    ("vocab_size", "with_mask", "wanted"),  # 1, 4 and 32 actions beyond them
    [(36, True, (1, 1, 1)), (33, False, (1, 1, 1)), (33, True, (0, 0, 1)), (5, False, (0, 0, 1))],
)
def test_vocab_logp_and_its_gradients_equal_plain_pytorch(
    kernel_device, vocab_size, with_mask, wanted
):
    case = make(11, 37, with_mask=with_mask)
    grads = draw_grads(11, wanted)
    got = run(head.head_logprobs, case, 0.7, grads, kernel_device, chunk=4, vocab_size=vocab_size)

    def plain_vocab(hidden, weight, actions, modes, allowed, temperature):
        return score_actions(hidden, weight, actions, modes, allowed, temperature, vocab_size)

    assert_alike(got, run(plain_vocab, case, 0.7, grads, "cpu"), 2e-5)
    assert float(got[2].abs().max()) > 0.01


def test_vocab_logp_across_blocks_is_that_of_logsumexp_in_float64(kernel_device):
    hidden, weight, actions, modes, _ = make(6, 4099)
    vocab_size = 4090
    actions[:5] %= vocab_size
    actions[5] = 4095
    allowed = torch.ones(3, 4099, dtype=torch.bool)
    allowed[:, 4097:] = False
    allowed[1, :4000] = False
    allowed[modes, actions] = True
    case = (hidden, weight, actions, modes, allowed)
    grads = draw_grads(6, (1, 1, 1))
    got = run(head.head_logprobs, case, 1.3, grads, kernel_device, vocab_size=vocab_size)

    def exact_vocab(hidden, weight, actions, modes, allowed, temperature):
        logits = (hidden @ weight.T / temperature).masked_fill(~allowed[modes], -1e30)
        vocab_logp = logits[:, :vocab_size].logsumexp(-1) - logits.logsumexp(-1)
        chosen = exact(hidden, weight, actions, modes, allowed, temperature)
        return *chosen, torch.where(actions < vocab_size, vocab_logp, 0.0)

    wide = [x.double() if x.is_floating_point() else x for x in case]
    assert_alike(got, run(exact_vocab, wide, 1.3, grads, "cpu"), 3e-5)


def test_vocab_logp_stays_finite_where_actions_have_all_the_mass(kernel_device):
    hidden = torch.ones(1, 1, device=kernel_device)
    weight = torch.tensor([[0.0], [200.0]], device=kernel_device, requires_grad=True)
    actions, modes = torch.tensor([[0], [0]], device=kernel_device)
    logp, _, vocab_logp = head.head_logprobs(
        hidden, weight, actions, modes, None, 1.0, vocab_size=1
    )
    assert [*logp.tolist(), *vocab_logp.tolist()] == pytest.approx([-200.0, -200.0], abs=1e-3)
    (logp - vocab_logp).sum().backward()
    assert float(weight.grad.abs().max()) < 1e-3


def test_bfloat16_differs_by_the_rounding_of_logits_and_gradients_only(kernel_device):
    case = make(9, 1000, torch.bfloat16)
    grads = draw_grads(9, (1, 1))
    wide = [x.double() if x.is_floating_point() else x for x in case]
    got = run(head.head_logprobs, case, 1.0, grads, kernel_device, chunk=4)
    assert [x.dtype for x in got] == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert_alike(got, run(exact, wide, 1.0, grads, "cpu"), 0.05)


def test_large_logits_neither_overflow_nor_lose_the_entropy(kernel_device):
    """Logits 900, 899 and far below: probabilities 0.731 and 0.269, entropy 0.582."""
    hidden = torch.ones(1, 1, device=kernel_device)
    weight = torch.full((5000, 1), -900.0, device=kernel_device)
    weight[4990], weight[3] = 900.0, 899.0
    actions, modes = torch.tensor([[3], [0]], device=kernel_device)
    logp, entropy = head.head_logprobs(hidden, weight, actions, modes, None, 1.0)
    assert float(logp) == pytest.approx(-1.313262, abs=1e-4)
    assert float(entropy) == pytest.approx(0.582203, abs=1e-4)


def test_a_forbidden_action_gets_no_gradient(kernel_device):
    hidden, weight, actions, modes, allowed = make(7, 100)
    grads = draw_grads(7, (1, 1))
    *_, slope = run(
        head.head_logprobs, (hidden, weight, actions, modes, allowed), 1.0, grads, kernel_device
    )
    never = ~allowed[modes].any(0)
    assert never.any()
    assert torch.equal(slope[never], torch.zeros_like(slope[never]))


def test_the_gradient_of_a_sum_may_be_one_number_seen_many_times(kernel_device):
    hidden, weight, actions, modes, _ = (
        x if x is None else x.to(kernel_device) for x in make(5, 40, with_mask=False)
    )
    leaf = hidden.requires_grad_()
    head.head_logprobs(leaf, weight, actions, modes, None, 1.0)[0].sum().backward()
    p = (hidden.detach() @ weight.T).softmax(-1)
    want = weight[actions] - p @ weight
    torch.testing.assert_close(leaf.grad, want, atol=1e-5, rtol=1e-5)


def test_where_there_are_kernels_the_head_takes_them(kernel_device, monkeypatch):
    hidden, weight, actions, modes, allowed = (x.to(kernel_device) for x in make(5, 40))
    monkeypatch.setattr(logprobs, "has_kernels", lambda device: True)
    monkeypatch.setattr(logprobs, "_ChunkedHead", None)
    got = score_actions(hidden, weight, actions, modes=modes, allowed=allowed, temperature=0.7)
    assert_alike(got, exact(hidden, weight, actions, modes, allowed, 0.7), 1e-5)
    got = score_actions(hidden, weight, actions)
    assert_alike(got, exact(hidden, weight, actions, modes, None, 1.0), 1e-5)


def test_a_chunk_is_whole_tiles_within_the_budget():
    assert head.rows_per_chunk(151_936, torch.bfloat16) == 2048
    assert head.rows_per_chunk(151_936, torch.float32) == 1024
    assert head.rows_per_chunk(10**9, torch.float32) == 128


@pytest.mark.parametrize(
    "cut",
    [
        Truncation(top_k=7), Truncation(top_p=0.6), Truncation(min_p=0.3), Truncation(1, 0.5, 0.1),
        Truncation(top_k=40, top_p=0.9, min_p=0.01), Truncation(top_p=1e-4), Truncation(top_k=400),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_mask", [True, False])
def test_the_lowest_kept_logit_is_that_of_sorted_rows(kernel_device, cut, dtype, with_mask):
    hidden, weight, _, modes, allowed = make(5, 300, dtype, with_mask)
    logits = head.empty_logits(5, 300, hidden)
    torch.mm(hidden, weight.T, out=logits[:, :300])
    sorted_rows = logits[:, :300].float()
    if allowed is not None:
        sorted_rows.masked_fill_(~allowed[modes], float("-inf"))
    else:
        modes = None
    floors = torch.empty(5, device=kernel_device)
    moved = [x if x is None else x.to(kernel_device) for x in (logits, modes, head.widen(allowed))]
    head.find_floors(moved[0], 300, *moved[1:], cut, 0.7, floors)
    assert torch.equal(floors.cpu(), cut.floors(sorted_rows, 0.7))


def test_equal_logits_are_kept_together(kernel_device):
    logits = torch.full((1, 64), -9.0, device=kernel_device)
    logits[0, :5] = torch.tensor([1.0, 0.5, 0.5, 0.5, -0.0])
    floors = torch.empty(1, device=kernel_device)
    for count in (2, 3, 4):
        head.find_floors(logits, 64, None, None, Truncation(top_k=count), 1.0, floors)
        assert floors.item() == 0.5
    head.find_floors(logits, 64, None, None, Truncation(top_k=5), 1.0, floors)
    assert floors.item() == 0.0

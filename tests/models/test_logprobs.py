import math

import pytest
import torch

from graft.models import logprobs as module
from graft.models.logprobs import score_actions
from graft.models.transformers.scores import score_logits
from graft.models.truncation import Truncation


def plain(hidden, weight, actions, modes, allowed, temperature):
    logits = hidden @ weight.T / temperature
    log_p = logits.masked_fill(~allowed[modes], -1e30).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)
    return log_p.gather(1, actions[:, None])[:, 0], entropy


@pytest.fixture
def case():
    torch.manual_seed(0)
    hidden = torch.randn(11, 8, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(17, 8, requires_grad=True)
    actions = torch.randint(0, 17, (11,))
    modes = torch.randint(0, 3, (11,))
    allowed = torch.rand(3, 17) > 0.4
    allowed[modes, actions] = True
    return hidden, weight, actions, modes, allowed


@pytest.mark.parametrize("elements", [1, 40, 1 << 20])  # one row a chunk, two rows, all at once
def test_chunks_change_neither_values_nor_gradients(case, monkeypatch, elements):
    hidden, weight, actions, modes, allowed = case
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", elements)
    got = score_actions(hidden, weight, actions, modes=modes, allowed=allowed, temperature=0.7)
    want = plain(hidden, weight, actions, modes, allowed, 0.7)
    g, h = torch.randn(11), torch.randn(11)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    mine = torch.autograd.grad((got[0] * g + got[1] * h).sum(), (hidden, weight))
    theirs = torch.autograd.grad((want[0] * g + want[1] * h).sum(), (hidden, weight))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_two_actions_by_hand():
    """Logits ln 3 and 0: probabilities 3/4 and 1/4; at temperature 2 they are sqrt 3 to 1."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[3.0]]).log().repeat(2, 1)
    weight[1] = 0.0
    logp, entropy = score_actions(hidden, weight, torch.tensor([0]))
    assert float(logp) == pytest.approx(-0.287682, abs=1e-6)
    assert float(entropy) == pytest.approx(0.562335, abs=1e-6)
    warm, _ = score_actions(hidden, weight, torch.tensor([0]), temperature=2.0)
    assert float(warm.exp()) == pytest.approx(3**0.5 / (3**0.5 + 1), abs=1e-6)


PROBS = (0.4, 0.3, 0.2, 0.06, 0.04)


@pytest.mark.parametrize(
    "cut, action, kept",
    [
        (Truncation(top_k=3), 2, [0, 1, 2]),
        (Truncation(top_p=0.65), 1, [0, 1]),
        (Truncation(top_p=0.71), 1, [0, 1, 2]),
        (Truncation(top_k=3, top_p=0.75), 0, [0, 1]),  # within what top-k left: .7 / .9
        (Truncation(min_p=0.4), 0, [0, 1, 2]),
        (Truncation(top_p=0.65), 4, [0, 1, 4]),  # the chosen action is always kept
    ],
)
def test_a_truncated_log_prob_by_hand(cut, action, kept):
    """Normalised over what is kept; the gradient is onehot - p of these, and 0 elsewhere."""
    weight = torch.tensor(PROBS).log()[:, None].requires_grad_()
    logp, entropy = score_actions(torch.ones(1, 1), weight, torch.tensor([action]), truncation=cut)
    mass = sum(PROBS[i] for i in kept)
    share = [PROBS[i] / mass if i in kept else 0.0 for i in range(5)]
    assert logp.item() == pytest.approx(math.log(share[action]), abs=1e-6)
    assert entropy.item() == pytest.approx(-sum(p * math.log(p) for p in share if p), abs=1e-6)
    logp.sum().backward()
    onehot = [float(i == action) for i in range(5)]
    want = [one - p for one, p in zip(onehot, share, strict=True)]
    assert weight.grad[:, 0].tolist() == pytest.approx(want, abs=1e-6)


def test_truncation_comes_after_the_temperature():
    """At temperature 2 the odds are square roots, .63 : .55 : .45 : .24 : .2; their sum is 2.07."""
    weight = torch.tensor(PROBS).log()[:, None]
    how = {"temperature": 2.0, "truncation": Truncation(top_p=0.65)}
    logp, _ = score_actions(torch.ones(1, 1), weight, torch.tensor([0]), **how)
    roots = [p**0.5 for p in PROBS]
    assert sum(roots[:2]) / sum(roots) < 0.65  # so the third is needed
    assert float(logp.exp()) == pytest.approx(roots[0] / sum(roots[:3]), abs=1e-6)


@pytest.mark.parametrize("elements", [1, 160, 1 << 20])
def test_truncated_chunks_equal_autograd_through_the_logits(case, monkeypatch, elements):
    hidden, weight, actions, modes, allowed = case
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", elements)
    how = {"temperature": 0.7, "vocab_size": 14, "truncation": Truncation(5, 0.8, 0.01)}
    got = score_actions(hidden, weight, actions, modes, allowed, **how)
    want = score_logits(hidden @ weight.T, actions, allowed[modes], **how)
    grads = torch.randn(3, 11)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    mine = torch.autograd.grad((torch.stack(got) * grads).sum(), (hidden, weight))
    theirs = torch.autograd.grad((torch.stack(want) * grads).sum(), (hidden, weight))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_a_forbidden_action_gets_no_gradient(case):
    hidden, weight, actions, modes, allowed = case
    logp, entropy = score_actions(hidden, weight, actions, modes=modes, allowed=allowed)
    (logp.sum() + entropy.sum()).backward()
    never = ~allowed[modes].any(0)
    assert torch.isfinite(weight.grad).all()
    assert float(weight.grad[never].abs().sum()) == 0.0


def test_nothing_to_train_keeps_the_graph_connected():
    hidden = torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(5, 8, requires_grad=True)
    logp, _ = score_actions(hidden[:0], weight, torch.zeros(0, dtype=torch.long))
    logp.sum().backward()
    assert float(weight.grad.abs().sum()) == 0.0


def test_any_token_against_two_actions_by_hand():
    """Logits ln of 6, 2, 1 | 3, 4, 4: three tokens, two actions and a row of padding.

    Mode 0 allows tokens and action 3: of 12 shares, any token has 9. Drawn were token 0 and action 3.
    Mode 1 allows actions 3 and 4 alone. A token's share of tokens alone is 6 / 9.
    """
    weight = torch.tensor([6.0, 2, 1, 3, 4, 4]).log()[:, None].requires_grad_()
    hidden = torch.ones(3, 1)
    actions, modes = torch.tensor([0, 3, 4]), torch.tensor([0, 0, 1])
    allowed = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]], dtype=torch.bool)
    logp, entropy, vocab_logp = score_actions(hidden, weight, actions, modes, allowed, vocab_size=3)
    torch.testing.assert_close(logp.exp(), torch.tensor([6 / 12, 3 / 12, 4 / 7]))
    torch.testing.assert_close(vocab_logp.exp(), torch.tensor([9 / 12, 1, 1]))
    torch.testing.assert_close((logp - vocab_logp).exp()[0], torch.tensor(6 / 9))
    assert entropy[2].item() == pytest.approx(0.682908, abs=1e-5)  # of 3/7 and 4/7
    (slope,) = torch.autograd.grad(vocab_logp.sum(), weight, retain_graph=True)
    # tokens p / any - p, the action -p; nothing from the two rows that drew an action
    want = torch.tensor([6 / 9 - 6 / 12, 2 / 9 - 2 / 12, 1 / 9 - 1 / 12, -3 / 12, 0, 0])
    torch.testing.assert_close(slope[:, 0], want)
    (slope,) = torch.autograd.grad((logp - vocab_logp)[0], weight)
    want = torch.tensor([1 - 6 / 9, -2 / 9, -1 / 9, 0, 0, 0])  # the action is as if it were not
    torch.testing.assert_close(slope[:, 0], want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("elements", [1, 40, 1 << 20])
def test_any_token_is_what_autograd_makes_of_it(case, monkeypatch, elements):
    hidden, weight, actions, modes, allowed = case
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", elements)
    got = score_actions(hidden, weight, actions, modes, allowed, 0.7, 13)
    logits = (hidden @ weight.T / 0.7).masked_fill(~allowed[modes], -1e30)
    exact = logits[:, :13].logsumexp(-1) - logits.logsumexp(-1)
    want = (
        *plain(hidden, weight, actions, modes, allowed, 0.7),
        torch.where(actions < 13, exact, 0.0),
    )
    grads = torch.randn(3, 11)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    mine, theirs = (
        torch.autograd.grad((torch.stack(values) * grads).sum(), (hidden, weight))
        for values in (got, want)
    )
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_any_token_stays_finite_where_actions_have_all_the_mass():
    """The action leads by 200: fp32 sees no share of the only token, yet it was drawn."""
    weight = torch.tensor([[0.0], [200.0]], requires_grad=True)
    logp, _, vocab_logp = score_actions(torch.ones(1, 1), weight, torch.tensor([0]), vocab_size=1)
    assert logp.tolist() == vocab_logp.tolist() == [-200.0]
    (logp - vocab_logp).sum().backward()
    assert weight.grad.tolist() == [[0.0], [0.0]]

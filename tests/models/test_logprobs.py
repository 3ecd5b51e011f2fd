import pytest
import torch

from graft.models import logprobs as module
from graft.models.logprobs import score_actions


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

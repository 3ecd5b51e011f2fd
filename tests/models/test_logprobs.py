import pytest
import torch

from graft.models import logprobs as module
from graft.models.logprobs import action_logprobs


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
    got = action_logprobs(hidden, weight, actions, modes=modes, allowed=allowed, temperature=0.7)
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
    logp, entropy = action_logprobs(hidden, weight, torch.tensor([0]))
    assert float(logp) == pytest.approx(-0.287682, abs=1e-6)
    assert float(entropy) == pytest.approx(0.562335, abs=1e-6)
    warm, _ = action_logprobs(hidden, weight, torch.tensor([0]), temperature=2.0)
    assert float(warm.exp()) == pytest.approx(3**0.5 / (3**0.5 + 1), abs=1e-6)


def test_a_forbidden_action_gets_no_gradient(case):
    hidden, weight, actions, modes, allowed = case
    logp, entropy = action_logprobs(hidden, weight, actions, modes=modes, allowed=allowed)
    (logp.sum() + entropy.sum()).backward()
    never = ~allowed[modes].any(0)
    assert torch.isfinite(weight.grad).all()
    assert float(weight.grad[never].abs().sum()) == 0.0


def test_nothing_to_train_keeps_the_graph_connected():
    hidden = torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(5, 8, requires_grad=True)
    logp, _ = action_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.long))
    logp.sum().backward()
    assert float(weight.grad.abs().sum()) == 0.0

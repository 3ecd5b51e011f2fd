from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.algos.losses.table import LOSSES
from graft.algos.losses.terms import with_entropy, with_kl, with_weights
from graft.algos.reductions import constant, sequence, token, turn_starts, written_tokens
from graft.algos.weights import WEIGHTS, whole_batch
from tests.algos.conftest import selected

MASK = [[1, 1, 1], [0, 1, 0], [0, 0, 0]]


def check(got, want):
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32))


def test_token_weighs_every_trained_token_alike(toy_batch):
    check(token()(toy_batch(mask=MASK)), [[0.25] * 3, [0, 0.25, 0], [0, 0, 0]])


def test_sequence_weighs_every_trained_row_alike(toy_batch):
    check(sequence()(toy_batch(mask=MASK)), [[1 / 6] * 3, [0, 0.5, 0], [0, 0, 0]])


def test_constant_divides_by_rows_and_length(toy_batch):
    check(constant(4)(toy_batch(mask=MASK)), [[1 / 12] * 3, [0, 1 / 12, 0], [0, 0, 0]])
    with pytest.raises(ValueError, match=r"length=0"):
        constant(0)


def test_written_tokens_divides_by_all_that_stands_behind_the_prompts(toy_batch):
    spans = [[0, 0, 1], [2, 3, -1], [4, -1, -1]]  # six tokens of all authors, three of padding
    weights = written_tokens()(toy_batch(mask=MASK, spans=spans))
    check(weights, [[1 / 6] * 3, [0, 1 / 6, 0], [0, 0, 0]])


def test_turn_starts_weighs_the_first_trained_token_of_every_turn_alike(toy_batch):
    batch = toy_batch(turns=[[0, 0, -1, 1], [0, 1, 1, -1]], mask=[[0, 1, 0, 1], [0, 1, 1, 0]])
    assert turn_starts()(batch).mul(3).tolist() == [[0, 1, 0, 1], [0, 1, 0, 0]]


def test_the_denominator_is_the_trained_tokens_not_the_padded_size(toy_batch):
    batch = toy_batch(mask=[[1, 1, 0, 0], [1, 1, 0, 0]], advantages=[[1] * 4] * 2)
    loss_NT, _ = LOSSES["reinforce"]()(-torch.ones(2, 4), torch.zeros(2, 4), batch)
    assert (loss_NT * token()(batch)).sum().item() == 1  # divided by 8 it would be a half


@pytest.mark.parametrize("reduction", [token(), sequence(), constant(5), written_tokens()])
def test_an_empty_mask_weighs_nothing(toy_batch, reduction):
    check(reduction(toy_batch(mask=[[0, 0], [0, 0]])), [[0, 0], [0, 0]])


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_loss_gradient_and_metrics_do_not_depend_on_the_split_into_micro_batches(toy_batch, data):
    """Weights come from the whole batch: uneven and empty micro-batches add up all the same."""
    rows, columns = data.draw(st.integers(1, 6)), 4
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def draw():
        return torch.rand(rows, columns, generator=generator)

    mask = draw() < data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    batch = toy_batch(
        mask=mask, advantages=draw() - 0.5, old_logprobs=-draw(), ref_logprobs=-draw()
    )
    logp, entropy = -draw(), draw()
    policy = LOSSES[data.draw(st.sampled_from(sorted(LOSSES)))]()
    weights = [WEIGHTS[name]() for name in data.draw(st.lists(st.sampled_from(sorted(WEIGHTS))))]
    loss = with_entropy(with_kl(with_weights(policy, weights), 0.1, corrected=True), 0.01)
    batch = whole_batch(tuple(weights))(selected(policy, batch))
    reduction = data.draw(st.sampled_from([token(), sequence(), constant(7)]))
    weights_NT, mean_NT = reduction(batch), token()(batch)
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, rows), max_size=3))), rows]

    def step(parts):
        leaf = logp.clone().requires_grad_()
        total, logged = 0.0, {}
        for part in parts:
            loss_nT, metrics = loss(leaf[part], entropy[part], batch.rows(part))
            micro = (loss_nT * weights_NT[part]).sum()
            micro.backward()
            total += micro.item()
            for key, metric in metrics.items():
                logged[key] = logged.get(key, 0.0) + (metric * mean_NT[part]).sum().item()
        return total, leaf.grad, logged

    whole = step([torch.arange(rows)])
    split = step([order[a:b] for a, b in pairwise(cuts)])
    assert whole[0] == pytest.approx(split[0], abs=1e-6)
    torch.testing.assert_close(whole[1], split[1], atol=1e-6, rtol=1e-5)
    assert whole[2] == pytest.approx(split[2], abs=1e-6)

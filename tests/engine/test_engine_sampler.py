"""The sampler: supports, frequencies and log-probs, worked on three or four tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graft.engine.native.sampling.sampler import (
    SamplingParams,
    invert,
    lowest_kept,
    penalize,
    sample,
)
from graft.engine.native.sampling.uniforms import derive, uniforms

PROBS = [0.5, 0.3, 0.15, 0.05]


def sweep(count: int = 10_000) -> Tensor:
    """Evenly spaced uniforms: frequencies come out exact to 1 / count."""
    return (torch.arange(count) + 0.5) / count


def frequencies(
    probs: list[float], params: SamplingParams, allowed: list[bool] | None = None
) -> tuple[list[float], Tensor, Tensor, Tensor]:
    uniform = sweep()
    rows = len(uniform)
    logits = torch.tensor(probs).log().expand(rows, -1)
    mask = None if allowed is None else torch.tensor(allowed).expand(rows, -1)
    token, logp, entropy = sample(logits, uniform, params, mask)
    counts = torch.bincount(token, minlength=len(probs)) / rows
    return counts.tolist(), token, logp, entropy


def cuts(top_k: int = 4, top_p: float = 1.0, min_p: float = 0.0) -> SamplingParams:
    rows = len(sweep())
    return SamplingParams(
        top_k=torch.full((rows,), top_k),
        top_p=torch.full((rows,), top_p),
        min_p=torch.full((rows,), min_p),
    )


@pytest.mark.parametrize(
    "params, want",
    [
        (SamplingParams(), PROBS),
        (cuts(top_k=2), [0.625, 0.375, 0, 0]),
        (cuts(top_k=1), [1, 0, 0, 0]),
        (cuts(top_p=0.5), [1, 0, 0, 0]),
        (cuts(top_p=0.79), [0.625, 0.375, 0, 0]),
        (cuts(top_p=0.81), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (cuts(top_k=2, top_p=0.62), [1, 0, 0, 0]),  # top-p counts within what top-k left: .625
        (cuts(min_p=0.29), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),  # at least .145
        (cuts(min_p=0.5), [0.625, 0.375, 0, 0]),
        (cuts(), PROBS),
    ],
)
def test_truncation_leaves_the_support_and_frequencies_worked_by_hand(
    params: SamplingParams, want: list[float]
) -> None:
    got, token, logp, entropy = frequencies(PROBS, params)
    assert got == pytest.approx(want, abs=2e-4)
    expected = torch.tensor(want).log()[token]
    torch.testing.assert_close(logp, expected, atol=1e-6, rtol=0)
    assert entropy[0].item() == pytest.approx(-sum(p * math.log(p) for p in want if p), abs=1e-6)


def test_a_mask_renormalises_what_it_leaves() -> None:
    got, token, logp, entropy = frequencies(PROBS, SamplingParams(), [False, True, False, True])
    assert got == pytest.approx([0, 0.3 / 0.35, 0, 0.05 / 0.35], abs=2e-4)
    assert logp[token == 3][0].item() == pytest.approx(math.log(0.05 / 0.35), abs=1e-6)
    assert entropy[0].item() == pytest.approx(0.41012, abs=1e-5)


def test_a_penalty_makes_seen_tokens_less_likely_whatever_their_sign() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0], [2.0, -2.0, 1.0]])
    seen = torch.tensor([[True, True, False]] * 2)
    penalised = penalize(logits, seen, torch.tensor([1.25, 1.0]))
    torch.testing.assert_close(penalised, torch.tensor([[1.6, -2.5, 1.0], [2.0, -2.0, 1.0]]))


def test_temperature_two_takes_square_roots() -> None:
    rows = len(sweep())
    got, *_ = frequencies([0.64, 0.36], SamplingParams(temperature=torch.full((rows,), 2.0)))
    assert got == pytest.approx([0.8 / 1.4, 0.6 / 1.4], abs=2e-4)


def test_greedy_takes_the_likeliest_allowed_token_under_temperature_one() -> None:
    logits = torch.tensor([PROBS, PROBS]).log()
    allowed = torch.tensor([[True] * 4, [False, True, True, True]])
    params = SamplingParams(greedy=torch.tensor([True, True]))
    token, logp, _ = sample(logits, torch.tensor([0.99, 0.99]), params, allowed)
    assert token.tolist() == [0, 1]
    assert logp.tolist() == pytest.approx([math.log(0.5), math.log(0.6)], abs=1e-6)


def test_rows_have_their_own_settings() -> None:
    logits = torch.tensor(PROBS).log().expand(3, -1)
    params = SamplingParams(
        temperature=torch.tensor([1.0, 1e-4, 1.0]),
        top_k=torch.tensor([1, 4, 4]),
        top_p=torch.tensor([1.0, 1.0, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0]),
    )
    token, logp, _ = sample(logits, torch.tensor([0.9, 0.9, 0.99]), params)
    assert token.tolist() == [0, 0, 3]
    assert logp.tolist() == pytest.approx([0, 0, math.log(0.05)], abs=1e-6)


def test_ties_at_the_edge_of_top_k_stay_together() -> None:
    scores = torch.tensor([[0.3, 0.2, 0.2, 0.1]]).log()
    floor = lowest_kept(scores, torch.tensor([2]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert (scores >= floor).tolist() == [[True, True, True, False]]


def test_top_p_one_keeps_a_tail_that_rounding_would_lose() -> None:
    probs = torch.full((1, 1000), 1e-12)
    probs[0, 0] = 1.0
    everything = torch.tensor([1000]), torch.tensor([1.0]), torch.tensor([0.0])
    assert (probs.log() >= lowest_kept(probs.log(), *everything)).all()


@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-7, 0.1, 0.3, 1.0]), min_size=1, max_size=40),
    st.sampled_from([0.0, 1e-8, 0.3, 0.5, 1 - 2**-24, 1.0]),
)
def test_a_token_of_probability_zero_is_never_drawn(weights: list[float], uniform: float) -> None:
    if not any(weights):
        weights[0] = 1.0
    probs = torch.tensor([weights]) / sum(weights)
    assert probs[0, invert(probs, torch.tensor([uniform]))].item() > 0


def test_nothing_allowed_or_nan_logits_give_a_nan_log_prob() -> None:
    logits = torch.tensor([[0.0, 0.0], [math.nan, 0.0], [0.0, 0.0]])
    allowed = torch.tensor([[False, False], [True, True], [True, True]])
    _, logp, _ = sample(logits, torch.full((3,), 0.5), SamplingParams(), allowed)
    assert logp.isnan().tolist() == [True, True, False]


def test_uniforms_are_named_by_seed_key_and_position() -> None:
    keys = np.arange(4000, dtype=np.uint64)
    ones = np.ones(4000, dtype=np.uint64)
    drawn = uniforms(0, keys, ones)
    assert drawn.min() >= 0 and drawn.max() < 1
    np.testing.assert_array_equal(drawn[17:18], uniforms(0, keys[17:18], ones[17:18]))
    counts = np.histogram(drawn, bins=16, range=(0, 1))[0]
    assert ((counts - 250) ** 2 / 250).sum() < 37.7  # chi-square, 15 degrees, p = 0.001
    for other in (
        uniforms(1, keys, ones),
        uniforms(0, keys, ones * 2),
        uniforms(0, keys + 1, ones),
    ):
        assert abs(np.corrcoef(drawn, other)[0, 1]) < 0.05


def test_children_have_keys_of_their_own() -> None:
    keys = {derive(parent, number) for parent in range(30) for number in range(1, 30)}
    assert len(keys) == 30 * 29
    assert all(0 <= key < 2**64 for key in keys)

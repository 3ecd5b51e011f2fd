"""Experts that were split from a dense model, and the comparison of their routes."""

from __future__ import annotations

import pytest
import torch

import graft
from benchmarks.evidence.split_experts import (
    decoded_routes,
    figures,
    recorded,
    recorded_inputs,
    routes,
    split,
)
from graft.models.decoder import Decoder, causal
from graft.models.shape import ModelShape

SHAPE = ModelShape(
    "llama", 64, 16, 2, 2, 1, 8, 32, qk_norm=False, norm_eps=1e-5
)  # a dense model of 2 layers
TINY = {"family": "llama", "width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "ff": 32,
        "qk_norm": False}  # fmt: skip


def test_all_experts_together_are_the_mlp() -> None:
    dense = Decoder(SHAPE).initialise(0)
    experts = split(dense, 4, 4)
    tokens = torch.arange(9)
    with torch.no_grad(), recorded() as calls:
        theirs = dense(tokens, tokens, causal)
        ours = experts(tokens, tokens, causal)
    torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0)  # routers are small, not 0
    assert [tuple(call.shape) for call in calls] == [(9, 4), (9, 4)]
    assert calls[0][0].tolist() == [0, 1, 2, 3]


def test_routes_belong_to_the_position_that_was_computed_first() -> None:
    """Two layers: a prompt of two tokens, one decoded token, and a step ahead that is not used."""
    passes = [((5, 6), (0, 1)), ((7,), (2,)), ((7,), (2,))]
    inputs = [(torch.tensor(tokens), torch.tensor(positions)) for tokens, positions in passes]
    calls = [torch.full((len(tokens), 1), number) for number, (tokens, _) in enumerate(inputs)]
    calls = [call for call in calls for _ in range(2)]
    found = decoded_routes(calls, inputs, 2)
    assert list(found) == [2]
    token, chosen = found[2]
    assert token == 7 and chosen.tolist() == [[1], [1]]
    with pytest.raises(RuntimeError, match=r"5 calls of route\(\) in 3 passes of 2 layers"):
        decoded_routes(calls[:5], inputs, 2)


def test_a_captured_pass_is_copied() -> None:
    dense, buffer = Decoder(SHAPE).initialise(0), torch.arange(3)
    with torch.no_grad(), recorded_inputs(dense) as passes:
        dense(buffer, buffer, causal)
        buffer.zero_()
    dense(buffer, torch.arange(3), causal)
    assert [(tokens.tolist(), positions.tolist()) for tokens, positions in passes] == [
        ([0, 1, 2], [0, 1, 2])
    ]


@pytest.mark.slow
def test_the_engine_and_the_learner_choose_the_same_experts() -> None:
    policy = graft.load(shape=TINY, alphabet="bytes")
    policy.model = split(policy.model, 4, 2)
    found = routes(policy, True, attempts=2, tokens=5)
    assert found["decisions"] == 2 * 4 * 2
    if found["in_order"]:
        assert (found["other_layers"], found["other_tokens"], found["gap_max"]) == (0, 0, 0)


def test_results_become_rows() -> None:
    found = {"decisions": 5640, "other_layers": 0.25, "other_tokens": 1.0, "gap_mean": 1e-3}
    case = {"device": "cuda", "dtype": "bfloat16", "exact": False, "routes": found}
    layers, tokens, gap = figures(case)
    assert (layers.name, layers.value, layers.unit) == (
        "routes.cuda.bfloat16.inexact.layers",
        25,
        "%",
    )
    assert (tokens.value, gap.value, layers.note) == (100, 1e-3, "of 5,640")
    assert layers.what.startswith("bfloat16, model.exact=false, untrained routers: ")

"""Experts that were split from a dense model, and the comparison of their routes."""

from __future__ import annotations

import torch

from benchmarks.evidence.split_experts import recorded, split
from graft.models.decoder import Decoder, causal
from graft.models.shape import ModelShape

SHAPE = ModelShape(
    "llama", 64, 16, 2, 2, 1, 8, 32, qk_norm=False, norm_eps=1e-5
)  # a dense model of 2 layers


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

"""Recurrent layers in bursts: their states and rows have the learner's bits, and forks read nobody else's.

The kernels run on the GPU, or in Triton's interpreter with small sizes.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from burst_kit import assert_same, engine_on
from engine_kit import prompt, sample_all
from test_bits import num_unequal
from test_gpu_bits import answered, grow, in_order

from graft.engine.native.engine import NativeEngine
from graft.engine.native.kv import states
from graft.models.recurrence import CHUNK, Recurrence
from graft.models.tree.path_blocks import BLOCK
from graft.types import Completion, Sampling

pytest.importorskip("triton")

SMALL: dict[str, Any] = {"layers": 2, "recurrent_layers": (0,), "width": 16, "ff": 16}
DELTA: dict[str, Any] = SMALL | {
    "family": "qwen3_5_text",
    "recurrence": Recurrence("delta", 3, 1, 8, 2, 8),
    "attention_gate": True,
    "norm_offset": True,
    "rotary_share": 0.5,
}
MAMBA: dict[str, Any] = SMALL | {
    "family": "granitemoehybrid",
    "recurrence": Recurrence("mamba", 3, 1, 8, 2, 8, conv_bias=True),
    "qk_norm": False,
}
CONVOLUTION: dict[str, Any] = SMALL | {
    "family": "lfm2",
    "recurrence": Recurrence("conv", 3, value_dim=16),
}


@pytest.mark.parametrize(
    "changes",
    [DELTA, pytest.param(MAMBA, marks=pytest.mark.slow), CONVOLUTION],
    ids=["delta", "mamba", "conv"],
)
def test_answers_over_the_end_of_a_chunk_have_the_learners_bits(
    changes: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two forks of a prompt, inside a chunk that both then end in one burst."""
    decoder = in_order(monkeypatch, device, **changes)
    rows = answered(decoder, CHUNK - 1, 2, Sampling(temperature=0.7, max_tokens=4))
    assert num_unequal(decoder, rows, random.Random(0), temperature=0.7) == (0, 8)


@pytest.mark.slow
def test_a_tree_in_few_slots_has_the_learners_bits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks, tool results, states that are given up, and bursts that are cut short."""
    monkeypatch.setattr(states, "STATE_BYTES", 0)
    monkeypatch.setattr(states, "STATE_SHARE", 0.0)
    decoder = in_order(monkeypatch, device, **DELTA)
    how: dict[str, Any] = {"kv_tokens": BLOCK * 12, "max_running": 4}
    _, rows, rng = grow(decoder, 1, 1, 20, **how)
    assert max(len(row.tokens) for row in rows) > CHUNK
    unequal, total = num_unequal(decoder, rows, rng, temperature=0.7)
    assert (unequal, total > 20) == (0, True)


@pytest.mark.slow
def test_forks_of_what_a_burst_has_written_draw_what_plain_steps_draw(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the chunk that the burst has ended, at its end, and in the next."""
    decoder = in_order(monkeypatch, device, **DELTA)

    def play(engine: NativeEngine) -> list[Completion]:
        context = engine.open(prompt(CHUNK - 3), key=1)
        (first,) = sample_all([context], Sampling(max_tokens=6))
        forks = [context.fork(key=at, at=at) for at in (CHUNK - 2, CHUNK, CHUNK + 2)]
        return [first, *sample_all([context, *forks], Sampling(max_tokens=2))]

    found = play(engine_on(device, decoder=decoder, page_size=BLOCK))
    assert_same(found, play(engine_on(device, decoder=decoder, page_size=BLOCK, kernels=False)))

"""Families that tensor parallelism does not split: over 2 processes FSDP2 computes what one computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from graft.models.recurrence import Recurrence
from graft.models.shape import Experts
from tests.models.test_sharded import QWEN2, QWEN3, compare, far, refusal, weights_survive
from tests.processes import Processes

SHAPES = {
    "olmoe": replace(
        QWEN3, family="olmoe", joint_norm=True, experts=Experts(5, 2, 8), out_bias=True
    ),
    "granite, actions": replace(
        QWEN3,
        family="granitemoe",
        qk_norm=False,
        experts=Experts(5, 2, 8, renormalise=True),
        embedding_scale=3.0,
        residual_scale=0.4,
        logits_divisor=2.0,
        extra=3,
    ),
    "gpt-oss": replace(
        QWEN2,
        family="gpt_oss",
        experts=Experts(5, 2, 8, renormalise=True, biased=True, swiglu_limit=0.5),
        sinks=True,
        windows=(3, 0),
        out_bias=True,
    ),
    "qwen3-next": replace(
        QWEN3,
        family="qwen3_next",
        recurrence=Recurrence("delta", 4, 2, 8, 4, 6, by_key_head=True),
        recurrent_layers=(0,),
        experts=Experts(5, 2, 8, renormalise=True, shared_ff=8, shared_gate=True),
        attention_gate=True,
        norm_offset=True,
    ),
    "granite 4": replace(
        QWEN3,
        family="granitemoehybrid",
        qk_norm=False,
        recurrence=Recurrence(
            "mamba", 4, 2, 8, 4, 6, conv_bias=True, bias=True, least_step=0.0, most_step=5.0
        ),
        recurrent_layers=(0,),
        rotary_share=0.0,
        residual_scale=0.4,
    ),
    "lfm2, experts": replace(
        QWEN3,
        family="lfm2_moe",
        recurrence=Recurrence("conv", 3, value_dim=QWEN3.width, conv_bias=True, bias=True),
        recurrent_layers=(0,),
        experts=Experts(5, 2, 8, router="sigmoid", sum_eps=1e-6),
        dense_layers=(1,),
    ),
    "nemotron-h, actions": replace(
        QWEN3,
        family="nemotron_h",
        layers=4,
        recurrence=Recurrence("mamba", 4, 2, 8, 4, 6, bias=True, by_group=True),
        recurrent_layers=(0,),
        mlp_layers=(2, 3),
        dense_layers=(2,),
        experts=Experts(5, 3, 8, router="sigmoid", renormalise=True, shared_ff=12),
        activation="relu2",
        tied=False,
        qk_norm=False,
        rotary_share=0.0,
        extra=2,
    ),
    "qwen3.5, actions": replace(
        QWEN2,
        family="qwen3_5_text",
        qk_norm=True,
        qkv_bias=False,
        recurrence=Recurrence("delta", 3, 1, 6, 3, 5),
        recurrent_layers=(0,),
        attention_gate=True,
        norm_offset=True,
        extra=2,
    ),
}


@pytest.fixture(scope="module")
def pair() -> Iterator[Processes]:
    with Processes(2) as group:
        yield group


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_layers_that_tp_cannot_split_are_joined_over_dp(pair, shape):
    assert not far(pair.run(compare, shape, 2, 1, bool(shape.extra)))
    for found in pair.run(weights_survive, shape, 2, 1):
        assert all(found.values()), found
    for refused in pair.run(refusal, shape, 1, 2):
        assert "parallel.shard" in refused

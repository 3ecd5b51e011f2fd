"""Runs take the kernels of recurrent layers only where a recipe asks for them, and where there is a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graft.config import Config, ConfigError, check
from graft.engine.native.kv.states import slot_bytes, state_bytes, state_limit
from graft.models.decoder import Decoder
from graft.models.recurrence import CHUNK, Recurrence
from graft.models.shape import ModelShape
from graft.text.tokenizer import FastTokenizer
from graft.train.rollouts.rollout_engine import make_engine, refuse_external

SHAPE = ModelShape(
    "qwen3_5_text", 256, 32, 2, 2, 1, 16, 32, rotary_share=0.5, attention_gate=True, norm_offset=True,
    recurrence=Recurrence("delta", 4, 1, 8, 2, 8), recurrent_layers=(0,),
)  # fmt: skip


def recipe(**args: Any) -> Config:
    model = {"shape": {"width": 32, "layers": 1}, "device": "cpu"}
    return check({"engine": {"args": args}, "task": {"env": "calculator"}, "model": model})


@pytest.mark.parametrize(
    ("args", "is_refused"), [({"kernels": True}, False), ({"kernels": 2}, True), ({"a": 1}, True)]
)
def test_the_native_engine_has_one_argument(args: dict[str, Any], is_refused: bool) -> None:
    config = recipe(**args)
    if not is_refused:
        return refuse_external(config, "independent")
    with pytest.raises(ConfigError, match=r"engine\.args"):
        refuse_external(config, "independent")


def test_kernels_are_refused_without_a_gpu() -> None:
    tokenizer = FastTokenizer.characters("0123456789")
    with pytest.raises(ConfigError, match=r"engine\.args"):
        make_engine(recipe(kernels=True), Decoder(SHAPE), tokenizer)


def test_slots_on_a_gpu_are_a_share_of_its_memory() -> None:
    """Of inputs of convolutions in the weights' dtype, and of no more tokens than the pool has."""
    assert SHAPE.recurrence is not None
    limit = state_limit(torch.device("cuda"), 1_000_000)
    assert limit == 450_000
    size = slot_bytes(SHAPE.recurrence, 1, torch.bfloat16)
    inputs = (CHUNK + 2 * 3) * SHAPE.recurrence.channels
    assert slot_bytes(SHAPE.recurrence, 1) - size == 2 * inputs
    many = state_bytes(SHAPE, 1 << 20, limit, torch.bfloat16)
    assert many == (limit // size + 1) * size
    assert state_bytes(SHAPE, 20 * CHUNK, limit, torch.bfloat16) == 21 * size

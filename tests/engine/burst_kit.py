"""Engines with kernels beside engines without: both must draw the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_kit import assert_equals_the_model, prompt, tiny_decoder, tiny_engine

from graft.engine.native.context import NativeContext
from graft.engine.native.engine import NativeEngine
from graft.models.decoder import Decoder
from graft.types import Completion

PAGE = 16
Scenario = Callable[[NativeEngine], list[Completion]]


def small_decoder(**changes: Any) -> Decoder:
    """One layer: the interpreter takes its time for each."""
    return tiny_decoder(**{"layers": 1, "head_dim": 16, "heads": 2, "kv_heads": 1, **changes})


def engine_on(
    device: torch.device, kernels: bool = True, decoder: Decoder | None = None, **options: Any
) -> NativeEngine:
    """An engine with segments of four steps."""
    decoder = (decoder or small_decoder()).to(device)
    engine = tiny_engine(decoder, **{"page_size": PAGE, "kernels": kernels, **options})
    engine._loop.mean_length = 32.0
    return engine


def assert_all_exact(
    engine: NativeEngine,
    before: list[list[int]],
    completions: list[Completion],
    temperature: float = 1.0,
    allowed: torch.Tensor | None = None,
) -> None:
    """Against a full forward on the CPU."""
    decoder = Decoder(engine.decoder.shape)
    decoder.load_state_dict(engine.decoder.state_dict())
    for tokens, completion in zip(before, completions, strict=True):
        assert_equals_the_model(decoder, tokens, completion, temperature, allowed)


def assert_same(some: list[Completion], others: list[Completion]) -> None:
    assert [c.tokens for c in some] == [c.tokens for c in others]
    assert [c.actions for c in some] == [c.actions for c in others]
    assert [c.finish for c in some] == [c.finish for c in others]
    assert [c.modes for c in some] == [c.modes for c in others]
    for mine, other in zip(some, others, strict=True):
        assert mine.logprobs == pytest.approx(other.logprobs, abs=2e-5)
        assert mine.entropies == pytest.approx(other.entropies, abs=5e-5)


def run_both(device: torch.device, scenario: Scenario, **options: Any) -> list[Completion]:
    """The scenario's completions, the same with bursts and without."""
    completions = scenario(engine_on(device, **options))
    assert_same(completions, scenario(engine_on(device, kernels=False, **options)))
    return completions


def open_forks(engine: NativeEngine, *sizes: tuple[int, int]) -> list[NativeContext]:
    """(tokens of a prompt, forks of it); one fork: a context that shares nothing."""
    contexts: list[NativeContext] = []
    for number, (length, forks) in enumerate(sizes):
        root = engine.open(prompt(length, number))
        contexts += [root.fork() for _ in range(forks)] if forks > 1 else [root]
    return contexts

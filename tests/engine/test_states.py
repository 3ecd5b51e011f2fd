"""States of recurrent layers: shared at forks, computed again where they are not kept, and never lost."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from engine_kit import prompt, tiny_decoder
from test_bits import Trees, num_unequal, ordered

from graft.engine.errors import EngineError
from graft.engine.native import engine as native
from graft.engine.native.engine import NativeEngine
from graft.engine.native.kv import states
from graft.models.decoder import Decoder
from graft.models.layers.chunks import ChunkRows, next_state
from graft.models.order_probe import find_order
from graft.models.recurrence import CHUNK, Recurrence
from graft.types import Completion, Sampling

HYBRID: dict[str, Any] = {
    "family": "qwen3_5_text",
    "layers": 3,
    "recurrence": Recurrence("delta", 4, 2, 8, 4, 8),
    "recurrent_layers": (0, 1),
    "attention_gate": True,
    "norm_offset": True,
    "rotary_share": 0.5,
}


CONVOLUTIONS: dict[str, Any] = {
    "family": "lfm2",
    "recurrence": Recurrence("conv", 3, value_dim=32, conv_bias=True, bias=True),
    "recurrent_layers": (0,),
}


@pytest.fixture(scope="module", params=[HYBRID, CONVOLUTIONS], ids=["delta", "conv"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return ordered(**request.param)


def draw(engine: NativeEngine, tokens: list[int], key: int, count: int = 3) -> Completion:
    async def main() -> Completion:
        with engine.open(tokens, key) as context:
            return await context.sample(Sampling(max_tokens=count))

    return asyncio.run(main())


def free_slots(engine: NativeEngine) -> tuple[int, int]:
    kept = engine._tree.states
    assert kept is not None
    return kept.states.total - kept.states.free, kept.rows.total - kept.rows.free


def test_a_fork_at_any_token_draws_what_a_new_context_draws(decoder: Decoder) -> None:
    """And computes no more than the chunk in which it forks."""
    tokens = prompt(2 * CHUNK + 9, 1)
    engine = NativeEngine(decoder, kv_tokens=4096, page_size=16)
    fresh = NativeEngine(decoder, kv_tokens=4096, page_size=16)

    async def main() -> None:
        with engine.open(tokens, 1) as context:
            await context.sample(Sampling(max_tokens=4))
            for at in range(1, len(tokens) + 1):
                before = engine.stats["prefill_tokens"]
                with context.fork(key=7, at=at) as fork:
                    done = await fork.sample(Sampling(max_tokens=3))
                again = await asyncio.to_thread(draw, fresh, tokens[:at], 7)
                assert (done.tokens, done.logprobs) == (again.tokens, again.logprobs), at
                assert engine.stats["prefill_tokens"] - before <= CHUNK

    asyncio.run(main())
    assert free_slots(engine) == (0, 0)


def test_a_sample_that_is_given_up_leaves_the_context_as_it_was(decoder: Decoder) -> None:
    tokens = prompt(CHUNK - 5, 2)
    engine = NativeEngine(decoder, kv_tokens=4096, page_size=16)

    async def main() -> Completion:
        with engine.open(tokens, 3) as context:
            await context.sample(Sampling(max_tokens=2))
            length = len(context.tokens)
            waiting = asyncio.ensure_future(context.sample(Sampling(max_tokens=500)))
            for _ in range(60):
                await asyncio.sleep(0)
            assert len(context.tokens) > CHUNK + 5  # beyond the end of the chunk
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert len(context.tokens) == length
            return await context.sample(Sampling(max_tokens=5))

    done = asyncio.run(main())
    start = draw(NativeEngine(decoder, kv_tokens=4096, page_size=16), tokens, 3, 2)
    whole = draw(NativeEngine(decoder, kv_tokens=512, page_size=16), [*tokens, *start.tokens], 3, 5)
    assert (done.tokens, done.logprobs) == (whole.tokens, whole.logprobs)
    assert free_slots(engine) == (0, 0)


def test_contexts_of_which_nothing_is_left_hold_no_slots(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than there are slots: a sample on a single token was given up in each."""
    monkeypatch.setattr(states, "STATE_BYTES", 0)
    engine = NativeEngine(decoder, kv_tokens=512, page_size=16)

    async def main() -> None:
        contexts = [engine.open([1]) for _ in range(states.MIN_SLOTS + 1)]
        for context in contexts:
            waiting = asyncio.ensure_future(context.sample(Sampling(max_tokens=9)))
            while len(context.tokens) < 3:
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert free_slots(engine) == (0, 0)
        assert len((await contexts[0].sample(Sampling(max_tokens=2))).tokens) == 2

    asyncio.run(main())


@pytest.mark.parametrize(("chunk", "running"), [(20, 9), (2048, 1024), (33, 2)])
def test_with_few_slots_all_attempts_end_and_have_the_learners_bits(
    decoder: Decoder, chunk: int, running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "STATE_BYTES", 0)
    engine = NativeEngine(
        decoder, kv_tokens=2048, page_size=16, prefill_chunk=chunk, max_running=running
    )
    kept = engine._tree.states
    assert kept is not None and kept.states.total == kept.rows.total == states.MIN_SLOTS
    rng = random.Random(chunk)
    rows = Trees(engine, {"temperature": 0.8}, rng, longest=50).grow(3)
    assert max(len(row.tokens) for row in rows) > 2 * CHUNK
    assert num_unequal(decoder, rows, rng, temperature=0.8)[0] == 0


def test_new_weights_are_not_read_with_old_states(decoder: Decoder) -> None:
    tokens = prompt(CHUNK + 3, 4)
    other = Decoder(decoder.shape)
    other.load_state_dict(decoder.state_dict())
    other.use_order(decoder.order)
    engine = NativeEngine(other, kv_tokens=1024, page_size=16)

    async def main() -> Completion:
        with engine.open(tokens, 5) as context:
            await context.sample(Sampling(max_tokens=2))
            length = len(context.tokens)
            with torch.no_grad():
                other.blocks[0].attention.out.weight.mul_(1.5)
            engine.load(None, 1)
            with context.fork(key=6, at=length - 1) as fork:
                return await fork.sample(Sampling(max_tokens=4))

    done = asyncio.run(main())
    start = draw(NativeEngine(decoder, kv_tokens=1024, page_size=16), tokens, 5, 2)
    fresh = NativeEngine(other, kv_tokens=1024, page_size=16)
    again = draw(fresh, [*tokens, *start.tokens[:1]], 6, 4)
    assert (done.tokens, done.logprobs) == (again.tokens, again.logprobs)


def test_a_convolution_has_inputs_and_no_state(decoder: Decoder) -> None:
    sizes = decoder.shape.recurrence
    assert sizes is not None
    kept = states.States(decoder.shape, 1024, decoder.device)
    pools = kept.state, kept.k, kept.u, kept.log, kept.tails, kept.inputs
    numbers = [pool[0, 0].numel() for pool in pools]
    assert states.slot_bytes(sizes, 1) == 4 * sum(numbers)
    assert all(numbers[:4]) == sizes.has_state and all(numbers[4:])


def test_kernels_that_no_gpu_has_run_are_taken_only_where_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "has_kernels", lambda _: True)
    with pytest.raises(EngineError, match="kernels=True"):
        NativeEngine(tiny_decoder(**HYBRID))
    asked = NativeEngine(tiny_decoder(**HYBRID), kernels=True, kv_tokens=64)
    assert asked._loop.runner.has_bursts


def test_an_order_holds_for_the_states_at_the_ends_of_chunks_too() -> None:
    """One head with keys of one number: a product of one matrix and one column may be another routine."""
    sizes = Recurrence("mamba", 4, 1, 1, 1, 32)
    shape: dict[str, Any] = {**HYBRID, "recurrence": sizes, "attention_gate": False}
    shape |= {"family": "granitemoehybrid", "qk_norm": False, "norm_offset": False}
    if find_order(tiny_decoder(**shape)) is None:
        return
    state, u, k = (torch.randn(40, 1, *size) for size in ((32, 1), (CHUNK, 32), (CHUNK, 1)))
    rows = ChunkRows(k, u, -torch.rand(40, 1, CHUNK).cumsum(-1))
    whole = next_state(state, rows)
    for n in range(40):
        alone = next_state(state[n : n + 1], ChunkRows(*(x[n : n + 1] for x in rows)))
        assert torch.equal(alone[0], whole[n])


def test_nothing_is_drafted(decoder: Decoder) -> None:
    assert not NativeEngine(decoder, kv_tokens=512, page_size=16).drafts

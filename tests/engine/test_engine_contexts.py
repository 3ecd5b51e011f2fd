"""Contexts over time: turns, forks, aborts, windows, weights that change meanwhile."""

from __future__ import annotations

import asyncio

import pytest
import torch
from engine_kit import (
    VOCAB,
    assert_equals_the_model,
    prompt,
    sample_all,
    sample_one,
    tiny_decoder,
    tiny_engine,
)

import graft.protocols as protocols
from graft.actions.grammar import Automaton
from graft.actions.space import ActionSpace
from graft.engine import ENGINES
from graft.engine.errors import EngineError
from graft.engine.native.engine import NativeEngine
from graft.registry import resolve
from graft.types import Completion, Finish, Sampling


def test_the_native_engine_of_the_table_meets_the_protocol() -> None:
    assert resolve("native", ENGINES, "engine") is NativeEngine
    engine: protocols.Engine = tiny_engine()
    context: protocols.Context = engine.open([1])
    assert context.tokens == [1] and engine.version == 0 and engine.vocab_size == VOCAB


def test_a_token_beyond_the_vocabulary_points_to_the_tokenizer() -> None:
    with pytest.raises(
        ValueError, match=f"vocabulary of {VOCAB}; is the tokenizer that of another"
    ):
        tiny_engine().open([1, VOCAB])


def test_appending_after_a_sample_continues_the_same_context() -> None:
    decoder = tiny_decoder()
    engine = tiny_engine(decoder)
    with engine.open(prompt(6)) as context:
        for turn in range(4):
            before = list(context.tokens)
            completion = sample_one(context, Sampling(max_tokens=3 + turn))
            assert_equals_the_model(decoder, before, completion)
            context.append(prompt(turn * 3, salt=turn))  # nothing at all on the first turn
    # the prompt (5 + 1), then each turn its new tokens and the one drawn last
    assert engine.stats["prefill_tokens"] + engine.stats["decode_tokens"] == 6 + 18 - 1 + 9
    assert engine.stats["pages_free"] == engine.stats["pages_total"]


def test_closing_while_sampling_resolves_with_the_tokens_so_far() -> None:
    engine = tiny_engine()

    async def main() -> Completion:
        context = engine.open(prompt(5))
        task = asyncio.ensure_future(context.sample(Sampling(max_tokens=200)))
        while engine.stats["steps"] < 4:
            await asyncio.sleep(0)
        context.close()
        context.close()
        return await task

    completion = asyncio.run(main())
    assert completion.finish is Finish.ABORT
    assert len(completion.tokens) == len(completion.logprobs) == 4
    assert engine.stats["pages_free"] == engine.stats["pages_total"]


def test_a_cancelled_sample_leaves_the_context_as_it_was() -> None:
    decoder = tiny_decoder()
    engine = tiny_engine(decoder)
    sampling = Sampling(max_tokens=12)

    async def main() -> Completion:
        context = engine.open(prompt(6), key=3)
        task = asyncio.ensure_future(context.sample(Sampling(max_tokens=200)))
        while engine.stats["steps"] < 9:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert context.tokens == prompt(6)
        return await context.sample(sampling)

    again = asyncio.run(main())
    fresh = sample_one(tiny_engine(decoder).open(prompt(6), key=3), sampling)
    assert again.tokens == fresh.tokens
    assert engine.stats["running"] == 0


def test_an_event_loop_that_ends_early_does_not_break_the_next_one() -> None:
    engine = tiny_engine()
    context = engine.open(prompt(4))

    async def give_up() -> None:
        task = asyncio.ensure_future(context.sample(Sampling(max_tokens=500)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(give_up())
    assert engine.stats["running"] == 0
    assert len(sample_one(context, Sampling(max_tokens=3)).tokens) == 3


def test_a_context_opened_later_joins_before_the_others_end() -> None:
    engine = tiny_engine()

    async def main() -> tuple[int, int]:
        early = asyncio.ensure_future(engine.open(prompt(4)).sample(Sampling(max_tokens=40)))
        while engine.stats["steps"] < 10:
            await asyncio.sleep(0)
        late = await engine.open(prompt(4, 1)).sample(Sampling(max_tokens=5))
        assert len(late.tokens) == 5 and not early.done()
        steps = engine.stats["steps"]
        await early
        return steps, engine.stats["steps"]

    assert asyncio.run(main()) == (15, 40)


def test_the_window_ends_a_completion_with_length() -> None:
    engine = tiny_engine(tiny_decoder(max_positions=12))
    context = engine.open(prompt(8))
    completion = sample_one(context, Sampling(max_tokens=50))
    assert len(completion.tokens) == 4 and completion.finish is Finish.LENGTH
    context.append([1, 2])
    full = sample_one(context, Sampling())
    assert full.tokens == [] and full.finish is Finish.LENGTH


def test_a_context_larger_than_the_pool_fails_alone_and_names_the_setting_to_raise() -> None:
    engine = tiny_engine(kv_tokens=32)
    small, large = engine.open(prompt(6)), engine.open(prompt(33))

    async def main() -> list[Completion | BaseException]:
        samples = (c.sample(Sampling(max_tokens=8)) for c in (small, large))
        return await asyncio.gather(*samples, return_exceptions=True)

    done, failed = asyncio.run(main())
    assert isinstance(done, Completion) and len(done.tokens) == 8
    assert isinstance(failed, EngineError)
    assert "33 tokens needs 9 KV pages" in str(failed) and "engine.kv_tokens" in str(failed)
    assert large.tokens == prompt(33)
    # one that grows beyond the pool fails when it gets there
    with pytest.raises(EngineError, match="33 tokens needs 9 KV pages of 4 tokens, and the pool"):
        sample_one(engine.open(prompt(30)), Sampling(max_tokens=20))
    # and one that waits behind it is served
    single = tiny_engine(kv_tokens=32, max_running=1)
    contexts = [single.open(prompt(40)), single.open(prompt(6))]

    async def queue() -> list[Completion | BaseException]:
        samples = (c.sample(Sampling(max_tokens=2)) for c in contexts)
        return await asyncio.gather(*samples, return_exceptions=True)

    hopeless, served = asyncio.run(queue())
    assert isinstance(hopeless, EngineError) and isinstance(served, Completion)
    # exactly the pool is enough, even on a stem that shares its half page
    fork = engine.open(prompt(27)).fork()
    assert len(sample_one(fork, Sampling(max_tokens=6)).tokens) == 6


def test_weights_changed_in_place_are_used_after_load() -> None:
    decoder = tiny_decoder(seed=1)
    engine = tiny_engine(decoder)
    context = engine.open(prompt(20))
    fork = context.fork()
    assert sample_one(context, Sampling(max_tokens=4)).version == 0
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.3)
    engine.load(None, 1)
    for each in (context, fork):
        before = list(each.tokens)
        completion = sample_one(each, Sampling(max_tokens=7))
        assert completion.version == 1
        assert_equals_the_model(decoder, before, completion)


def test_a_sample_in_progress_keeps_its_pages_and_they_are_dropped_afterwards() -> None:
    decoder = tiny_decoder()
    engine = tiny_engine(decoder)
    context = engine.open(prompt(9))

    async def main() -> Completion:
        task = asyncio.ensure_future(context.sample(Sampling(max_tokens=12)))
        while engine.stats["steps"] < 5:
            await asyncio.sleep(0)
        with torch.no_grad():
            decoder.embed.weight.mul_(0.5)
        engine.load(None, 4)
        return await task

    completion = asyncio.run(main())
    assert completion.version == 0 and len(completion.tokens) == 12
    assert engine.stats["prefill_tokens"] == 9  # not computed again while it samples
    before = list(context.tokens)
    after = sample_one(context, Sampling(max_tokens=5))
    assert after.version == 4
    assert_equals_the_model(decoder, before, after)


def test_weights_by_name_are_copied_into_the_decoder() -> None:
    from graft.models.io.tensor_names import hf_names

    decoder, other = tiny_decoder(0), tiny_decoder(1)
    engine = tiny_engine(decoder)
    engine.load(hf_names(other), 2)
    completion = sample_one(engine.open(prompt(5)), Sampling(max_tokens=5))
    assert completion.version == 2
    assert_equals_the_model(other, prompt(5), completion)
    with pytest.raises(EngineError, match=r"unknown \['lm_head.weight'\]"):
        engine.load({**hf_names(other), "lm_head.weight": torch.zeros(1)}, 3)


def test_min_tokens_bans_stop_tokens_until_it_is_reached() -> None:
    decoder = tiny_decoder()
    everything = tuple(range(VOCAB - 1))
    engine = tiny_engine(decoder, eos_ids=[VOCAB - 1])
    sampling = Sampling(max_tokens=9, min_tokens=4, stop_tokens=everything[1:])
    completion = sample_one(engine.open(prompt(5)), sampling)
    assert completion.tokens[:4] == [0, 0, 0, 0]  # the only token that does not stop
    assert completion.logprobs[:4] == pytest.approx([0, 0, 0, 0], abs=1e-6)
    assert completion.finish in (Finish.STOP, Finish.LENGTH)
    free = sample_one(engine.open(prompt(5)), Sampling(max_tokens=9, stop_tokens=everything))
    assert len(free.tokens) == 1 and free.finish is Finish.STOP


def test_a_ban_that_leaves_nothing_fails_that_sample_only() -> None:
    engine = tiny_engine(eos_ids=range(VOCAB))
    stuck, fine = engine.open(prompt(5)), engine.open(prompt(6))

    async def main() -> list[Completion | BaseException]:
        samples = [
            stuck.sample(Sampling(max_tokens=5, min_tokens=2)),
            fine.sample(Sampling(max_tokens=5)),
        ]
        return await asyncio.gather(*samples, return_exceptions=True)

    failed, done = asyncio.run(main())
    assert isinstance(failed, EngineError) and "min_tokens=2 allows no token" in str(failed)
    assert isinstance(done, Completion) and len(done.tokens) == 1


def test_nan_weights_fail_and_leave_no_trace_in_the_pool() -> None:
    decoder = tiny_decoder()
    engine = tiny_engine(decoder, kv_tokens=64)
    saved = decoder.embed.weight.detach().clone()
    with torch.no_grad():
        decoder.embed.weight.fill_(torch.nan)
    with pytest.raises(EngineError, match="not finite"):
        sample_one(engine.open(prompt(30)), Sampling(max_tokens=5))
    with torch.no_grad():
        decoder.embed.weight.copy_(saved)
    engine.load(None, 1)
    completion = sample_one(engine.open(prompt(21)), Sampling(max_tokens=5))
    assert_equals_the_model(decoder, prompt(21), completion)


def test_an_error_in_the_model_reaches_every_sample_and_the_engine_survives() -> None:
    decoder = tiny_decoder()
    engine = tiny_engine(decoder)
    head, contexts = decoder.norm, [engine.open(prompt(4, salt)) for salt in range(3)]

    async def main() -> list[Completion | BaseException]:
        samples = [asyncio.ensure_future(c.sample(Sampling(max_tokens=50))) for c in contexts]
        while engine.stats["steps"] < 3:
            await asyncio.sleep(0)
        del decoder.norm
        return await asyncio.gather(*samples, return_exceptions=True)

    errors = asyncio.run(main())
    assert [type(error) for error in errors] == [AttributeError] * 3
    decoder.norm = head
    assert [context.tokens for context in contexts] == [prompt(4, salt) for salt in range(3)]
    before = prompt(4)
    completion = sample_one(contexts[0], Sampling(max_tokens=6))
    assert_equals_the_model(decoder, before, completion)


def test_closing_the_engine_ends_running_samples() -> None:
    engine = tiny_engine()
    context = engine.open(prompt(4))

    async def main() -> None:
        task = asyncio.ensure_future(context.sample(Sampling(max_tokens=500)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        engine.close()
        with pytest.raises(EngineError, match="engine was closed"):
            await task

    asyncio.run(main())
    context.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.open([1])


def test_misuse_is_refused_with_a_reason() -> None:
    engine = tiny_engine()
    with pytest.raises(ValueError, match="without tokens"):
        engine.open([])
    with pytest.raises(ValueError, match=f"token {VOCAB} is outside"):
        engine.open([1, VOCAB])
    context = engine.open([1])
    with pytest.raises(ValueError, match="token -1 is outside"):
        context.append([-1])
    with pytest.raises(EngineError, match="need a tokenizer"):
        sample_one(context, Sampling(stop=("x",)))
    with pytest.raises(EngineError, match="starts in mode 2"):
        sample_one(context, Sampling(), Automaton(start=2))
    with pytest.raises(EngineError, match="the grammar went to mode 1 "):
        sample_one(context, Sampling(), Automaton(default={0: 1}))
    assert context.tokens == [1]

    async def twice() -> None:
        task = asyncio.ensure_future(context.sample(Sampling(max_tokens=50)))
        await asyncio.sleep(0)
        for call in (lambda: context.append([1]), context.fork):
            with pytest.raises(EngineError, match="while it samples"):
                call()
        with pytest.raises(EngineError, match="while it samples"):
            await context.sample(Sampling())
        await task

    asyncio.run(twice())
    context.close()
    with pytest.raises(EngineError, match="closed context"):
        context.fork()


def test_spaces_and_sizes_the_engine_cannot_serve_are_refused_at_start() -> None:
    with pytest.raises(EngineError, match="extra actions need head rows"):
        tiny_engine(space=ActionSpace(VOCAB, extra=2))
    with pytest.raises(EngineError, match=f"has 5 tokens, the model has {VOCAB}"):
        tiny_engine(space=ActionSpace(5))
    with pytest.raises(ValueError, match="holds no page"):
        tiny_engine(kv_tokens=3)
    with pytest.raises(ValueError, match="prefill_chunk=0"):
        tiny_engine(prefill_chunk=0)


def test_the_default_pool_is_chosen_from_memory() -> None:
    engine = NativeEngine(tiny_decoder())
    assert engine.stats["pages_total"] * 16 == 65_536
    assert len(sample_all([engine.open([1])], Sampling(max_tokens=2))[0].tokens) == 2

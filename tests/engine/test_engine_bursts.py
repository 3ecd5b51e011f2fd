"""Bursts: many draws without the host; every completion equals the plain engine's.

The kernels run on the GPU, or in Triton's interpreter with small sizes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from burst_kit import (
    PAGE,
    assert_all_exact,
    assert_same,
    engine_on,
    open_forks,
    run_both,
    small_decoder,
)
from engine_kit import VOCAB, LetterTokenizer, gather, prompt, sample_all, sample_one

from graft.actions.grammar import Automaton
from graft.actions.space import ActionSpace
from graft.engine.errors import EngineError
from graft.engine.native.engine import NativeEngine
from graft.engine.native.scheduler import Scheduler
from graft.types import Completion, Finish, Sampling


def test_log_probs_of_forks_and_lone_contexts_equal_a_full_forward(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graft.engine.native.cuda import runner

    monkeypatch.setattr(runner, "MAX_SPLITS", 2)

    def scenario(engine: NativeEngine) -> list[Completion]:
        contexts = open_forks(engine, (41, 2), (70, 1), (1, 1))
        before = [list(context.tokens) for context in contexts]
        completions = sample_all(contexts, Sampling(temperature=0.9, max_tokens=3))
        assert_all_exact(engine, before, completions, 0.9)
        return completions

    completions = run_both(device, scenario, decoder=small_decoder(layers=2, kv_heads=2))
    assert all(len(c.tokens) == 3 and c.finish is Finish.LENGTH for c in completions)


def test_a_burst_goes_on_from_segment_to_segment(device: torch.device) -> None:
    def scenario(engine: NativeEngine) -> list[Completion]:
        contexts = open_forks(engine, (30, 2))
        completions = gather(contexts, [Sampling(max_tokens=n) for n in (10, 6)])
        assert_all_exact(engine, [prompt(30)] * 2, completions)
        return completions

    run_both(device, scenario)


def test_what_forks_share_is_read_in_spans(device: torch.device) -> None:
    engine = engine_on(device)
    sample_all(open_forks(engine, (41, 3), (3, 1)), Sampling(max_tokens=1))
    runner: Any = engine._loop.runner
    kept = [
        items for decode_state in runner._states.values() for items in decode_state._items.values()
    ]
    assert any(bool((items[:, 1] > 0).any()) for items in kept)


def test_a_stop_token_ends_the_completion_and_what_was_drawn_behind_it_is_forgotten(
    device: torch.device,
) -> None:
    stops = {0, 6, 12, 18}

    def scenario(engine: NativeEngine) -> list[Completion]:
        contexts = open_forks(engine, (35, 2), (6, 1), (15, 1))
        completions = sample_all(contexts, Sampling(max_tokens=8, stop_tokens=tuple(stops)))
        before = [list(context.tokens) for context in contexts]
        more = sample_all(contexts, Sampling(max_tokens=2))  # goes on right behind the stop
        assert_all_exact(engine, before, more)
        return completions + more

    completions = run_both(device, scenario)[:4]
    for completion in completions:
        assert stops.isdisjoint(completion.tokens[:-1])
        assert (completion.finish is Finish.STOP) == (completion.tokens[-1] in stops)
    assert len({len(c.tokens) for c in completions}) > 2  # they ended at different steps


def test_stop_tokens_are_not_drawn_before_min_tokens(device: torch.device) -> None:
    stops = tuple(range(0, VOCAB, 3))
    least = (0, 3, 5, 6)

    def scenario(engine: NativeEngine) -> list[Completion]:
        contexts = open_forks(engine, (20, 2), (4, 1), (9, 1))
        samplings = [Sampling(max_tokens=6, min_tokens=n, stop_tokens=stops) for n in least]
        return gather(contexts, samplings)

    for completion, few in zip(run_both(device, scenario), least, strict=True):
        assert len(completion.tokens) >= few
        assert set(completion.tokens[:few]).isdisjoint(stops)


def test_a_stop_string_may_be_completed_in_the_middle_of_a_segment(device: torch.device) -> None:
    """The device does not see stop strings: it keeps drawing, and the host discards the rest."""
    letters = np.zeros((1, VOCAB), dtype=bool)
    letters[0, :3] = True
    space = ActionSpace(VOCAB, allowed=letters)
    tokenizer, stops = LetterTokenizer(), ("bbb", "aa", "cc")

    def scenario(engine: NativeEngine) -> list[Completion]:
        contexts = [engine.open([0, 1, 2, 0], key=key) for key in range(4)]
        samplings = [
            Sampling(max_tokens=16, stop=stops),
            Sampling(max_tokens=16, stop=stops, min_tokens=7),
            Sampling(max_tokens=16, stop=("bbb",), stop_tokens=(0,)),
            Sampling(max_tokens=6),
        ]
        completions = gather(contexts, samplings)
        before = [list(context.tokens) for context in contexts]
        more = sample_all(contexts, Sampling(max_tokens=2))
        assert_all_exact(engine, before, more, allowed=torch.from_numpy(letters))
        return completions + more

    short, late, token, plain = run_both(device, scenario, tokenizer=tokenizer, space=space)[:4]
    assert all(tokenizer.decode(c.tokens).endswith(stops) for c in (short, late))
    assert not any(stop in tokenizer.decode(short.tokens[:-1]) for stop in stops)
    assert len(late.tokens) >= 7 > len(short.tokens)
    assert [c.finish for c in (short, late, token)] == [Finish.STOP] * 3
    assert plain.finish is Finish.LENGTH


def test_rows_with_and_without_a_grammar_share_a_batch(
    device: torch.device,
) -> None:
    allowed = np.zeros((2, VOCAB), dtype=bool)
    allowed[0, :12] = True
    allowed[1, 10:] = True
    grammar = Automaton(0, {(0, a): 1 for a in range(6)} | {(1, a): 0 for a in range(15, VOCAB)})

    def scenario(engine: NativeEngine) -> list[Completion]:
        contexts = open_forks(engine, (18, 2), (5, 1))
        before = [list(context.tokens) for context in contexts]
        sampling = Sampling(temperature=1.3, max_tokens=7)
        completions = gather(contexts, [sampling] * 3, [grammar, grammar, None])
        assert_all_exact(engine, before, completions, 1.3, torch.from_numpy(allowed))
        return completions

    completions = run_both(device, scenario, space=ActionSpace(VOCAB, allowed=allowed))
    for completion in completions[:2]:
        assert completion.modes == grammar.walk(completion.tokens)
    assert {mode for c in completions[:2] for mode in c.modes} == {0, 1}
    assert set(completions[2].modes) == {0}


@pytest.mark.slow
def test_rows_keep_their_own_settings(device: torch.device) -> None:
    settings = [
        Sampling(temperature=0, top_k=2, max_tokens=3),  # greedy: truncation does not matter
        Sampling(top_k=1, max_tokens=3),
        Sampling(temperature=1.5, max_tokens=3),
        Sampling(max_tokens=2),
        Sampling(top_k=4, max_tokens=3),
        Sampling(temperature=1.2, top_p=0.6, max_tokens=3),
        Sampling(min_p=0.3, max_tokens=3),
        Sampling(temperature=0.8, top_k=9, top_p=0.8, min_p=0.05, max_tokens=3),
        Sampling(temperature=0, repetition_penalty=3.0, max_tokens=6),  # more than a segment
        Sampling(temperature=1.2, top_p=0.9, repetition_penalty=1.5, max_tokens=6),
    ]
    engines: list[NativeEngine] = []

    def scenario(engine: NativeEngine) -> list[Completion]:
        engines.append(engine)
        return gather([engine.open(prompt(9)) for _ in settings], settings)

    greedy, top, warm, plain, *_ = run_both(device, scenario)
    assert greedy.tokens == top.tokens
    assert top.logprobs == pytest.approx([0.0] * 3, abs=1e-6)
    assert_all_exact(engines[0], [prompt(9)] * 2, [greedy, plain])
    assert_all_exact(engines[0], [prompt(9)], [warm], 1.5)


@pytest.mark.slow
def test_a_pool_too_small_for_all_requests_changes_no_draw(
    device: torch.device,
) -> None:
    def scenario(engine: NativeEngine) -> list[Completion]:
        contexts = [engine.open(prompt(13, salt)) for salt in range(3)]
        completions = sample_all(contexts, Sampling(max_tokens=22))
        return completions + sample_all([engine.open(prompt(40, 5))], Sampling(max_tokens=2))

    roomy, crowded = engine_on(device, kernels=False), engine_on(device, kv_tokens=4 * PAGE)
    assert_same(scenario(crowded), scenario(roomy))
    assert crowded.stats["preemptions"] > 0 and crowded.stats["evictions"] > 0


def test_a_completion_ends_where_the_window_does(device: torch.device) -> None:
    """The window is a whole number of pages, and a burst reserves no more."""

    def scenario(engine: NativeEngine) -> list[Completion]:
        contexts = [engine.open(prompt(n, n)) for n in (29, 5, 31)]
        completions = sample_all(contexts, Sampling(max_tokens=9))
        assert sample_one(contexts[0], Sampling()).tokens == []  # full: nothing to compute
        return completions

    completions = run_both(device, scenario, decoder=small_decoder(max_positions=2 * PAGE))
    assert [len(c.tokens) for c in completions] == [3, 9, 1]
    assert all(c.finish is Finish.LENGTH for c in completions)


def test_a_long_prompt_comes_in_chunks_while_others_draw(device: torch.device) -> None:
    def scenario(engine: NativeEngine) -> list[Completion]:
        contexts = [engine.open(prompt(n, n)) for n in (6, 90, 33)]
        before = [list(context.tokens) for context in contexts]
        completions = gather(contexts, [Sampling(max_tokens=n) for n in (9, 2, 2)])
        assert_all_exact(engine, before, completions)
        return completions

    run_both(device, scenario, prefill_chunk=19)


def test_a_tool_result_is_computed_before_the_next_draw(device: torch.device) -> None:
    def scenario(engine: NativeEngine) -> list[Completion]:
        contexts = open_forks(engine, (30, 2), (7, 1))
        completions: list[Completion] = []
        for turn in range(2):
            before = [list(context.tokens) for context in contexts]
            drawn = sample_all(contexts, Sampling(max_tokens=3, stop_tokens=(3,)))
            assert_all_exact(engine, before, drawn)
            completions += drawn
            for number, context in enumerate(contexts):
                context.append(prompt(1 + 9 * number, turn))  # one token, and more than a page
            contexts[-1] = contexts[-1].fork()
        return completions

    run_both(device, scenario)


def test_broken_weights_fail_the_request_and_leave_nothing_behind(device: torch.device) -> None:
    engine = engine_on(device, decoder=small_decoder(layers=2, tied=False))
    contexts = open_forks(engine, (20, 2), (5, 1))
    before = [list(context.tokens) for context in contexts]
    weights = engine.decoder.state_dict()
    # one logit of many: the interpreter finds no maximum where there is nothing but NaN
    name = "blocks.1.attention.norm.weight" if device.type == "cuda" else "head.weight"
    sound = weights[name].clone()
    weights[name][5] = torch.nan
    with pytest.raises(EngineError, match="not finite"):
        sample_all(contexts, Sampling(max_tokens=2))
    weights[name].copy_(sound)
    engine.load(None, 1)
    assert engine.stats["running"] == 0
    completions = sample_all(contexts, Sampling(max_tokens=2))
    assert [c.version for c in completions] == [1] * 3
    assert_all_exact(engine, before, completions)


def test_a_request_that_can_draw_nothing_does_not_spoil_the_others(device: torch.device) -> None:
    """When it fails all pages are dropped; draws that the burst made after that are discarded."""
    allowed = np.zeros((1, VOCAB), dtype=bool)
    allowed[0, :3] = True
    engine = engine_on(device, space=ActionSpace(VOCAB, allowed=allowed))
    contexts = [engine.open(prompt(n, n)) for n in (9, 20, 12)]
    before = [list(context.tokens) for context in contexts]
    impossible = Sampling(max_tokens=6, min_tokens=1, stop_tokens=(0, 1, 2))

    async def main() -> list[Any]:
        samplings = [Sampling(max_tokens=6)] * 2 + [impossible]
        samples = (c.sample(s) for c, s in zip(contexts, samplings, strict=True))
        return await asyncio.gather(*samples, return_exceptions=True)

    *completions, error = asyncio.run(main())
    assert isinstance(error, EngineError) and "allows no token" in str(error)
    assert_all_exact(engine, before[:2], completions, allowed=torch.from_numpy(allowed))
    assert contexts[2].tokens == before[2]


def test_batches_of_other_sizes_follow_each_other(device: torch.device) -> None:
    """Buffers and captured steps are kept from batch to batch; old contents are not used."""
    largest = (8, 8) if device.type == "cuda" else (2, 2)

    def scenario(engine: NativeEngine) -> list[Completion]:
        completions: list[Completion] = []
        for groups, forks in (largest, (1, 3), (1, 2)):
            contexts = open_forks(engine, *((34 + number, forks) for number in range(groups)))
            before = [list(context.tokens) for context in contexts]
            drawn = sample_all(contexts, Sampling(max_tokens=2))
            assert_all_exact(engine, before, drawn)
            completions += drawn
        return completions

    run_both(device, scenario, kv_tokens=8192)


def test_a_step_is_recorded_over_empty_buffers(device: torch.device) -> None:
    """No row is alive and no work item is left: those of an older batch may name rows that this one lacks."""
    from graft.engine.native.cuda.burst import GraphKey
    from graft.engine.native.cuda.runner import batch_size

    engine = engine_on(device)
    sample_all(open_forks(engine, (41, 4)), Sampling(max_tokens=2))  # leaves items behind
    runner: Any = engine._loop.runner
    decode_state = runner._states[batch_size(4), 0]
    (count,) = (count for count, items in decode_state._items.items() if items.any())
    key = GraphKey(
        batch_size(4), splits=1, slots=2, items=count, tile_rows=16, stops=0, is_truncated=False
    )
    decode_state.state.fill_(1)
    before = engine._tree.pages.pool.clone()
    recorded: list[bool] = []

    class Recorder:
        def record(self, step: Any) -> Any:
            recorded.append(bool(decode_state.state.any()) or bool(decode_state.items(count).any()))
            step()
            return step

    runner.graphs, runner._captured = Recorder(), {}
    with torch.no_grad():
        runner._graphs_of(key, decode_state)
    assert recorded == [False]
    assert torch.equal(engine._tree.pages.pool, before)


def test_an_unused_row_has_no_tail_to_begin_with(device: torch.device) -> None:
    """Else a program that has the tails of used and unused rows would go through all that items computed."""
    from graft.engine.native.cuda.burst import NO_TAIL
    from graft.engine.native.cuda.kernels.draw import DrawField
    from graft.engine.native.cuda.runner import batch_size

    engine = engine_on(device)
    sample_all(open_forks(engine, (41, 3)), Sampling(max_tokens=2))
    runner: Any = engine._loop.runner
    tails = runner._states[batch_size(3), 0].state[DrawField.TAIL].tolist()
    assert len(tails) == 4 and tails[3] == NO_TAIL and max(tails[:3]) < 41


def test_a_captured_step_serves_rows_that_need_a_little_less() -> None:
    from graft.engine.native.cuda.burst import GraphKey

    key = GraphKey(
        rows=64,
        splits=2,
        slots=8,
        items=16,
        tile_rows=16,
        stops=1,
        is_truncated=False,
        in_order=True,
    )
    assert key.serves(key)
    for fewer in ({"items": 0}, {"slots": 4}, {"stops": 0}, {"items": 8, "slots": 2}):
        assert key.serves(key._replace(**fewer)), fewer
    for other in ({"items": 17}, {"slots": 16}, {"stops": 2}, {"rows": 48}, {"tail_rows": 2}):
        assert not key.serves(key._replace(**other)), other
    # 33 unused items take longer than they are worth; without the order each slot is read
    assert not key._replace(items=33).serves(key._replace(items=0))
    free = key._replace(in_order=False)
    assert not free.serves(free._replace(slots=4)) and free.serves(free._replace(items=8))


def test_short_prompts_are_padded_and_replayed(device: torch.device) -> None:
    """As with graphs, but with plain calls: fixed buffers, padded, used repeatedly."""

    class Recorder:
        def record(self, step: Any) -> Any:
            step()
            return step

    def scenario(engine: NativeEngine) -> list[Completion]:
        runner: Any = engine._loop.runner
        if device.type == "cpu" and hasattr(runner, "graphs"):
            runner.graphs = runner.prefill.graphs = Recorder()
        completions: list[Completion] = []
        for lengths in ((17, 9), (5,), (24,)):  # 24, 4 and 23 tokens to fill: sizes 64, 16, 64
            contexts = [engine.open(prompt(length, salt=length)) for length in lengths]
            before = [list(context.tokens) for context in contexts]
            drawn = sample_all(contexts, Sampling(max_tokens=1))
            assert_all_exact(engine, before, drawn)
            completions += drawn
        if device.type == "cpu" and hasattr(runner, "graphs"):
            assert sorted(runner.prefill._captured) == [16, 64]
        return completions

    run_both(device, scenario)


def test_a_device_error_reaches_every_request_even_if_the_cleanup_fails(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(device, max_running=2)
    contexts = open_forks(engine, (20, 3), (5, 1))  # two of them run, two wait

    def broken(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    async def main() -> list[Any]:
        samples = (context.sample(Sampling(max_tokens=4)) for context in contexts)
        return await asyncio.wait_for(asyncio.gather(*samples, return_exceptions=True), 20)

    with monkeypatch.context() as patched:
        patched.setattr(engine._loop.runner, "run", broken)
        patched.setattr(engine._tree.pages, "wipe", broken)
        assert [str(error) for error in asyncio.run(main())] == ["the device is gone"] * 4
    completions = sample_all(contexts[:2], Sampling(max_tokens=2))
    assert_all_exact(engine, [prompt(20)] * 2, completions)


@pytest.mark.parametrize("kv_tokens", [2048, 144])
def test_results_are_computed_behind_the_last_steps_of_a_burst(
    device: torch.device, kv_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents with turns of unequal length, one of which is cancelled. With few pages nothing is planned
    ahead."""
    works: list[Any] = []
    plan_ahead = Scheduler.plan_ahead

    def noted(scheduler: Scheduler) -> list[Any]:
        works.extend(found := plan_ahead(scheduler))
        return found

    monkeypatch.setattr(Scheduler, "plan_ahead", noted)

    async def agent(engine: NativeEngine, number: int) -> list[Completion]:
        context = engine.open(prompt(20 + 7 * number, number), key=number)
        completions: list[Completion] = []
        for turn in range(2):
            completions.append(await context.sample(Sampling(max_tokens=3 + (number + turn) % 5)))
            context.append(prompt(5 + 3 * number + turn, 10 + turn))
        context.close()
        return completions

    def scenario(engine: NativeEngine) -> list[Completion]:
        async def play() -> list[Completion]:
            agents = [asyncio.ensure_future(agent(engine, number)) for number in range(4)]
            await asyncio.sleep(0)
            agents.pop().cancel()
            return [c for found in await asyncio.gather(*agents) for c in found]

        return asyncio.run(play())

    run_both(device, scenario, kv_tokens=kv_tokens)
    assert bool(works) == (kv_tokens > 1000)
    assert all(work.request is None for work in works)

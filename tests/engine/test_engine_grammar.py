"""Grammars on the device: bursts write descriptions, change modes and exit without the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from burst_kit import assert_all_exact, assert_same, engine_on, run_both, small_decoder
from engine_kit import (
    EXTRA,
    TOOLS,
    VOCAB,
    assert_is_written_by,
    gather,
    prompt,
    tools_space,
)

from graft.actions.grammar import Automaton
from graft.actions.space import ActionSpace
from graft.engine.native.engine import NativeEngine
from graft.engine.native.sampling.grammar_tables import END, DeviceGrammar, tabulate
from graft.engine.native.sampling.masks import Masks
from graft.engine.native.scheduler import BurstPlan
from graft.models.decoder import Decoder
from graft.models.shape import ModelShape
from graft.types import NO_ACTION, Completion, Finish, Sampling


def actor(seed: int) -> Decoder:
    return small_decoder(seed=seed, extra=EXTRA)


def steps_of(engine: NativeEngine) -> list[int]:
    """Collects the segment length of each burst."""
    runner: Any = engine._loop.runner
    taken: list[int] = []
    run = runner.run

    def spy(works: Any, plan: BurstPlan) -> Any:
        taken.append(plan.segment)
        return run(works, plan)

    runner.run = spy
    return taken


def test_the_tables_of_a_small_grammar() -> None:
    """Action 9 enters and writes 4 5, action 3 exits mode 1; the last row is without a grammar."""
    grammar = Automaton(
        transitions={(0, 9): 1, (1, 3): 0},
        default={1: 0},
        writes={(0, 9): (4, 5), (1, 3): (3,)},
        exits=frozenset({(1, 3)}),
    )
    action_column, (after, script_start, is_exit), script = tabulate(grammar, rows=3, width=12)
    assert action_column.tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 2, 0, 0]
    assert after[:, :3].tolist() == [[0, 0, 1], [0, 0, 0], [2, 2, 2]]
    assert script_start[:, :3].tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert is_exit[:, :3].tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert script[:4].tolist() == [END, 4, 5, END] and (script[4:] == END).all()


def test_tables_of_equal_size_share_their_buffers_and_only_valid_automata_can_be_followed() -> None:
    space, shape = tools_space(), ModelShape(vocab_size=VOCAB, extra=EXTRA)
    masks = Masks(space, shape, torch.device("cpu"))
    device_grammar = DeviceGrammar(space, masks, torch.device("cpu"))
    assert device_grammar.can_follow(TOOLS) and not device_grammar.can_follow(
        Automaton(default={0: 9})
    )

    class Other:
        start = 0

        def step(self, mode: int, action: int) -> int:
            return mode

        def written(self, mode: int, action: int) -> Sequence[int]:
            return (action,)

        def is_exit(self, mode: int, action: int) -> bool:
            return False

    assert not device_grammar.can_follow(Other())
    sizes = device_grammar.load(TOOLS)
    tables = device_grammar.tables(sizes)
    assert tables is not None and tables.action_column[23:28].tolist() == [1, 2, 3, 4, 5]
    other = Automaton(writes={(0, 23): (1, 2)})
    assert device_grammar.load(other) == sizes and device_grammar.tables(sizes) is tables
    assert tables.action_column[23:28].tolist() == [1, 0, 0, 0, 0]
    assert device_grammar.load(TOOLS) == sizes and tables.action_column[27] == 5
    assert device_grammar.tables((0, 0)) is None


def turns(engine: NativeEngine, samplings: Sequence[Sampling], count: int) -> list[Completion]:
    """A context per sampling; after each turn tokens are appended, and an unfinished call is left."""
    root = engine.open(prompt(21), key=0)
    contexts = [root.fork(key=n) for n in range(len(samplings))]
    allowed = torch.tensor(engine.space.allowed)
    completions: list[Completion] = []
    for turn in range(count):
        before = [list(context.tokens) for context in contexts]
        drawn = gather(contexts, samplings, [TOOLS] * len(contexts))
        assert_all_exact(engine, before, drawn, allowed=allowed)
        for number, (context, completion) in enumerate(zip(contexts, drawn, strict=True)):
            assert_is_written_by(TOOLS, completion, completion.modes[0])
            context.append(prompt(1 + number % 4, turn))
            context.mode = 0 if completion.finish is not Finish.EXIT else context.mode
        completions += drawn
    return completions


def test_bursts_follow_a_grammar_as_the_plain_engine_does(device: torch.device) -> None:
    """Segments of four steps: they end in the middle of descriptions, too."""
    options = {"decoder": actor(0), "space": tools_space()}
    samplings = [Sampling(max_tokens=n) for n in (7, 4)]
    engine = engine_on(device, **options)
    taken = steps_of(engine)
    completions = turns(engine, samplings, count=2)
    assert max(taken) >= 4  # several steps without the host
    assert_same(completions, turns(engine_on(device, False, **options), samplings, 2))
    assert Finish.EXIT in {c.finish for c in completions}
    assert {NO_ACTION, 23, 24} < {action for c in completions for action in c.actions}


def test_stops_and_min_tokens_hold_inside_a_grammar(device: torch.device) -> None:
    """5 and 9 are also tokens of descriptions, where they do not stop."""
    samplings = [
        Sampling(max_tokens=12, stop_tokens=(5, 9)),
        Sampling(max_tokens=12, stop_tokens=(1, 5), min_tokens=6),
        Sampling(max_tokens=12, stop_tokens=(1, 5), min_tokens=2, temperature=0),
    ]

    def scenario(engine: NativeEngine) -> list[Completion]:
        contexts = [engine.open(prompt(9, 3), key=n) for n in range(len(samplings))]
        return gather(contexts, samplings, [TOOLS] * len(samplings))

    completions = run_both(device, scenario, decoder=actor(4), space=tools_space())
    for completion in completions:
        assert_is_written_by(TOOLS, completion, 0)
    assert not {1, 5} & set(completions[1].actions[:6])


def test_truncation_is_of_what_the_mode_allows_on_the_device(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graft.engine.native.cuda.kernels import truncation

    monkeypatch.setattr(truncation, "CHUNK", 128)
    samplings = [Sampling(max_tokens=2, top_k=2), Sampling(max_tokens=2, top_p=0.6)]

    def scenario(engine: NativeEngine) -> list[Completion]:
        contexts = [engine.open(prompt(9, 3), key=n) for n in range(2)]
        contexts[0].mode = 2  # three actions: one of them is never drawn
        return gather(contexts, samplings, [TOOLS] * 2)

    completions = run_both(device, scenario, decoder=actor(4), space=tools_space())
    assert 25 <= completions[0].actions[0] <= 27
    assert max(completions[0].entropies) <= np.log(2) + 1e-5


def test_rows_without_a_grammar_share_a_burst_and_draw_tokens_only(device: torch.device) -> None:
    def scenario(engine: NativeEngine) -> list[Completion]:
        contexts = [engine.open(prompt(9), key=n) for n in range(2)]
        taken = steps_of(engine)
        completions = gather(contexts, [Sampling(max_tokens=9)] * 2, [TOOLS, None])
        assert max(taken) == (4 if engine._loop.runner.has_bursts else 1)
        return completions

    _, plain = run_both(device, scenario, decoder=actor(0), space=tools_space())
    assert max(plain.actions) < VOCAB and plain.modes == [0] * 9


def test_the_host_follows_two_grammars_in_one_batch(device: torch.device) -> None:
    other = Automaton(TOOLS.start, TOOLS.transitions, {}, TOOLS.writes, TOOLS.exits)

    def scenario(engine: NativeEngine) -> list[Completion]:
        contexts = [engine.open(prompt(9), key=n) for n in range(2)]
        taken = steps_of(engine)
        completions = gather(contexts, [Sampling(max_tokens=4)] * 2, [TOOLS, other])
        assert taken[:3] == [1, 1, 1]
        return completions

    run_both(device, scenario, decoder=actor(0), space=tools_space())


def test_the_device_follows_tags_of_the_vocabulary(device: torch.device) -> None:
    """1 2 in free text enters; inside 3 and 4, and 6 writes 6 7 and exits."""
    allowed = np.zeros((3, VOCAB), dtype=bool)
    allowed[:2, :4] = True
    allowed[2, [3, 4, 6]] = True
    grammar = Automaton(
        transitions={(0, 1): 1, (1, 1): 1, (1, 2): 2, (2, 6): 0},
        default={1: 0},
        writes={(2, 6): (6, 7)},
        exits=frozenset({(2, 6)}),
    )
    space = ActionSpace(VOCAB, allowed=allowed)
    grammar.check(space)

    def scenario(engine: NativeEngine) -> list[Completion]:
        contexts = [engine.open(prompt(9, 1), key=n) for n in range(2)]
        contexts[0].mode = 2  # the other one enters
        before = [list(context.tokens) for context in contexts]
        completions = gather(contexts, [Sampling(max_tokens=8)] * 2, [grammar] * 2)
        assert_all_exact(engine, before, completions, allowed=torch.from_numpy(allowed))
        return completions

    for completion in run_both(device, scenario, space=space):
        assert completion.finish is Finish.EXIT and completion.tokens[-2:] == [6, 7]
        assert completion.actions[-2:] == [6, NO_ACTION]


def test_chunks_in_which_a_mode_allows_nothing_are_not_read(device: torch.device) -> None:
    """They hold NaN: a row that reads one has no log-prob."""
    from graft.engine.native.cuda.kernels import draw as kernel

    width = 3 * kernel.CHUNK
    allowed = torch.zeros(2, width, dtype=torch.bool)
    allowed[0, : kernel.CHUNK] = True
    allowed[1, -3:] = True
    assert kernel.occupied_chunks(allowed).tolist() == [[1, 0, 0], [0, 0, 1]]
    logits = torch.full((2, width), torch.nan)
    logits[0, : kernel.CHUNK] = 0.0
    logits[1, -3:] = 0.0
    state = torch.zeros(kernel.FIELDS, 2, dtype=torch.int64)
    state[kernel.DrawField.LENGTH] = 1
    state[kernel.DrawField.BUDGET] = 9
    state[kernel.DrawField.MODE, 1] = 1
    results = torch.zeros(3, 1, 2, device=device)
    none = torch.zeros(2, 0, dtype=torch.int32, device=device)
    moved = (x.to(device) for x in (logits, state, torch.ones(2)))
    kernel.draw(*moved, none, results, allowed=allowed.to(device))
    want = [-np.log(kernel.CHUNK), -np.log(3)]
    assert results[1, 0].tolist() == pytest.approx(want, abs=1e-5)
    assert results[0, 0, 0] < kernel.CHUNK and results[0, 0, 1] >= width - 3

"""Where drafts come from, how many tokens of them are worth their time, and which are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_kit import prompt, tiny_engine

from graft.actions.grammar import Automaton
from graft.actions.space import ActionSpace
from graft.engine.native.drafts.drafter import walk
from graft.engine.native.drafts.gain import Acceptance, RowTimes, choose_counts
from graft.engine.native.drafts.index import (
    IDLE_ROUNDS,
    DraftSource,
    TaskTexts,
    Text,
    TextStore,
    following,
)
from graft.engine.native.drafts.verification import Draft, Drawn, accept, places_of
from graft.engine.native.kv.sequences import Sequence
from graft.engine.native.request import SampleRequest
from graft.types import Sampling


def written(tokens: list[int], stem: Sequence | None = None) -> Sequence:
    return Sequence(tokens, stem, row=0)


def request(tokens: list[int], **how: Any) -> SampleRequest:
    given: dict[str, Any] = {
        "future": None,
        "grammar": None,
        "mode": 0,
        "sampling": Sampling(min_tokens=2),
        **how,
    }
    return SampleRequest(
        written(tokens), 1, stop_tokens=frozenset(), stop_strings=None, budget=9, version=0,
        **given,
    )  # type: ignore[arg-type]  # fmt: skip


def test_the_longest_match_wins_and_of_equal_ones_the_latest() -> None:
    task = TaskTexts(version=0)
    task.follow(written([9, 1, 2, 3, 4, 0, 0]))
    task.follow(written([8, 1, 2, 3, 5, 0, 0]))
    mine = written([9, 1, 2, 3])
    task.follow(mine)
    match = task.find(mine.tokens)
    assert match is not None and match.length == 4  # of 9 1 2 3, not the later 1 2 3
    assert following(mine.tokens, match, 2) == [4, 0]
    other = written([7, 1, 2, 3])
    task.follow(other)
    match = task.find(other.tokens)
    assert match is not None and match.length == 3
    assert following(other.tokens, match, 1) == [5]  # the latest that goes on


def test_two_tokens_are_no_match_and_the_last_ones_are_not_their_own() -> None:
    task = TaskTexts(version=0)
    mine = written([1, 2, 3, 4, 2, 3])
    task.follow(mine)
    assert task.find(mine.tokens) is None
    mine.tokens += [4]
    task.follow(mine)
    match = task.find(mine.tokens)
    assert match is not None and (match.end, match.length) == (4, 3)


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    task = TaskTexts(version=0)
    mine = written([1, 2, 3, 1, 2, 3])
    task.follow(mine)
    match = task.find(mine.tokens)
    assert match is not None and following(mine.tokens, match, 5) == [1, 2, 3, 1, 2]


def test_tokens_that_were_removed_are_no_match() -> None:
    task = TaskTexts(version=0)
    other, mine = written([1, 2, 3, 4]), written([1, 2, 3])
    task.follow(other)
    other.tokens[2:] = [7, 7]  # a sample that failed, and another
    task.follow(mine)
    assert task.find(mine.tokens) is None


def test_sources_are_told_apart() -> None:
    stem = written([1, 2, 3, 4])
    mine, sibling = written([1, 2, 3, 4, 5], stem), written([1, 2, 3, 4, 6], stem)
    task = TaskTexts(version=0)
    texts = [task.follow(each) for each in (mine, sibling)]
    assert task.source(task.texts[stem], mine) is DraftSource.OWN
    assert task.source(texts[0], mine) is DraftSource.OWN
    assert task.source(texts[1], mine) is DraftSource.SIBLINGS
    assert task.source(Text([1], is_earlier=True), mine) is DraftSource.EARLIER
    assert task.size == 4 + 1 + 1 - 2  # the stem is indexed once; two tokens have no place


def test_attempts_under_earlier_weights_stay_with_their_task() -> None:
    store = TextStore()
    store.follow(5, written([1, 2, 3, 4, 5]), version=0)
    task, _ = store.follow(5, mine := written([1, 2, 3]), version=1)
    match = task.find(mine.tokens)
    assert match is not None and following(mine.tokens, match, 8) == [4, 5]
    assert task.source(match.text, mine) is DraftSource.EARLIER
    assert store.follow(6, mine, version=1)[0].find(mine.tokens) is None  # another task


def test_the_index_is_bounded() -> None:
    store = TextStore(max_indexed=100, max_stored=60)
    for number in range(50):
        for _ in range(IDLE_ROUNDS + 1):
            store.begin_round()
        store.follow(number, written([number, *range(100, 120)]), version=0)
        assert store.size <= 100 and store.num_stored <= 60
    assert store.num_stored > 0
    store.begin_round()
    long = written(list(range(500)))
    task, text = store.follow(99, long, version=0)
    assert store.size <= 100 and text.indexed == 0 and task.find([1, 2, 3]) is None


def test_tokens_are_drafted_while_they_add_more_than_the_step_takes_longer() -> None:
    def seconds(rows: int) -> float:
        return 1 + rows / 4

    assert choose_counts([0.8], [8], 3, seconds) == [3]  # worked in the module
    assert choose_counts([0.8, 0.3], [8, 8], 3, seconds) == [3, 0]
    assert choose_counts([0.8], [2], 3, seconds) == [2]
    assert choose_counts([0.9], [8], 3, float) == [0]  # a row costs what it draws: nothing pays


def test_the_time_of_a_step_is_a_line_through_the_times_of_late() -> None:
    times = RowTimes()
    for rows in (4, 8, 16, 32) * 50:
        times.add(rows, 0.01 + 0.001 * rows)
    assert times(10) == pytest.approx(0.02, rel=0.02)
    assert times(64) == pytest.approx(0.074, rel=0.05)


def test_the_share_follows_what_was_accepted_and_is_forgotten() -> None:
    shares, text = Acceptance(), Text([])
    new = shares.share(DraftSource.OWN, 5, text)
    assert new == 0.5
    for _ in range(30):
        shares.add(DraftSource.OWN, 5, text, 4, 0)  # one trial each: the first token was wrong
    assert shares.share(DraftSource.OWN, 5, text) < 0.1
    assert shares.share(DraftSource.OWN, 6, Text([])) == 0.5
    for _ in range(5000):
        shares.forget()
    assert shares.share(DraftSource.OWN, 5, Text([])) == pytest.approx(0.5, abs=0.01)


def test_draws_count_up_to_the_first_that_was_not_drafted() -> None:
    asked, draft = request([1, 2]), Draft([7, 8, 9], [0, 0, 0, 0])
    places = places_of(asked, draft)
    assert [place.length for place in places] == [2, 3, 4, 5]
    assert [place.must_go_on for place in places] == [True, True, False, False]
    drawn = [Drawn(action, -1.0, 0.5) for action in (7, 8, 2, 9)]
    assert accept(asked, draft, drawn).actions == [7, 8, 2]
    drawn[0] = Drawn(7, float("nan"), 0.5)
    assert accept(asked, draft, drawn).actions == [7]  # nothing could be drawn: the request fails
    assert accept(asked, None, drawn[2:3]).actions == [2]


def test_a_draft_ends_where_the_grammar_writes_or_exits() -> None:
    space = ActionSpace(9, allowed=np.array([[True] * 9, [True] * 8 + [False]]))
    grammar = Automaton(
        0, {(0, 3): 1, (1, 4): 0}, writes={(1, 5): (5, 6)}, exits=frozenset({(0, 7)})
    )
    asked = request([1], grammar=grammar)
    assert walk(asked, [2, 3, 4, 2], space) == Draft([2, 3, 4, 2], [0, 0, 1, 0, 0])
    assert walk(asked, [2, 3, 5, 2], space) == Draft([2, 3], [0, 0, 1])  # 5 writes 5 6
    assert walk(asked, [2, 7, 2], space) == Draft([2], [0, 0])  # 7 exits
    assert walk(asked, [3, 8], space) == Draft([3], [0, 1])  # 8 may not be drawn in mode 1


def test_without_an_order_nothing_is_drafted() -> None:
    engine = tiny_engine()
    assert engine.decoder.order is None and engine._loop.drafter is None
    with pytest.raises(ValueError, match="drafts='always'"):
        tiny_engine(drafts="always")
    assert engine.open(prompt(3)).task == tiny_engine().open(prompt(3)).task

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.structure import FIRST_ROW_ID
from graft.types import (
    NO_ACTION,
    Author,
    Completion,
    Episode,
    Finish,
    Leaf,
    Sampling,
    Span,
    Status,
    Task,
    Turn,
)


def policy(parent: int, tokens: list[int]) -> Span:
    n = len(tokens)
    return Span(parent, Author.POLICY, tokens, tokens, [-0.5] * n, [0.1] * n, [0] * n, [True] * n)


def two_samples() -> Episode:
    """0 task [1 2] <- 1 policy [3 4 5] (leaf 0); <- 2 policy [6] <- 3 env [7] <- 4 policy [8] (leaf 1)"""
    episode = Episode(Task("t", "env", answer={"value": 5}, meta={"k": [1, 2]}))
    episode.append(Span(None, Author.TASK, [1, 2], text="12"))
    episode.append(policy(0, [3, 4, 5]))
    episode.append(policy(0, [6]))
    episode.append(Span(2, Author.ENV, [7], text="7"))
    episode.append(policy(3, [8]))
    episode.leaves = [Leaf((1,), 0.0), Leaf((4,), 1.0, Status.TRUNCATED, metrics={"turns": 2.0})]
    return episode


def test_a_walk_goes_from_the_root_to_the_tip():
    assert two_samples().walk(4) == [0, 2, 3, 4]
    assert [t.tokens for t in two_samples().trajectories()] == [[1, 2, 3, 4, 5], [1, 2, 6, 7, 8]]


def test_printed_it_names_its_task_and_rewards_and_not_its_tokens():
    episode = two_samples()
    assert repr(episode) == "Episode('t', 5 spans, leaves with rewards [0, 1])"
    last = list(episode.trajectories())[1]
    assert repr(last) == "Trajectory('t', leaf 1, reward 1, truncated, 5 tokens, text '7')"


def test_json_round_trip_is_exact():
    episode = two_samples()
    line = episode.dumps()
    assert "\n" not in line
    assert Episode.loads(line) == episode
    assert isinstance(Episode.loads(line).leaves[1].status, Status)
    assert Episode.loads(json.dumps(json.loads(line))).dumps() == line


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_any_float_survives_the_log(values: list[float]):
    n = len(values)
    span = Span(None, Author.POLICY, [1] * n, [1] * n, values, values, [0] * n, [True] * n)
    assert Episode.loads(Episode(Task("t", "e"), [span]).dumps()).spans[0] == span


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9)))
def test_a_line_holds_what_plain_json_would(values: list[float]):
    n = len(values)
    span = Span(None, Author.POLICY, [7] * n, [], values, values, [0] * n, [True] * n)
    span.text, span.info = 'ü "q" \n', {"calls": [{"name": "f", "args": (1, 2.5)}]}
    episode = Episode(Task("t", "e"), [span], [Leaf((0,), 0.5)])
    plain = {
        "task": asdict(episode.task),
        "spans": [{name: value for name, value in asdict(span).items() if name != "masks"}],
        "leaves": [asdict(episode.leaves[0])],
    }
    assert episode.to_json() == plain
    line = json.loads(episode.dumps())
    want = json.loads(json.dumps(plain))
    assert repr(line) == repr(want)  # repr: order of names, and 0.0 is not -0.0


def test_a_line_holds_each_mask_once_and_spans_get_back_those_that_they_used():
    episode = two_samples()
    number, other = FIRST_ROW_ID + 1, FIRST_ROW_ID + 2
    for span, used in ((episode.spans[1], [number, other, number]), (episode.spans[2], [number])):
        span.modes = (used + [0] * len(span))[: len(span)]
        span.masks = {mode: f"row {mode - FIRST_ROW_ID}" for mode in used}
    line = episode.dumps()
    assert json.loads(line)["masks"] == {str(number): "row 1", str(other): "row 2"}
    assert line.count("row 1") == 1
    assert [s.masks for s in Episode.loads(line).spans] == [s.masks for s in episode.spans]


@pytest.mark.parametrize(
    ("number", "error"), [(np.float32(1.0), TypeError), (float("nan"), ValueError)]
)
def test_numbers_that_json_cannot_hold_are_refused(number: float, error: type[Exception]):
    span = Span(None, Author.POLICY, [1], [1], [number], [0.0], [0], [True])
    with pytest.raises(error, match="JSON"):
        Episode(Task("t", "e"), [span]).dumps()


def test_splitting_a_span_keeps_every_walk():
    episode = two_samples()
    before = [t.tokens for t in episode.trajectories()]
    head = episode.split(1, 2)
    assert (head, episode.spans[1].tokens, episode.spans[2].tokens) == (1, [3, 4], [5])
    assert [t.tokens for t in episode.trajectories()] == before
    assert episode.walk(2) == [0, 1, 2]
    assert episode.spans[2].logprobs == [-0.5]


@given(st.data())
def test_splits_at_any_place_leave_the_trajectories_alone(data: st.DataObject):
    episode = two_samples()
    before = [t.tokens for t in episode.trajectories()]
    for _ in range(4):
        long = [i for i, span in enumerate(episode.spans) if len(span) > 1]
        if not long:
            break
        index = data.draw(st.sampled_from(long))
        episode.split(index, data.draw(st.integers(1, len(episode.spans[index]) - 1)))
    assert [t.tokens for t in episode.trajectories()] == before
    assert all(s.parent is None or s.parent < i for i, s in enumerate(episode.spans))


def test_lists_of_unequal_length_and_a_split_outside_the_span_are_refused():
    with pytest.raises(ValueError, match="unequal length"):
        Span(0, Author.POLICY, [1, 2], actions=[1])
    with pytest.raises(ValueError, match="before token 3"):
        two_samples().split(1, 3)


def test_turns_never_share_their_info():
    first, second = Turn("a"), Turn("b")
    first.info["seen"] = True
    assert second.info == {}
    assert [*first] == ["a", 0.0, False, False, {"seen": True}]


def test_only_chosen_tokens_of_a_completion_are_trained():
    done = Completion([4, 5], [9, NO_ACTION], [-1.0, 0.0], [0.3, 0.0], [1, 1], Finish.STOP, 3)
    span = Span.sampled(0, done)
    assert (span.mask, span.version, span.info) == ([True, False], 3, {"finish": "stop"})


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"min_p": 1.0}, "min_p=1.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens=9"),
    ],
)
def test_impossible_sampling_is_refused(values: dict[str, float], complaint: str):
    with pytest.raises(ValueError, match=complaint):
        Sampling(**values)

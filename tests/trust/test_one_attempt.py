"""Nothing that one attempt raises or returns ends a run."""

from __future__ import annotations

import logging
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trust import one_attempt, places
from trust.oddities import Raised, oddities
from trust.one_attempt import fault_of
from trust.places import PLACES

pytest.importorskip("uvicorn")

texts = st.text(st.characters(), max_size=30)
"""Halves of surrogate pairs and NULs among them."""
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(texts, inner, max_size=4)
        | st.fixed_dictionaries({"reward": inner})
    ),
    max_leaves=8,
)
numbers = st.integers(0, len(oddities()) - 1)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="graft")


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.sampled_from(list(PLACES)), oddity=values)
def test_whatever_an_attempt_returns_the_run_goes_on(place: str, oddity: object):
    assert fault_of(place, oddity) == ""


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.sampled_from(list(PLACES)), number=numbers)
def test_whatever_an_attempt_raises_or_makes_up_the_run_goes_on(place: str, number: int):
    assert fault_of(place, oddities()[number]) == ""


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_every_oddity_from_every_place(place: str):
    assert [(n, fault) for n, odd in enumerate(oddities()) if (fault := fault_of(place, odd))] == []


ENDINGS = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration(), MemoryError()]


@pytest.mark.parametrize("error", ENDINGS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(
    "place",
    [
        "env step", "env close", "env close before a turn", "tool", "async tool", "reward",
        "async agent", "task of an async agent",
    ],
)  # fmt: skip
def test_what_would_end_a_program_fails_an_attempt(place: str, error: BaseException):
    assert fault_of(place, Raised(error)) == ""


@pytest.mark.parametrize("place", PLACES)
def test_every_place_gives_its_oddity(place: str, monkeypatch: pytest.MonkeyPatch):
    met: list[object] = []
    monkeypatch.setattr(places, "give", lambda oddity: met.append(oddity) or 0.5)
    monkeypatch.setattr(places, "raw_json", lambda oddity: met.append(oddity) or b"{}")
    PLACES[place](math.nan)
    assert met


def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(places, "give", lambda oddity: 0.5)  # nothing odd happens
    (row, *_) = [row for row in one_attempt.run(20, seed=1) if row.group == "reward"]
    assert row.ok
    monkeypatch.setitem(PLACES, "reward", lambda oddity: exit(3))
    assert "the run ended: SystemExit" in fault_of("reward", math.nan)

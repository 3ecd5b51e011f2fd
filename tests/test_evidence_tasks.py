"""The small tasks of benchmarks/evidence: what a teacher shows, what is right, what a call must be."""

from __future__ import annotations

import random

import pytest

from benchmarks.evidence.tasks.clues import DIGITS, LETTERS, Clues
from benchmarks.evidence.tasks.letters import LetterSort
from benchmarks.evidence.tasks.shelf import Shelf, fact
from benchmarks.evidence.tasks.sums import Sums
from graft.types import Author, CallText


def play(env, trace):
    """The last turn of a demonstration that is played; the env has to answer as the trace says."""
    answers = [text for author, text in trace if author is Author.ENV]
    for author, text in trace:
        if author is Author.POLICY:
            turn = env.step(text)
            if not turn.is_over:
                assert turn.observation == answers.pop(0)
    assert turn.is_over and not answers
    return turn


@pytest.mark.parametrize("rate, calls", [(1.0, 1), (0.0, 0)])
def test_the_teacher_of_sums_is_right_by_the_tool_and_by_heart(rate, calls):
    env = Sums(operands=[2, 2])
    env.reset(3)
    trace = env.demonstrate(random.Random(0), tool_rate=rate)
    assert sum(author is Author.ENV for author, _ in trace) == calls
    assert play(env, trace).reward == 1.0


@pytest.mark.parametrize("syntax", ["tags", "actions"])
def test_a_shelf_answers_the_teacher_in_both_forms(syntax):
    env = Shelf(syntax=syntax)
    env.reset(3)
    assert play(env, env.demonstrate(random.Random(0), tool_rate=1.0)).reward == 1.0


def test_a_misspelt_name_on_a_shelf_is_a_failed_call_and_a_guess_is_wrong():
    env = Shelf()
    env.reset(3)
    turn = env.step("[prcie 3(4,2)]")
    assert (turn.observation, turn.info["tool_ok"]) == ("?;", False)
    assert env.step("[price 3(4,2)]").observation == f"{fact('price', '342')};"
    assert env.step("99").reward == 0.0


def test_letters_are_shown_without_a_strategy_and_sorted_with_one():
    env = LetterSort()
    env.reset(1)
    env.items = [1, 0, 2]
    assert env.step(CallText("cAB", "compare", ("A", "B"))).observation == "A>B"
    assert env.step(CallText("sAB", "swap", ("A", "B"))).observation == "BAC"
    turn = env.step(".")
    assert (turn.info["is_right"], turn.reward) == (True, 0.5)  # too few comparisons to know
    traces = []
    for seed in range(200):
        env.reset(seed)
        traces.append(play(env, env.demonstrate(random.Random(seed))).info["is_right"])
    assert sum(traces) / 200 == pytest.approx(1 / 6, abs=0.08)


def test_clues_are_right_if_every_letter_is_read_and_nothing_else_noted():
    env = Clues(results=2, clues=1)
    env.reset(0)
    env.results = [LETTERS[0], "."]
    assert env.step("?").observation == f"{LETTERS[0]};"
    assert env.step(f"{DIGITS[0]}?").observation == ".;"
    assert env.step("!").reward == 1.0
    env.reset(0)
    env.results = [".", LETTERS[2]]
    assert env.step("?").observation == ".;"
    assert env.step("?").observation == f"{LETTERS[2]};"
    assert env.step(f"{DIGITS[1]}!").reward == 0.0


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_the_teacher_of_clues_is_right_as_often_as_asked(rate):
    env = Clues()
    env.reset(5)
    assert play(env, env.demonstrate(random.Random(0), right_rate=rate)).reward == rate

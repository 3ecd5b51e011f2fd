"""Arithmetic: the task as a question, and the task of the smallest models with its calculator."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import pytest

from graft.envs import make
from graft.envs.arithmetic import Arithmetic, draw_nested
from graft.envs.calculator import CalculatorTask, Expression
from graft.envs.splits import split_of
from graft.tools.calculator import evaluate, work
from graft.types import Author

POLICY, ENV = Author.POLICY, Author.ENV


def env_with(expression: str, value: int, **options: object) -> CalculatorTask:
    env = make("calculator", **options)
    env.reset(0)
    env.unwrapped.expression, env.unwrapped.answer = expression, str(value)
    return env


def test_the_calculator_task_is_the_same_on_every_machine():
    assert [make("calculator").reset(seed)[0] for seed in (0, 1, 2, 7)] == [
        "127-41=",
        "20+149*86=",
        "454*548*308=",
        "117+435+206=",
    ]
    test = make("calculator", split="test")
    assert [test.reset(seed)[0] for seed in (0, 1, 2)] == [
        "625*393-542=",
        "554-642-92=",
        "335-79*964=",
    ]


def test_arithmetic_questions_are_the_same_on_every_machine():
    env = make("arithmetic")
    assert [(env.reset(seed), env.expression)[1] for seed in (0, 1, 7)] == [
        "447 * 82 + 1366 + 74",
        "(642 * 93) * 234 - 2437",
        "7 + 670 * 92 + 1957",
    ]


def test_a_scripted_solution_is_paid():
    env = env_with("12+34*5", 182)
    first = env.step("[34*5]")
    assert (first.observation, first.reward, first.is_over) == ("170;", 0.0, False)
    assert first.info == {"tool": "calculator", "tool_ok": True, "tool_uses": 1}
    assert env.step("[12+170]").observation == "182;"
    last = env.step("182")
    assert (last.reward, last.terminated, last.truncated) == (1.0, True, False)
    assert last.info == {"is_right": True, "tool_uses": 2}


@pytest.mark.parametrize(
    "answer", ["183", "-182", "", "[12+170", "182;", "170;182", "1 82", "]182", "=182", "182?"]
)
def test_anything_but_the_value_is_not_paid(answer: str):
    turn = env_with("12+34*5", 182).step(answer)
    assert turn.reward == 0.0
    assert turn.terminated


@pytest.mark.parametrize(
    "call", ["[]", "[12+]", "[1+2+3]", "[12+34*5]", "34]", "[9**9]", "[1/0]", "[x]", "[٣+٤]"]
)
def test_a_malformed_call_gets_a_short_answer_and_the_episode_goes_on(call: str):
    env = env_with("12+34*5", 182)
    turn = env.step(call)
    assert turn.observation == "?;"
    assert set(turn.observation) <= set(env.alphabet)
    assert turn.info == {"tool": "calculator", "tool_ok": False, "tool_uses": 1}
    assert env.step("182").reward == 1.0


def test_four_calls_one_refusal_then_the_answer_or_the_end():
    env = env_with("12+34", 46)
    assert [env.step("[12+34]").observation for _ in range(5)] == ["46;"] * 4 + ["?;"]
    other = env.fork()
    assert env.step("46").reward == 1.0
    assert other.step("[12+34]").truncated


def test_the_teacher_calls_the_higher_precedence_first():
    env = env_with("12+34*5", 182)
    assert env.demonstrate(random.Random(0), tool_rate=1.0) == [
        (POLICY, "[34*5]"),
        (ENV, "170;"),
        (POLICY, "[12+170]"),
        (ENV, "182;"),
        (POLICY, "182"),
    ]


def test_negative_results_on_the_way_can_be_entered_again():
    env = env_with("12-34+5", -17)
    assert env.demonstrate(random.Random(0), tool_rate=1.0) == [
        (POLICY, "[12-34]"),
        (ENV, "-22;"),
        (POLICY, "[-22+5]"),
        (ENV, "-17;"),
        (POLICY, "-17"),
    ]


def test_the_teacher_calls_in_about_a_third_of_the_traces_and_guesses_wrong_in_the_rest():
    env = make("calculator")
    rng = random.Random(0)
    called = right = 0
    for seed in range(500):
        env.reset(seed)
        trace = env.demonstrate(rng)
        if trace[0][1].startswith("["):
            called += 1
        else:
            assert len(trace) == 1
            guess = trace[0][1]
            assert abs(len(guess) - len(env.unwrapped.answer)) <= 1
            right += env.step(guess).reward == 1.0
    assert 140 < called < 210
    assert right < 6


def test_the_alphabet_covers_everything_that_is_written():
    env = make("calculator")
    assert env.alphabet == "*+-0123456789;=?[]"
    rng = random.Random(0)
    written: set[str] = set()
    for seed in range(120):
        written |= set(env.reset(seed)[0])
        written |= {char for _, text in env.demonstrate(rng) for char in text}
    assert written | {"?"} == set(env.alphabet)
    assert make("calculator", operators="+", tool=False).alphabet == "+0123456789="


def test_without_the_tool_nothing_is_a_call():
    env = env_with("12+34", 46, tool=False)
    assert env.stop == ()
    assert env.demonstrate(random.Random(0), tool_rate=1.0) == [(POLICY, "46")]
    turn = env.step("[12+34]")
    assert (turn.reward, turn.terminated) == (0.0, True)


def test_settings_bound_what_is_drawn():
    env = make("calculator", operands=(3, 3), digits=(1, 1), operators="-")
    for seed in range(50):
        expression = env.reset(seed)[0][:-1]
        assert len(expression) == 5
        assert expression[1] == expression[3] == "-"
        assert "0" not in expression
        assert split_of(expression) == "train"


def test_both_sizes_are_drawn():
    env = make("calculator")
    working = [work(env.reset(seed)[0][:-1]) for seed in range(100)]
    assert {len(one.numbers) for one in working} == {2, 3}
    assert {len(str(number)) for one in working for number in one.numbers} == {2, 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operators": "+/"}, "operators='\\+/'"),
        ({"operators": ""}, "operators=''"),
        ({"operands": (1, 2)}, "operands=\\(1, 2\\)"),
        ({"operands": (3, 2)}, "operands"),
        ({"digits": (0, 2)}, "digits"),
        ({"digits": (2,)}, "digits"),
        ({"operands": (2, 30), "digits": (2, 9)}, "100 digits"),
        ({"split": "dev"}, "split='dev'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        make("calculator", **options)


def test_an_empty_split_is_an_error_and_not_an_endless_search(monkeypatch: pytest.MonkeyPatch):
    for module in ("arithmetic", "calculator"):
        monkeypatch.setattr(f"graft.envs.{module}.MAX_TRIES", 100)
        monkeypatch.setattr(f"graft.envs.{module}.split_of", lambda text: "train")
    for env in (Expression(split="test"), Arithmetic(split="test")):
        with pytest.raises(ValueError, match=r"no .*expression"):
            env.reset(0)


def test_nested_expressions_have_exactly_the_given_operations():
    rng = random.Random(0)
    drawn = [draw_nested(rng, 4, 3) for _ in range(300)]
    assert all(sum(text.count(sign) for sign in "+-*/") == 3 for text in drawn)
    assert any("(" in text for text in drawn)
    assert not all("(" in text for text in drawn)
    assert {len(n) for text in drawn for n in re.findall(r"\d+", text)} == {1, 2, 3, 4}


def test_values_of_questions_need_no_more_than_three_decimals():
    env = make("arithmetic")
    decimals = 0
    for seed in range(200):
        env.reset(seed)
        assert evaluate(env.expression) == Fraction(env.answer) < 10**9
        decimals += "." in env.answer
    assert 0 < decimals < 100


def test_arithmetic_settings_are_checked():
    with pytest.raises(ValueError, match="digits=0, operations=3"):
        Arithmetic(digits=0)
    with pytest.raises(ValueError, match="operations=21"):
        Arithmetic(operations=21)

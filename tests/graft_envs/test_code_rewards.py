"""Programs against hidden tests: what passes, what fails, and what must never pass."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.rewards import make_reward
from graft_envs.code.grading import (
    TestCase,
    hardest,
    last_code_block,
    read_tests,
    score_tests,
)
from graft_sandbox import SandboxOutcome

DOUBLE = "print(int(input()) * 2)"
TESTS = {"inputs": ["3", "4\n"], "outputs": ["6\n", " 8 "]}


def test_a_right_program_scores_one_and_a_wrong_one_nothing():
    assert score_tests(DOUBLE, TESTS) == 1.0
    assert score_tests("print(int(input()) * 3)", TESTS) == 0.0
    assert score_tests("print(6)", TESTS) == 0.0  # right once is not right


@pytest.mark.parametrize(
    "code",
    [
        "",
        "x = (",
        DOUBLE + "\n1/0",  # the right text, then a crash
        DOUBLE + "\nimport sys; sys.exit(1)",
        DOUBLE + "\nprint('and more')",
        "while True: pass",
        "while True: print(6)",
        "print(open('/etc/passwd').read())",
    ],
)
def test_programs_that_do_not_end_well_score_nothing(code: str):
    assert score_tests(code, TESTS, timeout=0.5) == 0.0


def test_tests_may_be_json_text_and_lists_are_lines():
    tests = json.dumps({"inputs": [["2", "5 6"]], "outputs": [["5", "6"]]})
    code = "n = input()\nfor word in input().split(): print(word)"
    assert score_tests(code, tests) == 1.0
    assert read_tests(tests) == [TestCase("2\n5 6", "5\n6")]


def test_only_the_longest_inputs_are_run():
    tests = {
        "inputs": ["1", "4444", "22", "333"],
        "outputs": ["wrong", "8888", "wrong", "666"],
    }
    assert score_tests(DOUBLE, tests, max_tests=2) == 1.0
    assert score_tests(DOUBLE, tests, max_tests=3) == 0.0
    cases = read_tests({"inputs": ["a" * n for n in range(20)], "outputs": ["x"] * 20})
    assert [len(case.stdin) for case in hardest(cases, 12)] == list(range(8, 20))
    with pytest.raises(ValueError, match="max_tests=0"):
        score_tests(DOUBLE, tests, max_tests=0)


def test_after_a_failure_the_rest_is_not_run(monkeypatch: pytest.MonkeyPatch):
    ran: list[str] = []

    def run(program: str, stdin: str, **_: object) -> SandboxOutcome:
        ran.append(stdin)
        return SandboxOutcome("no", "", 0, 0.0)

    monkeypatch.setattr("graft_envs.code.grading.run_python", run)
    tests = {"inputs": list("abcd"), "outputs": ["1"] * 4}
    assert score_tests(DOUBLE, tests, workers=1) == 0.0
    assert ran == ["a"]


def test_functions_are_called_and_their_results_compared():
    tests = {"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, ["ab"]]}
    assert score_tests("def add(a, b):\n    print('noise')\n    return a + b", tests) == 1.0
    assert score_tests("class Solution:\n    def add(self, a, b): return a + b", tests) == 1.0
    assert score_tests("def add(a, b): return a", tests) == 0.0
    assert score_tests("def other(a, b): return a + b", tests) == 0.0
    assert score_tests("def add(a, b): print(a + b)", tests) == 0.0


@pytest.mark.parametrize(
    ("result", "expected", "passes"),
    [
        ("(1, 2)", [1, 2], 1.0),
        ("[[1, 2]]", [[1, 2]], 1.0),
        ("[1, 2]", [[1, 2]], 1.0),  # APPS wraps results in a list
        ("'yes'", "yes", 1.0),
        ("'yes'", ["yes"], 1.0),
        ("3", "3", 1.0),  # LiveCodeBench writes JSON texts
        ("True", [True], 1.0),
        ("None", None, 1.0),
        ("{1: 2}", {"1": 2}, 1.0),
        ("{1, 2}", [1, 2], 0.0),
        ("object()", None, 0.0),
        ("float('nan')", None, 0.0),
        ("'no'", "yes", 0.0),
    ],
)
def test_results_are_compared_as_json(result: str, expected: object, passes: float):
    tests = {"fn_name": "f", "inputs": [[0], [1]], "outputs": [expected, 7]}
    assert score_tests(f"def f(x): return 7 if x else {result}", tests) == passes


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": ["1"], "outputs": [""]},
        {"inputs": ["1", "2"], "outputs": [" \n", ["", ""]]},
        {"inputs": [[1]], "outputs": [None], "fn_name": "f"},
        [{"input": "1", "output": ""}],
    ],
)
def test_tests_that_a_program_without_output_passes_are_refused(tests: object):
    with pytest.raises(ValueError, match="a program that does nothing passes"):
        score_tests("pass", tests)


def test_a_silent_program_never_passes_whichever_tests_are_chosen():
    tests = {"inputs": ["long" * 9, "longer" * 9, "1"], "outputs": ["", "", "1"]}
    assert score_tests("pass", tests, max_tests=1) == 0.0
    assert score_tests("x = input()\nif len(x) == 1: print(x)", tests) == 1.0


def test_rewards_that_may_take_time_run_on_a_thread():
    """An endless program must not stop the event loop, and with it all other attempts."""
    for name in ("code_tests", "math_answer"):
        assert getattr(make_reward(name), "blocking", False), name
    assert make_reward(["f1", "math_answer"]).blocking  # pyright: ignore[reportAttributeAccessIssue]


def test_arguments_may_be_lines_of_json():
    tests = {"fn_name": "f", "inputs": ['[1, 2]\n"a"'], "outputs": ['[1, 2, "a"]']}
    assert score_tests("def f(x, y): return [*x, y]", tests) == 1.0


def test_what_is_expected_never_enters_the_sandbox():
    secret = "answer-8341"
    code = (
        "import sys, gc\n"
        "text = ''.join(str(o) for o in gc.get_objects() if isinstance(o, (str, bytes, dict, list)))\n"
        "print('answer-' + '8341' if 'answer-' + '8341' in text else 'unknown')"
    )
    assert score_tests(code, {"inputs": [""], "outputs": [secret]}, timeout=20.0) == 0.0


def test_a_program_cannot_end_the_test_early_and_pass():
    tests = {"fn_name": "f", "inputs": [[1]], "outputs": [1]}
    for code in ("import os; os._exit(0)", "exit()", "print('\\x1e1'); exit(3)"):
        assert score_tests(code, tests) == 0.0


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ({"inputs": []}, "holds no tests"),
        ({"inputs": [], "outputs": []}, "0 inputs and 0 outputs, not pairs"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ("[1, 2]", "holds no tests: .* not \\[1, 2\\]"),
    ],
)
def test_tests_that_test_nothing_are_the_callers_mistake(tests: object, why: str):
    with pytest.raises(ValueError, match=why):
        score_tests(DOUBLE, tests)  # pyright: ignore[reportArgumentType]


def test_the_last_block_is_the_answer():
    text = "First:\n```python\nprint(1)\n```\nBetter:\n```py\nprint(2)\n```\nDone ```x"
    assert last_code_block(text) == "print(2)\n"
    assert last_code_block("no code") is None


@given(st.text(max_size=80))
@settings(max_examples=12)
def test_any_text_is_graded_and_none_of_it_passes(code: str):
    tests = {"inputs": ["", ""], "outputs": ["4f1c", "9b2e"]}
    assert score_tests(code, tests, timeout=20.0, workers=1) == 0.0

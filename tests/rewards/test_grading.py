"""Grading: what is decided at once, what is worked out, and what is stopped."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.rewards.maths import grading
from graft.rewards.maths.ball_arithmetic import Ball, Unreadable, differ
from graft.rewards.maths.formulas import read_formula
from graft.rewards.maths.grading import WORKERS, decide, grade
from graft.rewards.maths.spelling import spell, tidy
from graft.rewards.maths.symbolic import math_equal
from graft.rewards.worker_pool import NoWorkers, WorkerError, WorkerPool, WorkerTimeout
from tests.held import open_files

RIGHT = [
    ("1,200", "1200"),
    ("1{,}200", "1200"),
    ("\\$1,200.50", "1200.5"),
    ("$\\dfrac{1}{2}$", "\\frac12"),
    ("\\frac{2}{4}", "0.5"),
    ("1\\frac{1}{2}", "3/2"),
    ("1 1/2", "1.5"),
    ("-1 1/2", "-1.5"),
    (".5", "0.50"),
    ("05", "5"),
    ("5.", "5"),
    ("−5", "-5"),
    ("1e3", "1000"),
    ("50\\%", "50"),
    ("50\\%", "0.5"),
    ("0.5", "50%"),
    ("5\\text{ cm}", "5"),
    ("5\\text{ cm}^2", "5"),
    ("5 cm", "5"),
    ("90^\\circ", "90"),
    ("100 dollars", "100"),
    ("0.3333333", "0.333333333"),
    ("\\sqrt{4}", "2"),
    ("\\sqrt[3]{8}", "2"),
    ("2^{10}", "1024"),
    ("-2^2", "-4"),
    ("x=5", "5"),
    ("5", "y = 5"),
    ("\\text{Yes}", "yes"),
    ("\\left(1,\\,2\\right)", "(1, 2)"),
    ("(-\\infty, 3]", "(-\\infty,3]"),
    ("3,-2", "-2, 3"),
    ("\\{1,2\\}", "\\{2, 1\\}"),
    ("5,", "5"),
    ("5\\\\", "5"),
    ("1\\,000\\,000", "10^6"),
    ("12\\ 345", "12345"),
    ("0.1\\overline{6}", "\\frac{1}{6}"),
    ("-0.\\bar{3}", "-1/3"),
    ("0.\\overline{9}", "1"),
    ("0.333333", "0.\\overline{3}"),
    ("5\\text{ million}", "5000000"),
    ("1.2 million", "1,200,000"),
    ("2 dozen", "24"),
    ("12 percent", "12\\%"),
    ("10 km/h", "10"),
    ("9.8 \\text{ m/s}^2", "9.8"),
    ("60^\\circ C", "60"),
    ("4\\pi\\text{ square inches}", "4\\pi"),
    ("\\text{10 apples}", "10"),
    ("5€", "5"),
    ("2.5 x 10^2", "250"),
    ("2**10", "1024"),
    ("2pi", "2\\pi"),
    ("sqrt(9)", "3"),
    ("3\\sqrt 16", "12"),
    ("\\varnothing", "\\emptyset"),
    ("\\langle 1,2\\rangle", "(1,2)"),
    ("1,2,\\dots,9", "1, 2, \\ldots, 9"),
    ("5=x", "5"),
    ("5", "5=x"),
    ("\\angle ABC=60^\\circ", "60"),
    ("\\text{Area} = 5", "5"),
    ("a_n=2", "2"),
    ("S=2*3=6", "6"),
    ("(x,y)=(1,2)", "(1,2)"),
    ("2^{2025}", "2\\cdot 2^{2024}"),
    ("2^{2^{10}}", "2^{1024}"),
    ("1-\\frac{1}{2^{2022}}", "\\frac{2^{2022}-1}{2^{2022}}"),
]
WRONG = [
    ("3", "4"),
    ("", "4"),
    ("0", "8"),
    ("1.0000001", "1"),
    ("0.0000001", "0.0000002"),
    ("0.333", "1/3"),
    ("1,500", "1.5"),
    ("50%", "5"),
    ("-2^2", "4"),
    ("3.14", "\\pi"),
    ("2\\sqrt{3}", "\\sqrt{3}"),
    ("\\frac{\\pi}{3}", "\\frac{\\pi}{6}"),
    ("x^2+2x+1", "(x+2)^2"),
    ("5x", "5"),
    ("2x+1", "7"),
    ("no solution", "5"),
    ("5", "no solution"),
    ("Tuesday", "\\text{Monday}"),
    ("(1,3)", "(1,2)"),
    ("(1,3]", "[1,2]"),
    ("(-\\infty,3)", "(-\\infty,2)"),
    ("\\{1,2,4\\}", "\\{1,2,3\\}"),
    ("1,2,3", "3"),
    ("5\\text{ million}", "5"),
    ("5\\text{ or more}", "5"),
    ("5\\text{ and a half}", "5"),
    ("the answer is 5", "5"),
    ("7, not 5", "5"),
    ("10\\text{ apples and }5\\text{ pears}", "10"),
    ("2 3", "5"),
    ("0 33", "33"),
    ("6=5", "5"),
    ("x=2+2=5", "5"),
    ("x=5, x=7", "7"),
    ("x=5\\to x=7", "7"),
    ("x=1 or x=2", "2"),
    ("1", "x+y=1"),
    ("4", "x^2+y^2=4"),
    ("\\{1,2,10\\}", "\\{1,2,\\ldots,10\\}"),
    ("listen", "silent"),
    ("3\\sqrt 11", "3"),
    ("1.6\\times10^{-19}", "1.7\\times10^{-19}"),
    ("2.5\\pi\\times10^{-9}", "1.5\\pi\\times10^{-9}"),
    ("2^{2022}", "2^{2023}"),
    ("1-\\frac{1}{2^{2021}}", "1-\\frac{1}{2^{2022}}"),
]
OPEN = [
    ("x + x", "2x"),
    ("\\sqrt{12}", "2\\sqrt{3}"),
    ("0.333333", "1/3"),
    ("6/2(1+2)", "9"),  # 9 or 1
    ("f(x)", "fx"),
    ("9 \\cdot 5\\frac{1}{5}", "9"),
    ("(1,234)", "1234"),
    ("x=5", "y=5"),
    ("abc", "cab"),
    ("A", "\\text{(A)}"),
    ("1,2", "(1,2)"),
    ("(1,2)", "[1,2]"),
    ("\\sin x", "x"),
    ("5 m", "5"),
    ("3,14", "3.14"),
    ("2abc", "2cab"),
    ("m+n=5", "5"),
    ("x=1, x=2", "1, 2"),
]


@pytest.mark.parametrize(("answer", "gold"), RIGHT)
def test_what_is_certainly_right_is_decided_at_once(answer: str, gold: str):
    assert decide(answer, gold) is True


@pytest.mark.parametrize(("answer", "gold"), WRONG)
def test_what_is_certainly_wrong_is_decided_at_once(answer: str, gold: str):
    assert decide(answer, gold) is False


@pytest.mark.parametrize(("answer", "gold"), OPEN)
def test_what_can_be_read_in_two_ways_is_left_open(answer: str, gold: str):
    assert decide(answer, gold) is None


def test_layout_and_units_go_and_the_rest_stays():
    assert tidy("$\\dfrac{1}{2}\\text{ cm}$.") == "\\frac{1}{2}"
    assert tidy("5 \\text{ or } 6") == "5 or 6"
    assert tidy("\\begin{pmatrix}1\\\\ 2\\end{pmatrix}") == "\\begin{pmatrix}1\\\\2\\end{pmatrix}"
    assert tidy("1 2") == "1 2"


@pytest.mark.parametrize(
    ("answer", "golds", "is_right"),
    [
        ("\\sqrt{12}", "2\\sqrt{3}", True),
        ("x(x+2)+1", "(x+1)^2", True),
        ("0.333333", "\\frac{1}{3}", True),
        ("\\frac{1}{2}", ["0.25", "0.5"], True),
        ("x+x", ["7", "2x"], True),
        ("\\sin x", "\\cos x", False),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\3\\end{pmatrix}", False),
        ("1/0", "1", False),
        ("4", [], False),
        ("x > 2", "(2, \\infty)", True),
        ("1 \\le x < 2", "[1, 2)", True),
        ("1 \\le x < 2", "[1, 2]", False),
        ("m+n=5", "5", True),
        ("2abc", "2cab", True),
        ("sqrt(2)/2", "\\frac{1}{\\sqrt{2}}", True),
        ("1 \\text{ or } 2", "1,2", True),
        ("1 < 2", "\\emptyset", False),
    ],
)
def test_what_is_open_is_worked_out(answer: str, golds: str | list[str], is_right: bool):
    assert grade(answer, golds, timeout=20.0) is is_right


JOINTS = [
    *("\\cup ", "\\to ", "...", "?", "(", "\\\\", "|", "\\bmod ", "\\boxed{}", " -> ", "$ $", "#")
]


@pytest.mark.parametrize("joint", JOINTS)
def test_a_number_in_the_midst_of_something_else_is_not_the_answer(joint: str):
    assert not grade(f"5{joint}7", ["5", "7"], timeout=20.0)


def test_spelling_keeps_the_meaning():
    assert spell("x ≤ 2*sqrt(3).") == "x \\le  2*\\sqrt{3}"
    assert spell("$\\dfrac{1}{2}$") == "\\frac{1}{2}"
    assert spell("1\\,000 and 2{,}345,\\!678") == "1000 and 2345,678"
    assert spell("(1\\,00)") == "(1\\,00)"


def test_without_processes_the_bounded_comparison_is_used(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object, **kwargs: object) -> bool:
        raise NoWorkers("no processes here")

    monkeypatch.setattr(WORKERS, "call", refuse)
    assert grade("x + x", "2x")
    assert not grade("\\sin x", "\\cos x")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "bomb",
    [
        *("9^{9^{9^9}}", "9**9**9", "9**9**9**9", "9^{99999999}", "2^{10*10*10*10*10*10*10*10*10}"),
        *("99999999!", "1000000!/1000000!", "\\log(9^{9^{9}})", "e^{e^{e^{e^{e}}}}"),
        *("\\binom{100000000}{50000000}", "\\Gamma(1000000)", "\\sum_{i=1}^{100000000} i"),
        *("\\prod_{i=1}^{100000000} i", "\\begin{pmatrix}9^{9^{9^9}}\\\\2\\end{pmatrix}"),
        *("(1+x+y+z)^{99}(1+y)^{99}", "1+" * 50_000 + "1"),
        "{" * 5000 + "1" + "}" * 5000,
        "(" * 150,
        "\\frac{" * 40,
        "\\sqrt" * 40 + "2",
        "9" * 1_000_000,
        "1," * 500_000,
        "\\text{" * 200_000,
        "\ud800",
        "\x00",
    ],
)
def test_an_answer_that_is_too_much_is_wrong_and_the_next_one_is_graded(bomb: str):
    assert not grade(bomb, ["42", "x+1"])
    assert grade("x+x", "2x", timeout=20.0)


def test_a_long_answer_is_right_only_as_the_same_text():
    long = "1+" * 3000 + "1"
    assert grade(f" {long} ", long)
    assert not grade(long + " ", long + "2")


# the pool


def test_a_call_past_its_limit_is_ended_and_the_next_one_answered():
    with pytest.raises(WorkerTimeout):
        WORKERS.call("time:sleep", 60, timeout=0.02)
    assert WORKERS.call("math:factorial", 5, timeout=20) == 120


def test_a_call_that_waits_for_a_processor_is_not_past_its_limit():
    # a busy machine made right answers wrong: the limit was one of the clock
    assert WORKERS.call("time:sleep", 0.5, timeout=0.1) is None


def test_a_loop_in_c_is_ended_too():
    with pytest.raises(WorkerTimeout):
        WORKERS.call("operator:pow", 9, 9**9, timeout=0.3)
    assert WORKERS.call("math:factorial", 5, timeout=20) == 120


def test_a_failure_in_a_worker_is_raised():
    with pytest.raises(WorkerError, match="ValueError: factorial"):
        WORKERS.call("math:factorial", -1, timeout=20)


def test_a_call_that_kills_its_worker_is_tried_twice_and_then_given_up():
    with pytest.raises(WorkerError, match="its worker died"):
        WORKERS.call("os:abort", timeout=20)
    assert WORKERS.call("math:factorial", 5, timeout=20) == 120


def test_workers_and_template_may_be_killed_between_calls():
    assert grade("x+x", "2x", timeout=20.0)
    for worker in WORKERS._idle:
        os.kill(worker.pid, signal.SIGKILL)
    assert grade("x+x", "2x", timeout=20.0)
    template = WORKERS._template
    assert template is not None
    template.kill()
    template.wait()
    for worker in WORKERS._idle:
        os.kill(worker.pid, signal.SIGKILL)
    assert grade("x+x", "2x", timeout=20.0)


def test_a_pool_that_cannot_warm_up_names_the_reason():
    pool = WorkerPool("graft.rewards.maths.symbolic:no_such_function")
    with pytest.raises(NoWorkers, match="no_such_function"):
        pool.call("math:factorial", 5, timeout=1)
    pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="counts the files of this process in /proc")
def test_a_pool_that_cannot_be_started_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch):
    pool, before = WorkerPool("gc:freeze"), open_files()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(NoWorkers, match="cannot start worker processes: FileNotFound") as caught:
        pool.call("math:factorial", 5, timeout=1)
    assert open_files() == before, caught.value  # which still holds the frames that failed
    monkeypatch.undo()
    pool.warm = "graft.rewards.maths.symbolic:no_such_function"
    with pytest.raises(NoWorkers, match="no_such_function"):
        pool.call("math:factorial", 5, timeout=1)
    assert open_files() == before


def test_many_threads_share_the_pool():
    verdicts: dict[int, bool] = {}

    def work(number: int) -> None:
        verdicts[number] = grade(f"{number}x+x", f"{number + 1}x" if number % 2 else "y+z")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2, 14)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == {number: number % 2 == 1 for number in range(2, 14)}
    assert len(WORKERS._idle) <= WORKERS.size


ORPHANS = """
import json, os, signal, threading, time
from graft.rewards.worker_pool import WorkerPool
pool = WorkerPool("gc:freeze", size=2)
first = pool.call("os:getpid", timeout=20)
threading.Thread(target=lambda: pool.call("time:sleep", 60, timeout=0.1), daemon=True).start()
while pool._idle:
    time.sleep(0.01)  # until that thread has the first worker
second = pool.call("os:getpid", timeout=20)
print(json.dumps([pool._template.pid, first, second]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks processes up in /proc")
def test_nothing_is_left_behind_when_the_parent_is_killed():
    command = [sys.executable, "-c", ORPHANS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    pids = json.loads(done.stdout)
    assert len(set(pids)) == 3
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


FORKED = """
import json, os, signal, time
from graft.rewards.worker_pool import WorkerPool
pool = WorkerPool("gc:freeze", size=1)
worker = pool.call("os:getpid", timeout=20)
child = os.fork()
if child == 0:
    time.sleep(60)
time.sleep(0.1)
print(json.dumps([child, pool._template.pid, worker]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks processes up in /proc")
def test_a_forked_process_does_not_keep_the_parents_workers_alive(tmp_path: Path):
    with (tmp_path / "out").open("w") as out:  # the child would hold a pipe open
        subprocess.run([sys.executable, "-c", FORKED], stdout=out, timeout=60)
    child, *pids = json.loads((tmp_path / "out").read_text())
    try:
        assert is_running(child)
        deadline = time.monotonic() + 20
        while any(map(is_running, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_running, pids))
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_process_grades_with_its_own_pool():
    code = (
        "import os\n"
        "from graft.rewards.worker_pool import WorkerPool\n"
        "pool = WorkerPool('gc:freeze', size=1)\n"
        "call = lambda: pool.call('math:factorial', 5, timeout=20)\n"
        "assert call() == 120\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(call())\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == call() == 120\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")


# formulas


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2*3", 7),
        ("2-3-4", -5),
        ("8/4/2", 1),
        ("(1+2)(3+4)", 21),
        ("2(3+4)", 14),
        ("\\frac{1}{2}+\\frac13", Fraction(5, 6)),
        ("\\frac1{12}", Fraction(1, 12)),
        ("2^{-2}", Fraction(1, 4)),
        ("4^{\\frac{1}{2}}", 2),
        ("\\sqrt{\\frac{9}{16}}", Fraction(3, 4)),
        ("1.25\\times 4", 5),
    ],
)
def test_rational_formulas_are_exact(text: str, value: Fraction | int):
    assert read_formula(text).values == (value,)


def test_roots_and_pi_come_with_a_bound():
    for text, value in (("2\\sqrt{3}", 2 * math.sqrt(3)), ("\\frac{\\pi}{7}-1", math.pi / 7 - 1)):
        (ball,) = read_formula(text).values
        assert isinstance(ball, Ball)
        assert abs(ball.mid - value) <= ball.err < 1e-14


def test_what_may_be_zero_is_not_divided_by():
    for text in ("1/0", "\\frac{1}{\\sqrt{2}\\sqrt{2}-2}", "\\sqrt{2-\\sqrt{2}\\sqrt{2}}", "0^0"):
        with pytest.raises(Unreadable):
            read_formula(text)


TERMS = st.recursive(
    st.integers(0, 99).map(lambda n: (str(n), Fraction(n))),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(
        lambda t: (f"({t[0][0]}{t[1]}{t[2][0]})", combine(t[0][1], t[1], t[2][1]))
    ),
    max_leaves=6,
)


def combine(a: Fraction | None, sign: str, b: Fraction | None) -> Fraction | None:
    if a is None or b is None or (sign == "/" and b == 0):
        return None
    return {"+": a.__add__, "-": a.__sub__, "*": a.__mul__, "/": a.__truediv__}[sign](b)


@given(TERMS)
def test_generated_sums_have_the_value_they_were_built_with(term: tuple[str, Fraction | None]):
    text, value = term
    if value is None:
        with pytest.raises(Unreadable):
            read_formula(text)
    else:
        assert read_formula(text).values == (value,)
        assert decide(text, str(value)) is True
        assert decide(text, str(value + 1)) is False


@given(st.integers(2, 400), st.integers(2, 400))
def test_different_roots_differ_and_equal_ones_never_do(a: int, b: int):
    (first,), (second,) = (
        read_formula(f"\\sqrt{{{a}}}").values,
        read_formula(f"\\sqrt{{{b}}}").values,
    )
    assert differ(first, second) is (a != b)
    (product,) = read_formula(f"\\sqrt{{{a}}}\\sqrt{{{b}}}").values
    (joined,) = read_formula(f"\\sqrt{{{a * b}}}").values
    assert not differ(product, joined)


# anything at all

SCRAPS = st.lists(
    st.sampled_from(
        [*"0123456789+-*/^(){}[],.=<>x yé%$\\", "\\frac", "\\sqrt", "\\text{", "\\left(", "\\pi"]
    ),
    max_size=25,
).map("".join)


@settings(max_examples=80)
@given(SCRAPS | st.text(max_size=40), SCRAPS | st.sampled_from(["5", "0.5", "x+1", "(1,2)", "yes"]))
def test_no_text_makes_it_raise_and_every_text_equals_itself(answer: str, gold: str):
    assert decide(answer, gold) in (True, False, None)
    assert decide(answer, answer) is bool(tidy(answer))


WHOLE = st.integers(0, 30).map(str)
SIMPLE = st.one_of(
    WHOLE,
    st.tuples(WHOLE, st.integers(1, 9)).map(lambda t: f"\\frac{{{t[0]}}}{{{t[1]}}}"),
    st.tuples(WHOLE, st.sampled_from(["5", "25", "125"])).map(".".join),
    st.integers(2, 12).map(lambda n: f"\\sqrt{{{n}}}"),
    st.sampled_from(["x", "y", "\\pi"]),
)
EXPRESSIONS = st.one_of(
    SIMPLE,
    st.tuples(SIMPLE, st.sampled_from([" + ", " - ", " \\cdot "]), SIMPLE).map("".join),
    st.tuples(SIMPLE, SIMPLE).map(lambda t: f"({t[0]}, {t[1]})"),
    st.tuples(SIMPLE, SIMPLE).map(lambda t: f"\\frac{{{t[0]}}}{{1+{t[1]}}}"),
)


@pytest.mark.peer
@settings(deadline=None, max_examples=20)
@given(EXPRESSIONS, EXPRESSIONS)
def test_what_is_decided_here_math_verify_decides_alike(answer: str, gold: str):
    for first, second in ((answer, gold), (answer, answer.replace(" ", ""))):
        verdict = decide(first, second)
        if verdict is not None:
            assert math_equal(first, second) is verdict


def test_grading_is_what_the_reward_uses():
    from graft.rewards import answers

    assert answers.grade is grading.grade

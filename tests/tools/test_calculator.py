"""The calculator: exact values, hand-worked steps, and inputs that would hang or crash an eval."""

from __future__ import annotations

import re
import threading
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.protocols import Tool
from graft.registry import resolve
from graft.tools import TOOLS, is_error
from graft.tools.calculator import (
    MAX_LENGTH,
    Calculator,
    CalculatorError,
    evaluate,
    format_number,
    work,
)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+34*5", 182),
        ("(12 + 6) / 3", 6),
        ("2-3-4", -5),  # left to right
        ("12/4/3", 1),
        ("-5+12", 7),
        ("5--3", 8),
        ("-(2+3)*4", -20),
        (" 7 ", 7),
        ("0.1+0.2", Fraction(3, 10)),  # exact, not binary
        (".5*4", 2),
        ("1/3", Fraction(1, 3)),
        ("+".join(["1"] * 90), 90),
        ("(" * 140 + "1" + ")" * 140, 1),
    ],
)
def test_values_follow_precedence_and_are_exact(expression: str, value: Fraction):
    assert evaluate(expression) == value


def test_steps_come_in_the_order_of_precedence():
    working = work("12-34+5*2")
    assert [step.text for step in working.steps] == ["12-34", "5*2", "-22+10"]
    assert [step.value for step in working.steps] == [-22, 10, -12]
    assert working.numbers == (12, 34, 5, 2)
    assert working.value == -12


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("1/0", "division by zero"),
        ("3/(2-2)", "division by zero"),
        ("9**9**9", "only + - * /"),
        ("7//2", "only + - * /"),
        ("2 3", "not an arithmetic"),
        ("(2)(3)", "not an arithmetic"),
        ("1+", "not an arithmetic"),
        ("012+1", "not an arithmetic"),
        ("...", "not an arithmetic"),  # an Ellipsis in Python
        ("()", "not an arithmetic"),
        ("__import__('os')", "unexpected character '_'"),
        ("1e9", "unexpected character 'e'"),
        ("1_000", "unexpected character '_'"),
        ("٣+٤", r"unexpected character '\u0663'"),  # Arabic digits
        ("1\n+2", r"unexpected character '\n'"),
        ("1\x00", r"unexpected character '\x00'"),
        ("-" * 200 + "1", "nested"),
        ("9" * 101, "digits"),
        ("*".join(["9" * 30] * 4), "digits"),
        ("1/" + "/".join(["9" * 30] * 4), "digits"),  # in the denominator
        ("1" * (MAX_LENGTH + 1), "longer than"),
        ("1+" * 500_000 + "1", "longer than"),
        ("(" * 1_000_000, "longer than"),
    ],
)
def test_an_expression_without_a_value_is_an_error_with_its_reason(expression: str, why: str):
    with pytest.raises(CalculatorError) as caught:
        evaluate(expression)
    assert why in str(caught.value)
    assert len(str(caught.value)) < 60
    answer = Calculator()(expression)
    assert is_error(answer)
    assert re.fullmatch(r"Error: [ -~]+", answer)


def test_operations_are_counted_and_unary_minus_is_none():
    assert evaluate("-5+12", max_operations=1) == 7
    assert evaluate("42", max_operations=0) == 42
    with pytest.raises(CalculatorError, match="2 operations, at most 1"):
        evaluate("1+2+3", max_operations=1)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (Fraction(170), "170"),
        (Fraction(-4), "-4"),
        (Fraction(9, 2), "4.500"),
        (Fraction(1, 3), "0.333"),
        (Fraction(-2, 3), "-0.667"),
        (Fraction(10**60), "1" + "0" * 60),
    ],
)
def test_whole_numbers_are_plain_and_others_have_three_decimals(number: Fraction, text: str):
    assert format_number(number) == text


def test_the_tool_answers_with_text():
    calculator = Calculator(max_operations=1)
    assert isinstance(calculator, Tool)
    assert calculator.name == "calculator"
    assert calculator("34*5") == "170"
    assert calculator("1/0") == "Error: division by zero"
    assert calculator("1+2+3").startswith("Error: ")


def test_the_table_holds_tools_under_their_names():
    arguments = {
        "search": {"corpus": "small"},
        "browse": {
            "corpus": "small",
            "summariser": {"url": "http://127.0.0.1:9/v1", "model": "reader"},
        },
    }
    for name in set(TOOLS) - {"mcp"}:  # which stands for all the tools of a server
        tool = resolve(name, TOOLS, "tool")(**arguments.get(name, {}))
        assert isinstance(tool, Tool)
        assert tool.name == {"browse": "search"}.get(name, name)  # a search, to the policy
        assert isinstance(tool("\x00 no such thing"), str)


@settings(deadline=None, max_examples=120)
@given(st.text(max_size=400) | st.text(alphabet="0123456789.+-*/() ", max_size=320))
def test_no_text_makes_the_tool_raise(content: str):
    assert isinstance(Calculator()(content), str)


TREES = st.recursive(
    st.integers(0, 999).map(str),
    lambda inner: st.builds("({}{}{})".format, inner, st.sampled_from("+-*/"), inner),
    max_leaves=8,
)


@settings(deadline=None, max_examples=80)
@given(TREES)
def test_values_agree_with_python_where_python_is_exact(expression: str):
    exact = re.sub(r"\d+", lambda number: f"F({number.group()})", expression)
    try:
        want = eval(exact, {"F": Fraction})  # the test's own expressions, of digits and operators
    except ZeroDivisionError:
        with pytest.raises(CalculatorError, match="division by zero"):
            evaluate(expression)
        return
    assert evaluate(expression) == want


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(0, 10**30), min_size=6, max_size=6), st.text("+-*", max_size=5))
def test_whole_numbers_are_worked_as_python_reads_them(numbers: list[int], symbols: str):
    """With a blank before it an operator is left to Python's parser."""
    operations = [f"{one}{n}" for one, n in zip(symbols, numbers[1:], strict=False)]
    parts = [str(numbers[0]), *operations]
    try:
        want = work(" ".join([*parts, "+0"]))
    except CalculatorError as error:
        with pytest.raises(CalculatorError, match=str(error)):
            work("".join(parts))
        return
    found = work("".join([*parts, "+0"]))
    assert found == want
    assert {type(one) for step in found.steps for one in step} == {str, Fraction}


def test_a_deep_stack_in_a_thread_is_no_trouble():
    results: list[str] = []

    def descend(depth: int) -> None:
        if depth:
            descend(depth - 1)
        else:
            results.append(Calculator()("-" * 99 + "1"))

    thread = threading.Thread(target=descend, args=(500,))
    thread.start()
    thread.join()
    assert results == ["-1"]

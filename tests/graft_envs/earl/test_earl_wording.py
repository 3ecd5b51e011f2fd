"""Numbers and sums in words: exact, unambiguous, and read back from answers."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.envs.arithmetic import Arithmetic, draw_nested, value_in_bounds
from graft.envs.wording import (
    TOO_LARGE,
    flat_in_words,
    number_in_words,
    numbers_in_words,
    operators_in_words,
)
from graft.text.parse import marked_number
from graft.tools.calculator import CalculatorError, evaluate


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (20, "twenty"),
        (99, "ninety-nine"),
        (100, "one hundred"),
        (115, "one hundred and fifteen"),
        (1000, "one thousand"),
        (1001, "one thousand and one"),
        (1100, "one thousand, one hundred"),
        (1234, "one thousand, two hundred and thirty-four"),
        (1_000_001, "one million and one"),
        (20_000_305, "twenty million, three hundred and five"),
        (-7, "minus seven"),
        (10**12, "one trillion"),
        (10**20 - 10**20 % 10**18, "one hundred quintillion"),
    ],
)
def test_numbers_have_english_names(number: int, words: str):
    assert number_in_words(number) == words


def test_a_number_too_large_to_name_is_refused():
    assert number_in_words(TOO_LARGE - 1).startswith("nine hundred and ninety-nine decillion")
    with pytest.raises(ValueError, match=r"10\^36"):
        number_in_words(TOO_LARGE)


@pytest.mark.peer
@given(st.integers(-(10**12), 10**12) | st.integers(0, 2000) | st.integers(0, 10**21))
def test_names_are_those_of_num2words(number: int):
    num2words = pytest.importorskip("num2words")
    assert number_in_words(number) == num2words.num2words(number)


def test_numbers_in_words_leave_signs_and_parentheses_alone():
    assert numbers_in_words("3 * (40 - 7) / 12") == "three * (forty - seven) / twelve"


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("3 + 4", "addition of 3 and 4"),
        ("3 - 4", "subtraction of 4 from 3"),
        ("3 * 4", "multiplication of 3 and 4"),
        ("3 / 4", "division of 3 by 4"),
        ("3 + 4 * 5", "addition of 3 and (4 times 5)"),
        ("(3 + 4) * 5", "multiplication of (3 plus 4) and 5"),
        ("9 - 3 - 2", "subtraction of 2 from (9 minus 3)"),
        ("9 - (3 - 2) / 4", "subtraction of ((3 minus 2) divided by 4) from 9"),
        ("7", "7"),
    ],
)
def test_operators_in_words_follow_the_tree(expression: str, words: str):
    assert operators_in_words(expression) == words


def test_the_flat_wording_is_the_originals():
    assert flat_in_words("3 + 4", "*", "5") == "multiplication of 3 plus 4 and 5"
    assert (
        flat_in_words("(3 / 4)", "-", "5 * 2") == "subtraction of 5 times 2 from (3 divided by 4)"
    )


def read_words(words: str) -> str:
    """An expression again from operators in words; only parentheses group."""
    inner = {" plus ": "+", " minus ": "-", " times ": "*", " divided by ": "/"}
    outer = {
        r"addition of (.*) and (.*)": r"(\1)+(\2)",
        r"subtraction of (.*) from (.*)": r"(\2)-(\1)",
        r"multiplication of (.*) and (.*)": r"(\1)*(\2)",
        r"division of (.*) by (.*)": r"(\1)/(\2)",
    }
    for word, sign in inner.items():
        words = words.replace(word, sign)
    for pattern, signs in outer.items():
        words = re.sub(rf"^{pattern}$", signs, words)
    return words


@given(st.integers(0, 10**9), st.integers(1, 6))
def test_the_words_mean_the_expression(seed: int, operations: int):
    expression = draw_nested(random.Random(seed), 4, operations)
    try:
        value = evaluate(expression)
    except CalculatorError:  # a division by zero
        return
    words = operators_in_words(expression)
    assert evaluate(read_words(words)) == value
    # every sign but the outermost has its own parentheses: no precedence is needed to read it
    assert words.count("(") == operations - 1


def test_questions_have_values_that_can_be_stated_exactly():
    assert value_in_bounds("1 / 8") is not None
    assert value_in_bounds("1 / 16") is None
    assert value_in_bounds("1 / (3 - 3)") is None
    assert value_in_bounds("100000 * 10000") is None
    assert value_in_bounds("1 - 100000 * 100000") is not None  # an upper bound only


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 5", "5"),
        ("####5", "5"),
        ("#### 1,234.5", "1234.5"),
        ("#### -3\nthen #### 4.", "4."),
        ("#### 4 #### about 5", "4"),
        ("#### about 5", None),
        ("####  5", None),  # two blanks: one is allowed
        ("5", None),
        ("", None),
    ],
)
def test_the_last_marked_number_is_found(text: str, number: str | None):
    assert marked_number(text) == number


def test_language_takes_its_share_and_halves_it():
    env = Arithmetic(language=0.5)
    forms = [(env.reset(seed), env.form)[1] for seed in range(500)]
    assert 205 < forms.count("digits") < 295  # 250, four standard deviations of 11
    assert 86 < forms.count("numbers") < 164  # 125, four of 10
    assert 86 < forms.count("operators") < 164


def test_the_value_is_the_same_in_every_form_and_flat_changes_only_the_words():
    plain, flat = Arithmetic(language=1.0), Arithmetic(language=1.0, flat=True)
    differ = 0
    for seed in range(100):
        prompt, _ = plain.reset(seed)
        flat_prompt, _ = flat.reset(seed)
        assert (plain.expression, plain.answer) == (flat.expression, flat.answer)
        assert evaluate(plain.expression) == evaluate(plain.answer)
        if plain.form == "numbers":
            assert prompt == flat_prompt
            assert not re.search(r"\d [-+*/]", str(prompt))
        else:
            assert "of" in str(prompt)
            differ += prompt != flat_prompt
    assert differ > 20


def test_flat_wording_is_graded_by_the_signs_written_out():
    env = Arithmetic(language=1.0, flat=True, operations=2, digits=1)
    seen = 0
    for seed in range(300):
        prompt, _ = env.reset(seed)
        if found := re.search(r"multiplication of (\d) plus (\d) and (\d)\?", str(prompt)):
            a, b, c = map(int, found.groups())
            assert env.expression == f"{a} + {b} * {c}"
            assert env.answer == str(a + b * c)
            seen += 1
    assert seen > 0


@pytest.mark.parametrize(
    ("read", "text", "is_right"),
    [
        ("line", "#### 38094", True),
        ("line", "#### 38,094", True),
        ("line", "first #### 1\nthen\n####38094.0 \n", True),
        ("line", "#### 38094\n#### 1", False),
        ("line", "38094", False),
        ("line", "####", False),
        ("line", "#### 38094 apples", False),
        ("marked", "#### 38094 apples", True),
        ("marked", "#### 38,094.", True),
        ("marked", "38094", False),
        ("marked", "#### 1.2.3", False),
        ("last", "so it is 38094", True),
        ("last", "<result> 38,094 </result>", True),
        ("last", "#### 38094 or 5", False),
        ("last", "none", False),
    ],
)
def test_which_number_counts_can_be_chosen(read: str, text: str, is_right: bool):
    env = Arithmetic(read=read)
    env.reset(0)
    assert env.answer == "38094"
    assert env.step(text).reward == float(is_right)


def test_settings_of_the_language_form_are_checked():
    with pytest.raises(ValueError, match=r"language=1\.5"):
        Arithmetic(language=1.5)
    with pytest.raises(ValueError, match="'markd'; did you mean 'marked'"):
        Arithmetic(read="markd")

"""Golds that are numbers: right in every notation, and in none for another number."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from graft.data.tables import read_table
from graft.envs.dataset.prompts import PromptsEnv
from graft.envs.dataset.questions import QuestionEnv
from graft.rewards import make_reward
from graft.rewards.answers import accepted_answers, same_text, value_f1
from graft.rewards.numbers import parse_number
from tests.rewards.attempts import attempt

REWARDS = ("exact_match", "f1", "math_answer")


def reward_of(name: str, text: str, gold: Any) -> float:
    return make_reward(name)(*attempt(f"<answer>{text}</answer>", answer=gold))


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (1e-05, ["0.00001", "1e-5", "1E-05"], ["0.0001", "1e-6", "1", "105", "-0.00001"]),
        (1e16, ["10000000000000000", "1e16", "10,000,000,000,000,000"], ["1e15", "116", "16"]),
        (1.5e-07, ["0.00000015", "1.5e-7"], ["1.5", "1507"]),
        ("1e5", ["100000", "100,000", "1e5", "1.0E+5"], ["15", "1e6", "5"]),
        ("100000", ["1e5", "100000.0"], ["1e4"]),
        (-5, ["-5", "\u22125", "\u22125.0", "\uff0d5"], ["5", "\u22126"]),
        ("\u22125", ["-5"], ["5"]),
        (3.0, ["3", "3.0", "3.00"], ["30", "3.1", "-3"]),
        (3, ["3.0", "3"], ["30", "33"]),
        (1234567.5, ["1,234,567.5", "1234567.50"], ["1,234,567", "12345675"]),
        (1200, ["1\u202f200", "1,200"], ["1 201", "1.2"]),
        (-0.0, ["0", "0.0", "-0"], ["1", "-1"]),
        (numpy.float32(0.1), ["0.1", "0.10"], ["0.2", "1", "01"]),
        (numpy.float64(0.1), ["0.1"], ["1"]),
        (numpy.int64(7), ["7", "7.0"], ["70"]),
        (numpy.array([7, 8]), ["7", "8"], ["78", "9"]),
        (Decimal("1E+5"), ["100000", "1e5"], ["15"]),
        (Decimal("0.10"), ["0.1"], ["1", "010"]),
        (True, ["True", "true"], ["False", "no"]),
        ([0.5, 1e-05], ["0.5", "0.00001"], ["5", "0.0001"]),
        ([None, 4.0, float("nan")], ["4"], ["None", "nan"]),
    ],
)
def test_a_gold_is_its_number_in_every_notation(name, gold, right, wrong):
    assert {text: reward_of(name, text, gold) for text in right} == dict.fromkeys(right, 1.0)
    assert {text: reward_of(name, text, gold) for text in wrong} == dict.fromkeys(wrong, 0.0)


@pytest.mark.parametrize(
    "gold", [None, float("nan"), numpy.float32("nan"), Decimal("NaN"), float("-inf"), [], [None]]
)
def test_without_a_gold_nothing_is_graded(gold):
    with pytest.raises(ValueError, match="no answer to compare"):
        accepted_answers(gold)


NUMBERS = st.builds(
    lambda digits, shift: Fraction(digits) * Fraction(10) ** shift,
    st.integers(-(10**7), 10**7),
    st.integers(-9, 9),
)


def notations(number: Fraction) -> list[Any]:
    """The number as texts, and as the types that a row may hold it in."""
    plain = format(Decimal(number.numerator) / Decimal(number.denominator), "f")
    whole, point, decimals = plain.partition(".")
    grouped = f"{int(whole):,}" if abs(number) >= 1 else whole
    forms = [plain, f"{Decimal(plain):e}", f"{Decimal(plain):E}", grouped + point + decimals]
    forms += [plain.replace("-", "\u2212"), grouped.replace(",", "\u202f") + point + decimals]
    forms += [f"{plain}0" if point else f"{plain}.0"]
    golds: list[Any] = [*forms, Decimal(plain), float(plain), numpy.float64(plain)]
    return golds + ([int(number)] if number.denominator == 1 else [])


@settings(deadline=None, max_examples=60)
@given(NUMBERS, NUMBERS)
def test_the_same_number_is_right_and_another_is_not(number: Fraction, other: Fraction):
    answers = [text for text in notations(number) if isinstance(text, str)]
    for gold in (accepted for form in notations(number) for accepted in accepted_answers(form)):
        assert all(same_text(text, gold) for text in answers), gold
        assert all(value_f1(text, gold) == 1.0 for text in answers), gold
    for gold in (accepted for form in notations(other) for accepted in accepted_answers(form)):
        assert number == other or not any(same_text(text, gold) for text in answers), gold
        assert number == other or not any(value_f1(text, gold) for text in answers), gold


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet="0123456789.,-+eE\u2212\u202f ()$%!x/", max_size=12))
def test_what_python_does_not_read_as_this_number_is_not_this_number(text: str):
    number = parse_number(text)
    if number is not None:
        plain = text.strip().translate(dict.fromkeys(map(ord, ",\u202f"))).replace("\u2212", "-")
        assert Fraction(Decimal(plain)) == number


@pytest.mark.parametrize("kind", [pyarrow.float16(), pyarrow.float32(), pyarrow.float64()])
def test_a_column_of_short_floats_holds_the_numbers_that_were_written(kind, tmp_path: Path):
    values = [0.1, 2.5, 1e-05, -0.0, None] if kind != pyarrow.float16() else [0.1, 2.5, None]
    rows = [numpy.float16(v) if kind == pyarrow.float16() and v is not None else v for v in values]
    columns = {
        "question": ["?"] * len(rows),
        "answer": pyarrow.array(rows, kind),
        "several": pyarrow.array([[row] for row in rows], pyarrow.list_(kind)),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    read = list(read_table(str(tmp_path / "rows.parquet")).scan())
    assert [row["answer"] for row in read] == values
    assert [row["several"] for row in read] == [[value] for value in values]


def test_a_float32_gold_is_graded_by_the_environments(tmp_path: Path):
    columns = {"question": ["?"], "answer": pyarrow.array([0.1], pyarrow.float32())}
    parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    for env in (QuestionEnv, PromptsEnv):
        made = env(data=str(tmp_path / "rows.parquet"))
        made.reset(0)
        assert made.step("<answer>0.1</answer>").reward == 1.0
        made.reset(0)
        assert made.step("<answer>0.2</answer>").reward == 0.0
    memory = PromptsEnv(rows=[{"question": "?", "answer": numpy.float32(0.1)}])
    assert memory.reset(0)[1]["answer"] == 0.1


def test_countdown_reads_its_numbers_in_every_type():
    for numbers, target in (
        ([4, 6], 24),
        ([4.0, 6.0], 24.0),
        (["4", "6"], "24"),
        (numpy.array([4, 6]), numpy.float32(24)),
        (torch.tensor([4, 6]).numpy(), Decimal(24)),
    ):
        gold = {"numbers": numbers, "target": target}
        assert reward_of("countdown", "6 * 4", gold) == 1.0
        assert reward_of("countdown", "6 + 4", gold) == 0.0
    with pytest.raises(ValueError, match="must be numbers"):
        reward_of("countdown", "6 * 4", {"numbers": [4, "six"], "target": 24})

"""Mathematical answers by their spelling: one spelling each, and faults that raise nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.rewards.maths.hendrycks import hendrycks_math, last_box, strip_string
from tests.rewards.attempts import attempt


@pytest.mark.parametrize(
    ("written", "spelling"),
    [
        ("1\n2", "12"),
        ("10\\!000", "10000"),
        ("\\\\pi", "\\pi"),
        ("\\tfrac{1}{2}", "\\frac{1}{2}"),
        ("\\dfrac{1}{2}", "\\frac{1}{2}"),
        ("\\left( 1, 2 \\right)", "(1,2)"),
        ("90^\\circ", "90"),
        ("90^{\\circ}", "90"),
        ("\\$5", "5"),
        ("5 \\text{ cm}", "5"),
        ("\\text{even}", "\\text{even}"),
        ("5 \\text{ cm} by 6 \\text{ cm}", "5\\text{cm}by6\\text{cm}"),
        ("50\\%", "50"),
        (".25", "0.25"),
        ("-\\frac{.1}{3}", "-\\frac{0.1}{3}"),
        ("x=3", "3"),
        ("k = 3", "3"),
        ("xyz=3", "xyz=3"),
        ("x=y=3", "x=y=3"),
        ("\\sqrt3", "\\sqrt{3}"),
        ("2\\sqrt{3}", "2\\sqrt{3}"),
        ("\\frac12", "\\frac{1}{2}"),
        ("\\frac1{72}", "\\frac{1}{72}"),
        ("\\frac{1}2", "\\frac{1}2"),  # as published
        ("\\frac12+\\frac34", "\\frac{1}{2}+\\frac{3}{4}"),
        ("0.5", "\\frac{1}{2}"),
        ("0.50", "0.50"),
        ("3/4", "\\frac{3}{4}"),
        ("-3/4", "\\frac{-3}{4}"),
        ("03/4", "03/4"),
        ("a/b", "a/b"),
        ("1/2/3", "1/2/3"),
        ("", ""),
    ],
)
def test_an_answer_has_one_spelling(written: str, spelling: str):
    assert strip_string(written) == spelling


@pytest.mark.parametrize(
    "faulty", ["\\frac", "\\frac1", "\\frac{", "\\sqrt", "\\sqrt{", "\\sqrt\\sqrt", "=", "\\", "}{"]
)
def test_faulty_latex_is_equal_to_itself_and_raises_nothing(faulty: str):
    assert hendrycks_math(*attempt(f"\\boxed {faulty}", answer=faulty)) == 1.0
    assert hendrycks_math(*attempt(f"\\boxed {faulty}", answer="7")) == 0.0


@given(st.text() | st.text(alphabet="\\frac{}sqrt=/. 0123boxed$%!text"))
def test_no_text_raises(text: str):
    assert strip_string(text).count("\n") == 0
    last_box(text)


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("\\boxed{1} \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("$\\boxed 7$ apples", "7"),
        ("\\boxed{1} and \\boxed 7$", "7"),
        ("\\fbox{3}", "3"),
        ("\\boxed{1} \\fbox{3}", "1"),
        ("\\boxed{1} \\boxed{2", None),
        ("\\boxed", None),
        ("no box", None),
        ("", None),
    ],
)
def test_the_last_box(text: str, box: str | None):
    assert last_box(text) == box


def test_the_reward_compares_spellings():
    assert hendrycks_math(*attempt("so \\boxed{\\dfrac12}", answer="1/2")) == 1.0
    assert hendrycks_math(*attempt("\\boxed{x = 3}", "Done.", answer="3")) == 1.0  # the whole text
    assert hendrycks_math(*attempt("\\boxed{4}", answer=["3", "4"])) == 1.0
    assert hendrycks_math(*attempt("\\boxed{7}", answer="So it is $\\boxed{7}$.")) == 1.0
    assert hendrycks_math(*attempt("\\boxed{0.50}", answer="1/2")) == 0.0  # math_answer gives 1
    assert hendrycks_math(*attempt("3", answer="3")) == 0.0
    assert (
        hendrycks_math(*attempt(answer="example", shown="\\boxed{example}")) == 0.0
    )  # a box in the prompt is not the policy's

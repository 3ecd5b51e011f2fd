"""ARPO's reward: each error of form, the word overlap, the bonus."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.rewards.deep_research import (
    DeepResearchScore,
    answer_f1,
    deep_research,
    form_fault,
    score_deep_research,
)
from graft.types import Author
from tests.rewards.attempts import attempt

THINK = "<think>hm</think>"
SEARCH = "<search>author of Solaris</search> <result>\nLem\n</result>"
PYTHON = "<python>1961+5</python> <result>\n1966\n</result>"


def answer(text: str) -> str:
    return f"<answer>It is \\boxed{{{text}}}.</answer>"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (THINK + answer("Stanislaw Lem"), 1.0),
        (THINK + answer("Lem"), 2 / 3),  # 2 * 1 shared / (1 given + 2 wanted)
        (THINK + answer("the writer Stanislaw Lem"), 0.8),  # 2 * 2 / (3 + 2): no article counted
        (THINK + answer("Asimov"), 0.0),
        (THINK + answer(""), 0.0),
        (THINK + SEARCH + answer("Stanislaw Lem"), 1.0),
        (THINK + PYTHON + answer("Stanislaw Lem"), 1.0),
        (THINK + SEARCH + PYTHON + answer("Stanislaw Lem"), 1.1),
        (THINK + SEARCH + SEARCH + PYTHON + THINK + answer("Lem"), 2 / 3 + 0.1),
        (THINK + SEARCH + PYTHON + answer("Asimov"), 0.0),  # no bonus for tools alone
        (THINK + answer("Asimov} no \\boxed{Stanislaw Lem"), 1.0),  # the last box
        (THINK + answer("\\text{Lem}"), 0.0),  # "textlem": as published, a macro is letters
        ("any words " + THINK + answer("Stanislaw Lem") + "<|im_end|>", 1.0),
        (THINK + "<answer>\\boxed{} \\boxed Stanislaw Lem$ of course</answer>", 1.0),
    ],
)
def test_a_text_in_form_earns_its_f1_and_a_tenth_for_both_tools(text: str, score: float):
    assert score_deep_research(text, ["Stanislaw Lem"]).score == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no <think>"),
        (answer("Lem"), "no <think>"),
        ("<think>" + answer("Lem"), "1 <think> but 0 </think>"),
        (THINK + "</think>" + answer("Lem"), "1 <think> but 2 </think>"),
        (THINK, "0 <answer> where there must be one"),
        (THINK + "<answer>\\boxed{Lem}", "0 </answer> where there must be one"),
        (THINK + "\\boxed{Lem}</answer>", "0 <answer> where there must be one"),
        (THINK + answer("Lem") + answer("Lem"), "2 <answer> where there must be one"),
        (THINK + answer("Lem") + "</answer>", "2 </answer> where there must be one"),
        (THINK + "<search>a" + answer("Lem"), "<search> without </search>"),
        (THINK + "<search>a</search>" + answer("Lem"), "<search> without <result>"),
        (
            THINK + "<search>a</search><result>b" + answer("Lem"),
            "the <result> of <search> without </result>",
        ),
        (
            THINK + "<search>a<result>b</result></search>" + answer("Lem"),
            "<result> inside <search>",
        ),
        (
            THINK + "<result>b</result><search>a</search>" + answer("Lem"),
            "<search> without <result>",
        ),
        (THINK + SEARCH + "<search>a</search>" + answer("Lem"), "<search> without <result>"),
        (THINK + "<python>a" + answer("Lem"), "<python> without </python>"),
        (THINK + SEARCH + "<python>a</python>" + answer("Lem"), "<python> without <result>"),
        (
            THINK + "<python>a</python><result>b" + answer("Lem"),
            "the <result> of <python> without </result>",
        ),
        (THINK + "</answer>\\boxed{Lem}<answer>", "</answer> comes before <answer>"),
        (THINK + "<answer>Lem</answer>", "no \\boxed{...} in the answer"),
        (THINK + "\\boxed{Lem}<answer>Lem</answer>", "no \\boxed{...} in the answer"),
        (THINK + "<answer>\\boxed{Lem</answer>", "no \\boxed{...} in the answer"),
        (THINK + "<answer>\\fbox{Lem}</answer>", "no \\boxed{...} in the answer"),
        (
            THINK + "<answer>\\boxed{\\frac{1}{2}</answer>",
            "the \\boxed{ of the answer never closes",
        ),
    ],
)
def test_every_fault_of_form_is_minus_one_and_named(text: str, reason: str):
    assert score_deep_research(text, ["Lem"]) == DeepResearchScore(-1.0, f"malformed: {reason}")


def test_tags_count_anywhere_even_in_a_tool_result():
    result = SEARCH.replace("Lem", "write <answer>")
    assert form_fault(THINK + result + answer("Lem")) == "2 <answer> where there must be one"


def test_what_a_result_quotes_is_not_a_call():
    quoting = SEARCH.replace("Lem", "use <search> to look")
    assert form_fault(THINK + quoting + answer("Lem")) == ""


def test_a_call_without_an_opening_tag_is_no_fault_and_pays_for_a_tool():
    text = THINK + "</search></python>" + answer("Lem")
    assert score_deep_research(text, ["Lem"]).score == pytest.approx(1.1)  # as published


def test_the_nearest_gold_counts_and_without_golds_nothing_is_right():
    text = THINK + answer("Lem")
    assert score_deep_research(text, ["Asimov", "Stanislaw Lem", "lem."]) == DeepResearchScore(
        1.0, "f1 1.00", "Lem", 1.0
    )
    assert score_deep_research(text, []).score == 0.0


def test_yes_and_no_are_right_or_wrong_as_a_whole():
    assert answer_f1("Yes.", "yes") == 1.0
    assert answer_f1("yes it is", "yes") == 0.0  # word_f1 would give 0.5
    assert answer_f1("no", "no way") == 0.0
    assert answer_f1("noanswer", "noanswer at all") == 0.0
    assert answer_f1("yes sir", "yes madam") == 0.5


def test_the_reward_reads_everything_behind_the_prompt():
    spans = [
        THINK + "<search>author of Solaris</search>",
        (Author.ENV, " <result>\nLem\n</result>"),
        "<python>1+1</python>",
        (Author.ENV, " <result>\n2\n</result>"),
        answer("Lem"),
    ]
    example = "<answer>an example in the prompt</answer>"
    tried = attempt(*spans, shown=example, answer=["Stanislaw Lem"])
    assert deep_research(*tried) == pytest.approx(2 / 3 + 0.1)


PIECES = [
    *("<think>", "</think>", "<answer>", "</answer>", "<search>", "</search>", "<python>"),
    *(
        "</python>",
        "<result>",
        "</result>",
        "\\boxed{",
        "\\boxed ",
        "\\fbox{",
        "{",
        "}",
        "Lem",
        " $",
    ),
]


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join) | st.text(max_size=80))
def test_any_text_scores_minus_one_or_0_to_1_1(text: str):
    found = score_deep_research(text, ["Lem"])
    assert found.score == -1.0 or 0.0 <= found.score <= 1.1
    assert found.reason and 0.0 <= found.f1 <= 1.0


def test_a_megabyte_of_tags_is_read_in_no_time():
    texts = [
        THINK + SEARCH * 15_000 + answer("Lem"),
        THINK + "<search>" * 120_000,
        THINK + "<answer>" + "\\boxed{" * 140_000 + "}</answer>",
    ]
    start = time.process_time()
    assert [score_deep_research(text, ["Lem"]).score for text in texts] == [1.0, -1.0, 0.0]
    assert time.process_time() - start < 2.0

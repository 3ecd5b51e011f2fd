r"""ARPO's reward: -1 for a malformed response, else its word F1 with the answer, and a tool bonus.

    <think>who?</think><search>author of Solaris</search> <result>Lem</result>
    <python>1961 + 5</python> <result>1966</result>
    <think>so</think><answer>It was \boxed{Stanislaw Lem}</answer>

against "Stanislaw Lem" is 1.1: f1 is 1, and both tools were used. With \boxed{Lem} it is 2/3 + 0.1;
with \boxed{Asimov} 0, tools or not; without </answer>, as when the tokens ran out, -1. The published
runs used this for mathematics too, where word overlap is not equivalence (`math_answer` is).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graft.rewards.answers import accepted_answers, normalise, word_f1
from graft.rewards.maths.hendrycks import last_box
from graft.types import Task, Trajectory

MALFORMED = -1.0
BOTH_TOOLS = 0.1
_TOOLS = ("search", "python")
_VERDICTS = {"yes", "no", "noanswer"}


class DeepResearchScore(NamedTuple):
    """The score of a response, and the reason."""

    score: float
    """-1, or 0 to 1.1."""
    reason: str
    answer: str = ""
    """The contents of the box."""
    f1: float = 0.0


def deep_research(task: Task, trajectory: Trajectory) -> float:
    """`score_deep_research` of the whole response, tool results included."""
    return score_deep_research(trajectory.text, accepted_answers(task.answer)).score


def score_deep_research(text: str, golds: Sequence[str]) -> DeepResearchScore:
    r"""The score of a whole response against the nearest of the accepted answers.

    >>> score_deep_research("<think>.</think><answer>\\boxed{Yes}</answer>", ["yes"]).score
    1.0
    >>> score_deep_research("<think>.</think><answer>yes</answer>", ["yes"]).reason
    'malformed: no \\boxed{...} in the answer'
    """
    if fault := form_fault(text):
        return DeepResearchScore(MALFORMED, f"malformed: {fault}")
    answer = last_box(_answer(text))
    if answer is None:
        return DeepResearchScore(MALFORMED, "malformed: the \\boxed{ of the answer never closes")
    f1 = max((answer_f1(answer, gold) for gold in golds), default=0.0)
    if f1 == 0:
        return DeepResearchScore(0.0, "no word in common with an accepted answer", answer)
    reason = f"f1 {f1:.2f}"
    if all(f"</{tool}>" in text for tool in _TOOLS):
        return DeepResearchScore(f1 + BOTH_TOOLS, f"{reason}, and both tools were used", answer, f1)
    return DeepResearchScore(f1, reason, answer, f1)


def form_fault(text: str) -> str:
    r"""The first error in the form of a response; "" if there is none.

    >>> form_fault("<think>a<think>b</think><answer>\\boxed{1}</answer>")
    '2 <think> but 1 </think>'
    """
    opened, closed = text.count("<think>"), text.count("</think>")
    if opened != closed:
        return f"{opened} <think> but {closed} </think>"
    if opened == 0:
        return "no <think>"
    for tag in ("<answer>", "</answer>"):
        if (count := text.count(tag)) != 1:  # a tool result that holds one counts as well
            return f"{count} {tag} where there must be one"
    for tool in _TOOLS:
        if fault := _call_fault(text, tool):
            return fault
    if text.find("<answer>") > text.find("</answer>"):
        return "</answer> comes before <answer>"
    answer = _answer(text)
    if "\\boxed{" not in answer or "}" not in answer:
        return "no \\boxed{...} in the answer"
    return ""


def answer_f1(answer: str, gold: str) -> float:
    """`word_f1`, but yes, no and noanswer must match exactly.

    >>> answer_f1("no doubt: Paris", "no"), answer_f1("Paris, France", "Paris")
    (0.0, 0.6666666666666666)
    """
    given, wanted = normalise(answer), normalise(gold)
    if given != wanted and (given in _VERDICTS or wanted in _VERDICTS):
        return 0.0
    return word_f1(answer, gold)


def _call_fault(text: str, tool: str) -> str:
    """Every call must be closed and answered: <tool> </tool> <result> </result>, in this order."""
    opening, end = f"<{tool}>", 0
    while (start := text.find(opening, end)) >= 0:
        closing, result = text.find(f"</{tool}>", start), text.find("<result>", start)
        if closing < 0:
            return f"{opening} without </{tool}>"
        if result < 0:
            return f"{opening} without <result>"
        if result < closing:
            return f"<result> inside {opening}"
        end = text.find("</result>", result)
        if end < 0:
            return f"the <result> of {opening} without </result>"
    return ""


def _answer(text: str) -> str:
    return text.partition("<answer>")[2].partition("</answer>")[0]

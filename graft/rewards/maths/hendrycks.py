r"""Mathematical answers compared as strings, by the rule of the MATH benchmark that verl ships.

Both sides are normalised to one spelling and compared as texts:

    \dfrac12        -> \frac{1}{2}          x = 3 \text{ cm}  -> 3
    1/2             -> \frac{1}{2}          \left(1, 2\right) -> (1,2)
    0.5             -> \frac{1}{2}          0.50              -> 0.50, so not the same

`math_answer` compares by meaning; this reward gives scores that are comparable with published ones.
"""

from __future__ import annotations

import re

from graft.rewards.answers import final_answers
from graft.types import Task, Trajectory

_SPELLINGS = (
    ("\n", ""),
    ("\\!", ""),  # a thin space backwards
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
)
"""The first replacements, in this order."""
_BOX = re.compile(r"\\(?:boxed|fbox)\{")
_BRACE = re.compile(r"[{}]")
_UNIT = "\\text{ "  # MATH writes "5 \text{ cm}", with this blank; words are "\text{even}"
_BARE_ROOT = re.compile(r"\\sqrt([^{\\])")
_BARE_HALVES = re.compile(r"\\frac([^{\\])([^{\\])")
_BARE_TOP = re.compile(r"\\frac([^{\\])(?=\{)")
_WHOLE = r"(0|-?[1-9][0-9]*)"  # as Python prints it: 1/02 is left alone
_RATIO = re.compile(f"{_WHOLE}/{_WHOLE}")


def hendrycks_math(task: Task, trajectory: Trajectory) -> float:
    r"""1.0 if the last \boxed{} of the whole text is spelled like the task's answer, or one of them."""
    box = last_box(trajectory.text)
    if box is None:
        return 0.0
    given = strip_string(box)
    return float(any(given == strip_string(gold) for gold in final_answers(task.answer)))


def last_box(text: str) -> str | None:
    r"""The contents of the last box; None if there is none, or if it never closes.

    `graft.text.parse.last_boxed` with three differences that the published scores depend on: "\boxed 5$"
    without braces counts and has priority, \fbox only counts where there is no \boxed, and an escaped
    brace counts as a brace.

    >>> last_box(r"\boxed{1}, no, \boxed{\frac{1}{2}}."), last_box(r"$\boxed 7$"), last_box(r"\boxed{1")
    ('\\frac{1}{2}', '7', None)
    """
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    start = text.rfind("\\boxed" if "\\boxed" in text else "\\fbox")
    opening = _BOX.match(text, start) if start >= 0 else None
    if opening is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, opening.end()):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[opening.end() : brace.start()]
    return None


def strip_string(text: str) -> str:
    r"""A mathematical answer in the normal spelling; faulty LaTeX is changed where a rule applies.

    >>> strip_string(r"x = \tfrac34"), strip_string(r".5 \text{ m}"), strip_string(r"\frac")
    ('\\frac{3}{4}', '\\frac{1}{2}', '\\frac')
    """
    for old, new in _SPELLINGS:
        text = text.replace(old, new)
    if text.count(_UNIT) == 1:  # with several it is unclear which is the unit
        text = text.partition(_UNIT)[0]
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = f"0{text}"
    name, _, value = text.partition("=")
    if len(name) <= 2 and text.count("=") == 1:  # "x=3", and "k = 3" with its blank
        text = value
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    text = text.replace(" ", "")
    text = _BARE_TOP.sub(r"\\frac{\1}", _BARE_HALVES.sub(r"\\frac{\1}{\2}", text))
    if text == "0.5":
        return "\\frac{1}{2}"
    return _RATIO.sub(r"\\frac{\1}{\2}", text) if _RATIO.fullmatch(text) else text

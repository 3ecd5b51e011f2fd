r"""How questions, calls and answers are written.

    compact   kab.M.S*37              (kab M)  [342*37]  =12654       single characters
    words     What is the salary of the mentor of Kara Voss, multiplied by 37?
              <think>I need the mentor of Kara Voss.</think>
              <search>mentor of Kara Voss</search>                    ARPO's tags
              ...
              <answer>\boxed{12654}</answer>

A known answer and a guess look the same: one character, "(" or "[" or "=", decides whether to search,
calculate or answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graft.text.parse import last_boxed
from graft.tools.formats import COMPACT, CallStyle
from graft_envs.hops.facts import CONSONANTS, LETTERS, VOWELS
from graft_envs.hops.tools import compact_tools, worded_tools

ROUND = CallStyle(open="(", close=")", result="{};", error="?;", spent="?;")
"""(kab M) is answered with "mod;", and every error with "?;"."""

INSTRUCTIONS = (
    "Answer the question. Think in <think></think>. Look facts up with <search>query</search> and "
    "calculate with <python>print(...)</python>; what comes back stands in <result></result>. "
    "End with <answer>\\boxed{number}</answer>."
)


@dataclass(frozen=True, slots=True)
class HopsSyntax:
    """All texts of one syntax. A step is one policy entry of a demonstration."""

    is_short: bool
    """Whether people have short names."""
    format: str
    styles: Mapping[str, CallStyle] | None
    tools: Callable[[int], Sequence[Any]]
    """Number of people -> search and python."""
    question: Callable[[str, Sequence[str], int], str]
    """Person, relations in the order of the hops, factor -> the question."""
    search: Callable[[str, str], str]
    """Person, relation -> the query."""
    program: Callable[[str, int], str]
    """Number, factor -> the program."""
    step: Callable[[str, str], str]
    """Thought, call or answer -> the text of a step."""
    answer: Callable[[str], str]
    """Number -> the final answer."""
    read: Callable[[str], str | None]
    """Final answer -> its number; None if it has none."""
    gap: str = ""
    """What is written between a result and the next step."""
    alphabet: str = ""
    """All characters, if they are few; else ""."""


def ask_in_letters(person: str, relations: Sequence[str], factor: int) -> str:
    """("kab", ["mentor", "salary"], 37) -> "kab.M.S*37" """
    return ".".join((person, *(LETTERS[relation] for relation in relations))) + f"*{factor}"


def ask_in_words(person: str, relations: Sequence[str], factor: int) -> str:
    chain = " ".join(f"the {relation} of" for relation in reversed(relations))
    return f"{INSTRUCTIONS}\nWhat is {chain} {person}, multiplied by {factor}?"


def behind_equals(text: str) -> str | None:
    """ "=12654" -> "12654"; None without the sign."""
    return text[1:] if text.startswith("=") else None


def box(number: str) -> str:
    return f"<answer>\\boxed{{{number}}}</answer>"


COMPACT_SYNTAX = HopsSyntax(
    is_short=True,
    format="tags",
    styles={"search": ROUND, "python": COMPACT},
    tools=compact_tools,
    question=ask_in_letters,
    search=lambda person, relation: f"{person} {LETTERS[relation]}",
    program=lambda number, factor: f"{number}*{factor}",
    step=lambda thought, step: step,
    answer=lambda number: f"={number}",
    read=behind_equals,
    alphabet="".join(sorted({*CONSONANTS, *VOWELS, *LETTERS.values(), *"0123456789.*= ()[];?"})),
)
WORDS_SYNTAX = HopsSyntax(
    is_short=False,
    format="arpo",
    styles=None,
    tools=worded_tools,
    question=ask_in_words,
    search=lambda person, relation: f"{relation} of {person}",
    program=lambda number, factor: f"print({number}*{factor})",
    step=lambda thought, step: f"<think>{thought}</think>\n{step}",
    answer=box,
    read=last_boxed,
    gap="\n",
)
SYNTAXES = {"compact": COMPACT_SYNTAX, "words": WORDS_SYNTAX}

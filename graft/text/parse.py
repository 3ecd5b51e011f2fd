"""Parts of a model's text: tags, boxed answers, numbers, code blocks.

Pure functions on strings. They never raise, and their time is linear in the length of the text: a
policy under training may write a megabyte of brackets.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

_ANY_TAG = re.compile(r"<(/?)([A-Za-z_][A-Za-z0-9_-]{0,63})>")
_BOX = re.compile(r"\\(?:boxed|fbox)[ \t]{0,8}\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text, not structure
_MARKED_NUMBER = re.compile(r"####\s?(-?[0-9.,]+)")
_NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-+\u2212])?"  # a sign, unless it is the minus of a difference
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?<![0-9])(?=\.[0-9]))"  # 1,234 or 1234 or .5
    r"(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
)


class Tag(NamedTuple):
    """`text[start:end]` is `<name>content</name>`."""

    name: str
    content: str
    start: int
    end: int


class CodeBlock(NamedTuple):
    """A fenced block: the first word after the fence and the lines between."""

    language: str
    code: str
    start: int
    end: int


def tags(text: str, names: Collection[str] | None = None) -> list[Tag]:
    """The closed tags called `names` (None: every tag) in the order in which they open.

    "<think>a</think><answer>1</answer>" -> think "a", answer "1". Unclosed tags are left out; of
    several openings of one name the one nearest to the closing counts: "<a>x<a>y</a>" -> "y".
    """
    opened: dict[str, re.Match[str]] = {}
    found: list[Tag] = []
    pattern = _ANY_TAG if names is None else _tag_pattern(tuple(names))
    for mark in pattern.finditer(text):
        name = mark[2]
        if not mark[1]:
            opened[name] = mark
        elif name in opened:
            opening = opened.pop(name)
            content = text[opening.end() : mark.start()]
            found.append(Tag(name, content, opening.start(), mark.end()))
    return sorted(found, key=lambda tag: tag.start)


def last_tag(text: str, name: str) -> str | None:
    """The content of the last closed `<name>`, without surrounding blanks."""
    found = tags(text, [name])
    return found[-1].content.strip() if found else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} or \fbox{...}; None without one, or if it is not closed.

    "so \boxed{\frac{1}{2}}." -> "\frac{1}{2}"
    """
    last = _last_match(_BOX, text)
    if last is None:
        return None
    start, depth = last.end(), 1
    for brace in _BRACE.finditer(text, start):
        mark = brace[0]
        if mark == "{":
            depth += 1
        elif mark == "}":
            depth -= 1
            if depth == 0:
                return text[start : brace.start()]
    return None


def last_number(text: str) -> str | None:
    """The last number, in a form that `float` reads: "5-3 = 2, so x = -2." -> "-2"."""
    last = _last_match(_NUMBER, text)
    return _bare(last[0]) if last else None


def marked_number(text: str) -> str | None:
    """The last number that directly follows "####", without its commas; None if there is none.

    "#### 5\\n#### 1,234." -> "1234."; "#### about 5" -> None
    """
    found = _MARKED_NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def first_answer(text: str) -> str | None:
    """The content of the first <answer>...</answer>: "<answer>1+2</answer> <answer>3</answer>" -> 1+2."""
    start = text.find("<answer>")
    end = text.find("</answer>", start)
    return text[start + len("<answer>") : end] if 0 <= start < end else None


def first_marked(text: str) -> str | None:
    """The line after the first "####", without blanks and line ends before it."""
    _, mark, rest = text.partition("####")
    return rest.lstrip().partition("\n")[0] if mark else None


def code_blocks(text: str, language: str | None = None) -> list[CodeBlock]:
    """Closed fenced blocks in order, all or those of one language ("" for unmarked ones).

    A fence may follow other words on its line, as models often write; it closes with a line that
    ends in the same fence. A block that is not closed was cut off and is left out.
    """
    found: list[CodeBlock] = []
    opening: tuple[int, str, str] | None = None  # start, fence, info
    at = body = 0  # where this line and the block's first line begin
    for line in text.split("\n"):
        if opening is None:
            opening = _opening_fence(line, at)
            body = at + len(line) + 1
        else:
            start, fence, info = opening
            bare = line.rstrip()
            code_end = len(bare.rstrip(fence[0]))
            if len(bare) - code_end >= len(fence):
                code_end = 0 if bare[:code_end].isspace() else code_end  # an indented fence
                word = info.split()[0] if info.split() else ""
                code = text[body : at + code_end]
                found.append(CodeBlock(word, code, start, at + len(bare)))
                opening = None
        at += len(line) + 1
    return [block for block in found if language is None or block.language == language]


def _opening_fence(line: str, at: int) -> tuple[int, str, str] | None:
    """Start, fence and info of a block that this line, found at `at`, opens.

    Only string searches: a pattern such as "`{3,}[^`]*$" is quadratic on a line of backticks.
    """
    run_end = line.rfind("`") + 1
    before = line[:run_end].rstrip("`")
    run = run_end - len(before)
    if run >= 3 and "```" not in before:  # "use ```x``` here" is no block
        return at + len(before), "`" * run, line[run_end:]
    words = line.lstrip()
    info = words.lstrip("~")
    if len(words) - len(info) >= 3:  # tildes only at the start of a line: elsewhere they are prose
        return at + len(line) - len(words), "~" * (len(words) - len(info)), info
    return None


@lru_cache(maxsize=256)
def _tag_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"<(/?)({'|'.join(map(re.escape, names)) or '(?!)'})>")


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for last in pattern.finditer(text):  # noqa: B007
        pass
    return last


def _bare(number: str) -> str:
    return number.replace(",", "").replace("\u2212", "-").lstrip("+")

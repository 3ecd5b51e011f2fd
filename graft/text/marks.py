"""The text between two marks, and the tokens that contain it.

Recorded attempts often have a tool's result inside the assistant's own text, which is not trained:

    text     I look. <result>5</result> So 5.          between(text, "<result>", "</result>") is [(8, 26)]
    tokens   I| look|.| <|result|>|5|</|result|>| So| 5|.
    inside   .  .    . 1  1      1 1 1  1      1 .   .  .

The text is encoded once, as a whole. A token with even one character between the marks, such as " <"
above, is inside: no character of a result is trained.
"""

from __future__ import annotations

from collections.abc import Sequence

Interval = tuple[int, int]
"""Characters [start, end) of a text."""


def between(text: str, opening: str, closing: str) -> list[Interval]:
    """The intervals from an opening mark to the next closing one, marks included."""
    found: list[Interval] = []
    at = text.find(opening)
    while at >= 0:
        close = text.find(closing, at + len(opening))
        if close < 0:
            raise ValueError(
                f"{opening!r} at character {at} is never closed by {closing!r}: "
                f"{text[at : at + 60]!r}"
            )
        found.append((at, close + len(closing)))
        at = text.find(opening, found[-1][1])
    return found


def inside(offsets: Sequence[Interval], intervals: Sequence[Interval]) -> list[bool]:
    """Whether each token has a character in one of the intervals, both in ascending order.

    A token extends from the end of the token before it to its own end: some tokenizers leave blanks
    out of their offsets, and the blanks of a result are part of it.
    """
    flags: list[bool] = []
    rest = list(reversed(intervals))
    before = 0
    for start, end in offsets:
        start = min(start, before)
        while rest and rest[-1][1] <= start:
            rest.pop()
        flags.append(bool(rest) and end > rest[-1][0])
        before = max(before, end)
    return flags

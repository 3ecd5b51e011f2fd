"""HTML by hand: the only place where text of a run becomes markup, and it cannot stay anything else.

    shown("<b>\\x1b[2J")      &lt;b&gt;\\x1b[2J        tags are text, control characters are spelled
    shown("x" * 10**6, 8)    xxxx … 999,992 more characters … xxxx

A run holds whatever a model or a web page has said: tags, terminal commands, marks that turn the
direction of reading, a million letters in a line. All of it goes through `shown`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from graft.train.monitor.formatting import clip, visible

LONGEST = 400
"""Letters of a name or a value."""

LARGEST = 500_000
"""Bytes of one section. A report has fewer than ten, and may be mailed."""


def shown(value: Any, limit: int = LONGEST) -> str:
    """Text as a reader of the page sees it, letter by letter; at most `limit` and a note."""
    spelled = visible(clip(str(value), limit))
    return html.escape(clip(spelled, limit + 60))  # spelling may have made it longer


def table(rows: Iterable[Sequence[str]], titles: Sequence[str] = (), kind: str = "") -> str:
    """A table of cells that are markup already; the first cell of a row is its name."""
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    titled = f"<thead><tr>{head}</tr></thead>" if titles else ""
    return f'<div class="wide"><table class="{kind}">{titled}<tbody>{body}</tbody></table></div>'


def section(title: str, *parts: str) -> str:
    """Nothing where it would be empty, a note where it would be too large for a page."""
    inside = "".join(parts)
    if (size := len(inside.encode())) > LARGEST:
        inside = note(f"This part would fill {size / 1e6:.1f} MB; read it in the run's folder.")
    return f"<section><h2>{shown(title)}</h2>{inside}</section>" if inside else ""


def folded(title: str, inside: str, is_open: bool = False) -> str:
    """Out of the way until somebody opens it; no script is needed for that."""
    return f"<details{' open' * is_open}><summary>{title}</summary>{inside}</details>"


def note(text: str) -> str:
    return f'<p class="note">{shown(text, 2000)}</p>'

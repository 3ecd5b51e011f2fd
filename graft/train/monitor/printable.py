"""Text that is safe to print."""

from __future__ import annotations


def visible(text: str) -> str:
    """Text without terminal control: control characters other than newline and tab are escaped.

    >>> visible("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)

"""The known name that is spelled most like a wrong one, for messages."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any


def nearest(name: str, known: Mapping[str, Any] | list[str], cutoff: float = 0.6) -> str | None:
    """The known name that is spelled most like `name`, whatever its case: "GRPO" -> "grpo"."""
    spelled = {one.lower(): one for one in reversed(list(known))}  # the first of equal ones
    close = get_close_matches(name.lower(), spelled, n=5, cutoff=cutoff)
    swapped = (one for one in close if sorted(one) == sorted(name.lower()))  # "gpro" is no "gspo"
    return spelled[next(swapped, close[0])] if close else None


def suggestion(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """ " did you mean 'grpo'?" for "grop"; "" where no known name is similar."""
    hint = nearest(name, known)
    return f" did you mean {hint!r}?" if hint else ""

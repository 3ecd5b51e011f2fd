"""Options of several commands."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, as in train.lr=1e-4")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]


def setting_meant(error: Any, words: list[str]) -> str:
    """A hint for an unknown option that looks like a setting; "" for other errors.

    `graft train RECIPE --learning_rate 1e-4` gives "... key=value, without dashes: train.lr=1e-4".
    """
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option is None or context is None:
        return ""
    takes = [parameter.name for parameter in context.command.params]
    place = next((i for i, word in enumerate(words) if word.startswith(option)), None)
    if "overrides" not in takes or place is None:
        return ""
    from graft.config import keys
    from graft.peer_keys import as_override

    return as_override(words[place], words[place + 1 : place + 2], keys())

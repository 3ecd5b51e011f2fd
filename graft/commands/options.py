"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, as in train.lr=1e-4")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]

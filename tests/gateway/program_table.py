"""The table of programs and their modes on docs/agents.md, from the trials that the tests run.

python -m tests.gateway.program_table       writes it into the page
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.gateway.client_trials import Trial

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
HEAD = "| program | modes |\n|---|---|\n"
_TABLE = re.compile(re.escape(HEAD) + r"(\|.*\|\n)*")


def write_table(trials: Sequence[Trial]) -> str:
    """One row for each program, with its modes."""
    rows: dict[str, list[str]] = {}
    for trial in trials:
        program, _, mode = trial.name.partition(": ")
        rows.setdefault(program, []).append(mode)
    lines = [f"| {program} | {'; '.join(modes)} |" for program, modes in rows.items()]
    return HEAD + "\n".join(lines) + "\n"


def table_on(page: str) -> str:
    """The table as it stands on the page; "" if there is none."""
    found = _TABLE.search(page)
    return found[0] if found else ""


if __name__ == "__main__":
    from tests.gateway.program_trials import PROGRAM_TRIALS, STRUCTURED

    text = PAGE.read_text()
    PAGE.write_text(text.replace(table_on(text), write_table([*PROGRAM_TRIALS, *STRUCTURED])))

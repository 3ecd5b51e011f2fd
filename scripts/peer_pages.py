"""Writes the settings of TRL and verl into docs/from-trl-verl.md, from their table.

python scripts/peer_pages.py          # tests/docs/test_tables.py fails when the page is not up to date
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from graft.recipe.peer_table import PeerRow, read_table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "from-trl-verl.md"
BEGIN = "<!-- settings: written by scripts/peer_pages.py -->\n"
END = "<!-- end of settings -->\n"


def tables() -> str:
    """One table per section; settings that graft does not have come last in each."""
    parts: list[str] = []
    rows = [row for row in read_table() if row.trl or row.verl]
    for section, group in groupby(rows, key=lambda row: row.section):
        lines = [line(row) for row in sorted(group, key=lambda row: row.key == "-")]
        head = ["| TRL | verl | graft | |", "|---|---|---|---|"]
        parts.append("\n".join([f"### {section[0].upper()}{section[1:]}", "", *head, *lines]))
    return "\n\n".join(parts) + "\n"


def line(row: PeerRow) -> str:
    names = [", ".join(f"`{name}`" for name in theirs) for theirs in (row.trl, row.verl)]
    ours = "-" if row.key == "-" else f"`{row.key}`"
    return f"| {' | '.join(names)} | {ours} | {row.remark} |".replace("|  |", "| |")


def updated(page: str) -> str:
    """The page with today's tables between the two marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{tables()}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""Writes the settings of TRL and verl into docs/from-trl.md and docs/from-verl.md, from their table.

python scripts/peer_pages.py          # tests/docs/test_tables.py fails when a page is not up to date
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from graft.recipe.peer_table import PeerRow, read_table

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = {"from-trl.md": "trl", "from-verl.md": "verl"}
BEGIN = "<!-- settings: written by scripts/peer_pages.py -->\n"
END = "<!-- end of settings -->\n"


def tables(library: str) -> str:
    """One table per section; settings that graft does not have come last in each."""
    rows = [row for row in read_table() if getattr(row, library)]
    parts: list[str] = []
    for section, group in groupby(rows, key=lambda row: row.section):
        ordered = sorted(group, key=lambda row: row.key == "-")
        lines = [line(row, getattr(row, library)) for row in ordered]
        head = [f"| {library.replace('trl', 'TRL')} | graft | |", "|---|---|---|"]
        parts.append("\n".join([f"### {section[0].upper()}{section[1:]}", "", *head, *lines]))
    return "\n\n".join(parts) + "\n"


def line(row: PeerRow, theirs: tuple[str, ...]) -> str:
    names = ", ".join(f"`{name}`" for name in theirs)
    ours = "-" if row.key == "-" else f"`{row.key}`"
    return f"| {names} | {ours} | {row.remark} |".replace("|  |", "| |")


def updated(page: str, library: str) -> str:
    """The page with today's tables between the two marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{tables(library)}\n{END}{tail}"


if __name__ == "__main__":
    for name, library in PAGES.items():
        text = (DOCS / name).read_text(encoding="utf-8")
        (DOCS / name).write_text(updated(text, library), encoding="utf-8")

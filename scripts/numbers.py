"""Writes the figures of docs/numbers.json into README.md and the pages of docs/.

python scripts/numbers.py             # tests/docs/test_numbers.py fails when a page is not up to date

In a sentence or a cell, a pair of comments holds one figure; after a format (as of Python's `format`) its
unit is left out:

    <!--n gpu.training.64x8-->2.47 s<!--/n-->      <!--n quickstart.seed0.after .3f-->0.950<!--/n-->

Between two lines stands a table of all rows whose names begin alike, with where each comes from:

    <!-- numbers gpu. -->
    <!-- end of numbers -->
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "numbers.json"

INLINE = re.compile(r"<!--n (?P<name>[\w.-]+)(?: (?P<spec>[^\s>]+))?-->.*?<!--/n-->", re.S)
TABLE = re.compile(r"<!-- numbers (?P<prefix>[\w.-]+) -->\n.*?<!-- end of numbers -->\n", re.S)

Row = dict[str, Any]


def read_rows() -> dict[str, Row]:
    return {row["name"]: row for row in json.loads(FILE.read_text(encoding="utf-8"))}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def number(value: float, unit: str) -> str:
    """70400, "tok/s" -> 70,400 tok/s; 31, "%" -> 31%; 600, "/s" -> 600/s."""
    return f"{value:,}{' ' if unit[:1].isalpha() else ''}{unit}"


def figure(row: Row, spec: str | None) -> str:
    return format(row["value"], spec) if spec else number(row["value"], row["unit"])


def spread(row: Row) -> str:
    low, high = row.get("spread") or ("", "")
    return f"{low:,} to {high:,}" if low != "" else ""


def table(rows: list[Row]) -> str:
    """A caption with what all rows share, and a line for each; columns that nothing fills are left out."""
    cells = [
        {
            "what": row["what"],
            "measured": number(row["value"], row["unit"]),
            "spread": spread(row),
            "machine": row["machine"],
            "commit, date": f"`{row['commit']}`, {row['date']}",
            "command": f"`{row['command']}`",
            "remark": row.get("note", ""),
        }
        for row in rows
    ]
    shared = [
        key for key in ("machine", "command", "commit, date") if len({c[key] for c in cells}) == 1
    ]
    titles = [key for key in cells[0] if key not in shared and any(cell[key] for cell in cells)]
    caption = [f"{key}: {cells[0][key]}" for key in shared]
    lines = [
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
        *(
            f"| {' | '.join(cell[key] for key in titles)} |".replace("|  |", "| |")
            for cell in cells
        ),
    ]
    head = [f"{caption[0][0].upper()}{'; '.join(caption)[1:]}.", ""] if caption else []
    return "\n".join([*head, *lines])


def updated(page: str, rows: dict[str, Row]) -> str:
    """The page with today's figures; a name that has no row is a KeyError."""

    def inline(match: re.Match[str]) -> str:
        opening = match[0].partition("-->")[0] + "-->"
        return f"{opening}{figure(rows[match['name']], match['spec'])}<!--/n-->"

    def block(match: re.Match[str]) -> str:
        chosen = [row for name, row in rows.items() if name.startswith(match["prefix"])]
        if not chosen:
            raise KeyError(match["prefix"])
        opening = match[0].partition("\n")[0]
        return f"{opening}\n\n{table(chosen)}\n\n<!-- end of numbers -->\n"

    return INLINE.sub(inline, TABLE.sub(block, page))


if __name__ == "__main__":
    known = read_rows()
    for path in pages():
        text = path.read_text(encoding="utf-8")
        path.write_text(updated(text, known), encoding="utf-8")

"""Writes the table of keys into docs/recipes.md, from the sections in graft/recipe/.

python scripts/recipe_keys.py          # tests/docs/test_tables.py fails when the page is not up to date
"""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic_core import to_jsonable_python

from graft.config import Config, keys

PAGE = Path(__file__).resolve().parent.parent / "docs" / "recipes.md"
BEGIN = "<!-- keys: written by scripts/recipe_keys.py -->\n"
END = "<!-- end of keys -->\n"


def table() -> str:
    """One line per key: its name, its default as YAML, its docstring."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, meaning in keys().items():
        section, name = key.split(".")
        default = to_jsonable_python(getattr(Config.model_fields[section].default, name))
        text = yaml.safe_dump(default, default_flow_style=True, width=1000).split("\n")[0]
        text = '""' if default == "" else text
        lines.append(f"| `{key}` | `{text}` | {meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """The page with today's table between the two marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

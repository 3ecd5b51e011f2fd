"""The table of docs/models.md is that of the code."""

from __future__ import annotations

import runpy

from graft.models.families.table import FAMILIES
from tests.docs.pages import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "families.py"))


def test_the_table_is_up_to_date() -> None:
    page = SCRIPT["PAGE"].read_text(encoding="utf-8")
    assert SCRIPT["fill"](page) == page  # else: python -P scripts/families.py
    assert all(f"| `{name}` |" in page for name in FAMILIES)

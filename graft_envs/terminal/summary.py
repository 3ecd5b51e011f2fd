"""The results of a task's tests, read from pytest's summary, and their score."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

_SUMMARY = re.compile(r"^=+ short test summary info =+\s*$", re.MULTILINE)
_RESULT = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\s+(\S+)", re.MULTILINE)


def has_summary(output: str) -> bool:
    """Whether the tests ran to their end."""
    return _SUMMARY.search(output) is not None


def outcomes(output: str) -> dict[str, bool]:
    """Whether each test passed, by its name without the file; the last summary counts.

    "PASSED tests/test_outputs.py::test_a"           {"test_a": True}
    "FAILED tests/test_outputs.py::test_b - assert"  {"test_b": False}

    A parametrized test passes if all of its cases do.
    """
    summary = _SUMMARY.split(output)
    if len(summary) < 2:
        return {}
    found: dict[str, bool] = {}
    for outcome, where in _RESULT.findall(summary[-1]):
        name = (where.rpartition("::")[2] or where).partition("[")[0]
        found[name] = found.get(name, True) and outcome in ("PASSED", "XFAIL")
    return found


def defined_tests(folder: Path) -> list[str]:
    """The tests that the files of a folder define: one that never ran must count as failed."""
    found: dict[str, None] = {}
    for path in sorted(folder.rglob("test_*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found |= {node.name: None} if node.name.startswith("test_") else {}
    return list(found)


def score(results: Mapping[str, bool], weights: Mapping[str, float]) -> float:
    """The share of the weight that passed; a test without a result has failed.

    {"a": True, "b": False} with equal weights is 0.5; with weights a: 3, b: 1 it is 0.75
    """
    total = sum(weights.values())
    return sum(weights[name] for name in weights if results.get(name)) / total if total else 0.0

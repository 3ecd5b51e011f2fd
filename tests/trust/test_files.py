"""The bank of hostile files finds nothing, and finds what is planted."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from trust.file_cases import CANARY, KINDS, FileCase, chosen, evil, run_copy
from trust.files import FULL, Opener, measured, run

pytestmark = pytest.mark.slow


def test_there_are_many_files_and_the_generator_is_seeded():
    assert sum(map(len, KINDS)) >= 280 and FULL == 300
    first, again = ([case.name for case, _ in chosen(60, 3)] for _ in range(2))
    assert first == again != [case.name for case, _ in chosen(60, 4)]


@pytest.mark.timeout(1200)
def test_hostile_files_run_nothing_and_fill_nothing():
    for row in run(12, seed=1):
        assert row.ok, row.failures


def trusted(folder: Path, rng: Random, base: Path, variant: object) -> list[list[str]]:
    run_copy(folder, base, {"task.env": "evil:Env"})
    evil(folder)
    return [["eval", "theirs", "--tasks", "1", "--trust"]]


def honest(folder: Path, rng: Random, base: Path, variant: object) -> list[list[str]]:
    run_copy(folder, base)
    return [["eval", "theirs", "--tasks", "1"], ["replay", "theirs", "--step", "2"]]


def large(folder: Path, rng: Random, base: Path, variant: object) -> list[list[str]]:
    (folder / "hog.py").write_text("x = b'x' * (1200 << 20)\n")
    run_copy(folder, base, {"task.env": "hog:Env"})
    return [["eval", "theirs", "--tasks", "1", "--trust"]]


@pytest.mark.timeout(600)
def test_planted_faults_are_reported(tmp_path: Path):
    kinds = {"code": trusted, "memory": large, "honest": honest}
    cases = [(FileCase(group, group, None, make), Random(0)) for group, make in kinds.items()]
    with Opener(tmp_path) as opener:
        rows = {row.group: row for row in measured(cases, opener)}
    assert CANARY and "code of the file ran" in rows["code"].failures[0]
    assert "MB" in rows["memory"].failures[0]
    assert rows["honest"].ok, rows["honest"].failures

"""The bank of hostile programs finds nothing, and finds what is planted."""

from __future__ import annotations

import pytest

from graft_sandbox import choose
from trust import cells, programs
from trust.hostile import GOT, PROGRAMS

pytestmark = pytest.mark.slow


def test_hostile_programs_harm_nothing():
    for row in programs.run(40, seed=1):
        assert row.ok, row.failures
        assert row.measured["samples"]


def test_there_are_many_programs_and_the_generator_is_seeded():
    assert sum(map(len, PROGRAMS.values())) >= 250
    assert list(programs.programs(400, 3)) == list(programs.programs(400, 3))
    assert list(programs.programs(400, 3)) != list(programs.programs(400, 4))


def test_planted_faults_are_reported(monkeypatch: pytest.MonkeyPatch):
    hog = "x = b'x' * (40 << 20)\nimport time; time.sleep(0.3)"
    monkeypatch.setattr(
        programs, "PROGRAMS", {"planted": [f"print({GOT!r}, 'a file')", hog, "pass"]}
    )
    monkeypatch.setattr(programs, "MUTATIONS", [lambda *_: hog])
    monkeypatch.setattr(cells, "ALLOWED", 0.5)  # 40 of 64 MB are above it

    def broken(code: str, method: str) -> str:
        raise RecursionError("in the trainer")

    monkeypatch.setattr(programs, "WAYS", [programs.by_run_python, programs.by_run_python, broken])
    row = programs.attack(choose(), 6, seed=0)
    for expected in (
        "GOT THROUGH a file",
        "of the limit of memory",
        "RecursionError: in the trainer",
    ):
        assert any(expected in failure for failure in row.failures), row.failures


def test_a_neighbour_that_is_harmed_is_reported(monkeypatch: pytest.MonkeyPatch):
    neighbours = programs.Neighbours(choose())
    neighbours.close()
    assert not neighbours.failures and neighbours.count
    neighbours.method = "unknown"
    neighbours.check(1)
    assert "an honest program: ValueError" in neighbours.failures[0]

"""Real SIGKILLs at random moments."""

from __future__ import annotations

import pytest

from trust import kills


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_runs_that_were_killed_end_as_if_nothing_had_happened(monkeypatch):
    # torchrun and Ray take minutes: their own tests kill ranks, workers and learners
    some = {name: one for name, one in kills.SETTINGS.items() if one.start is kills.graft_process}
    monkeypatch.setattr(kills, "SETTINGS", some)
    rows = list(kills.run(12, seed=1))
    assert [row.group for row in rows] == list(some)
    assert sum(row.count for row in rows) >= 12
    assert [failure for row in rows for failure in row.failures] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_goes_on_with_other_numbers_is_found(monkeypatch):
    """Another seed after each start: a resumed run draws other numbers."""
    starts = iter(range(100))

    def reseeded(arguments: list[str]) -> kills.Running:
        return kills.Forked([*arguments, f"train.lr=0.0{next(starts) + 1}"])

    monkeypatch.setattr(
        kills, "SETTINGS", {"arpo": kills.Setting("arpo", reseeded, settings=kills.LENGTH)}
    )
    (row,) = kills.run(14, seed=1)
    assert any("loss" in failure or "weights" in failure for failure in row.failures)

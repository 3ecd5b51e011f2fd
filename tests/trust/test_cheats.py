"""The bank of cheats: what is paid is known, and a reward that pays for nothing is reported."""

from __future__ import annotations

from typing import Any

import pytest

from graft.envs import ENVS
from graft.envs.arithmetic import Arithmetic
from graft.types import Turn
from trust import cheats


@pytest.mark.slow
def test_cheats_are_paid_only_where_it_is_known():
    rows = list(cheats.run(cheats.SMALL, seed=0))
    assert [row.failures for row in rows] == [[] for _ in rows]
    assert sum(row.count for row in rows) > 100


def test_every_environment_is_played():
    assert set(ENVS) <= set(cheats.names())
    assert {name.partition("+")[0] for name in cheats.KNOWN if ":" in name} <= set(ENVS)


class Generous(Arithmetic):
    """Pays for a mark that every answer may have."""

    def respond(self, action: str) -> Turn:
        return Turn(reward=float("42" in action), terminated=True)


def test_an_environment_that_pays_for_a_constant_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    def build(env_id: str, **_: Any) -> Any:
        if env_id == "broken":
            raise RuntimeError("no such thing")
        return Generous()

    monkeypatch.setattr(cheats, "build", build)
    monkeypatch.setattr(cheats, "names", lambda: ["generous", "broken"])
    monkeypatch.setattr(cheats, "TASKS", 2)
    (row,) = cheats.run(2, seed=0)
    assert any("generous: a constant earns 1.00" in failure for failure in row.failures)
    assert any("broken: RuntimeError: no such thing" in failure for failure in row.failures)

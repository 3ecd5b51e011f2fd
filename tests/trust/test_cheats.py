"""The bank of cheats: what is paid is known, and a reward that pays for nothing is reported."""

from __future__ import annotations

from typing import Any

import pytest

from graft.doctor.cheats import Earned
from graft.envs import ENVS
from graft.envs.arithmetic import Arithmetic
from graft.types import Task, Turn
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


def test_luck_is_the_share_of_the_commonest_answer_and_of_those_in_the_question():
    class Trial:
        golds = ("True", "false", "TRUE", "12.0")
        questions = ("true or false", "Is it False?", "What?", "Of 12 and 3")

        def gold(self, task: Task) -> str:
            return self.golds[task.seed or 0]

        def make_env(self, task: Task) -> Any:
            class Posed:
                def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
                    return Trial.questions[seed], {}

                def close(self) -> None: ...

            return Posed()

    tasks = [Task(str(n), "toy", seed=n) for n in range(4)]
    assert cheats.by_luck(Trial(), tasks, right=2.0) == {  # pyright: ignore[reportArgumentType]
        "a constant": 1.0,  # true twice of four, of 2
        "every candidate": 1.0,
        "the question again": 1.5,  # not in the third
    }


def test_more_than_luck_is_a_failure():
    found = [Earned("a constant", 0.5, "0", 8), Earned("calls without a purpose", 0.5, "x", 8)]
    (failure,) = cheats.unexpected("rg:gcd", 0.0, 1.0, found, {"a constant": 0.5})
    assert "calls without a purpose earns 0.50" in failure
    assert list(cheats.unexpected("rg:gcd", 0.0, 1.0, found[:1], {"a constant": 0.375}))
    assert not list(cheats.unexpected("rg:rectangle_count", 0.0, 1.0, found[:1], {}))

"""`graft doctor` acts in two copies of an environment, and reports when one changes the other."""

from __future__ import annotations

import itertools

import pytest

import graft
from graft.doctor.isolation import isolation_check
from graft.envs.base import BaseEnv
from graft.envs.tool_env import ToolEnv
from graft.train.monitor.check import FAIL, PASS, WARN
from graft.types import Task, Turn

NOTES: list[str] = []
CACHE: dict[str, int] = {}
DRAWN = itertools.count()  # in place of a generator that no seed starts


class Sound(BaseEnv):
    """Everything in `self`."""

    max_turns = 3

    def pose(self) -> str:
        self.notes: list[str] = []
        return "?"

    def respond(self, action: str) -> Turn:
        self.notes.append(action)
        return Turn(f"{len(self.notes)} notes")

    @graft.tool
    def look(self) -> str:
        """The notes."""
        self.notes.append("look")
        return ",".join(self.notes)


class InClass(Sound):
    """A mutable class attribute, the classic."""

    kept: list[str] = []

    def respond(self, action: str) -> Turn:
        self.kept.append(action)
        return Turn(f"{len(self.kept)} notes")


class InModule(Sound):
    def respond(self, action: str) -> Turn:
        NOTES.append(action)
        return Turn(f"{len(NOTES)} notes")


class Cached(Sound):
    def respond(self, action: str) -> Turn:
        CACHE[action] = CACHE.get(action, 0) + 1
        return Turn("noted")


class Shallow(Sound):
    """A fork() that copies the environment and not what is in it."""

    def fork(self):
        import copy

        return copy.copy(self)


class ChancePrompt(Sound):
    def pose(self) -> str:
        self.notes = []
        return f"{next(DRAWN)}+1="


class Chance(Sound):
    def respond(self, action: str) -> Turn:
        import random

        return Turn(str(random.random()))


class Registry:
    """State in an object of the user's that tools share, below the attributes of the object."""

    def __init__(self) -> None:
        self.inner = {"notes": Sound()}
        self.inner["notes"].pose()

    def note(self) -> str:
        """Note."""
        return self.inner["notes"].look()


SHARED = Registry()


class Elsewhere(Sound):
    forkable = False

    def respond(self, action: str) -> Turn:
        return Turn(SHARED.note())


def note() -> str:
    """Note something."""
    NOTES.append("note")
    return str(len(NOTES))


def check(make):
    return isolation_check(lambda task: make(), Task("t", "sound", seed=1))


@pytest.mark.parametrize(
    ("make", "verdict", "seen"),
    [
        (Sound, PASS, "3 acts in two copies, answered as in a fresh environment"),
        (lambda: graft.make(f"{__name__}:Sound"), PASS, "5 acts in two copies"),
        (lambda: graft.make("game:Wordle-v0-easy"), PASS, "acts in two copies"),
        (InClass, FAIL, "InClass.kept is common to all of them and changed"),
        (InModule, FAIL, "test_isolation.NOTES is common to all of them and changed"),
        (Cached, WARN, "test_isolation.CACHE is common to all of them, and changed"),
        (Shallow, FAIL, "acting in one copy changed notes of another"),
        (ChancePrompt, WARN, "in two fresh environments: reset poses '0+1=', then '1+1='"),
        (Chance, WARN, "the same task, seed and actions in two fresh environments"),
        (Elsewhere, FAIL, "test_isolation.SHARED.inner['notes'].notes is common to all of them"),
        (lambda: ToolEnv(Sound(), [note]), FAIL, "tool note was answered with"),
    ],
)
def test_isolation_is_proved_by_acting(make, verdict: str, seen: str):
    found = check(make)
    assert found.verdict == verdict and seen in found.seen, str(found)


def test_the_line_names_the_environment_and_the_remedy():
    found = check(InClass)
    assert "env InClass (tests/test_isolation.py:" in found.seen
    assert "set it in pose() or __init__" in found.remedy

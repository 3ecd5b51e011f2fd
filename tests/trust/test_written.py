"""A stranger's settings write, read and reach nothing; what they would do with --trust is seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tests.command_line  # noqa: F401  its server of processes has graft imported
from graft.trust.settings import KEYS, Effect
from trust.written import SERVER, attack, attacks, make_world, run


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


def to_be_trusted(world: Path) -> dict[str, Any]:
    """A judge whose cache is the record of trusted recipes, with a line of it in the model's name."""
    line = json.dumps({"path": str(world / "work" / "theirs" / "config.yaml")})
    record = world / "home" / "graft" / "recipes.jsonl"
    judge = {"url": SERVER, "model": f"m\n{line}\n", "cache": str(record), "retries": 0}
    return {"task.reward": {"judge": judge}}


COMMANDS = [
    ["eval", "theirs", "--tasks", "1"],
    ["rollout", "theirs"],
    ["doctor", "theirs/config.yaml"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_a_run_cannot_make_itself_trusted(world: Path, command: list[str]) -> None:
    assert attack(world, to_be_trusted(world), command, is_run=True) == ""


@pytest.mark.slow
def test_what_trust_allows_is_seen(world: Path) -> None:
    """The bank has eyes: each effect is reported where the user allowed it."""
    private = str(world / "private" / "rows.jsonl")
    for changes, seen in (
        (to_be_trusted(world), "recipes.jsonl"),
        ({"task.env": "prompts", "task.args": {"data": private}}, "private/rows.jsonl"),
        ({"task.reward": {"judge": {"url": SERVER, "retries": 0}}}, "socket.connect"),
        ({"task.reward": "evil:reward"}, "code of the stranger ran"),
    ):
        assert seen in attack(world, changes, [*COMMANDS[0], "--trust"], is_run=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_hostile_settings_do_nothing() -> None:
    for row in run(12, seed=1):
        assert row.ok, row.failures


def test_the_bank_has_every_setting_that_acts(world: Path) -> None:
    cases = attacks(world)
    acting = [key for key, effect in KEYS.items() if effect not in (Effect.SHOW,)]
    assert len(cases) > 600 and all(f"{key} 0: a text" in cases for key in acting)

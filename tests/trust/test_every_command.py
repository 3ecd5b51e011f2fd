"""A stranger's folder can be opened with every command, and does nothing but show."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

import tests.command_line  # noqa: F401  its server of processes has graft imported
from graft.cli import app
from trust.effects import MARK, observe
from trust.file_cases import evil
from trust.written import SERVER, fault_of, make_world

COMMANDS: dict[str, list[str]] = {
    "train": ["theirs/config.yaml"],
    "sft": ["theirs/config.yaml"],
    "config": ["theirs/config.yaml"],
    "generate": ["theirs", "--prompt", "1+1=", "--max-tokens", "2"],
    "envs": ["theirs"],
    "recipes": ["theirs"],
    "play": ["theirs"],
    "eval": ["theirs", "--tasks", "1"],
    "rollout": ["theirs"],
    "export": ["theirs", "--out", "exported"],
    "plan": ["theirs/config.yaml", "--no-probe"],
    "explain": ["theirs"],
    "init": ["theirs"],
    "translate": ["theirs/config.yaml"],
    "runs": ["theirs"],
    "watch": ["theirs"],
    "report": ["theirs"],
    "view": ["theirs", "--no-browser"],
    "doctor": ["theirs/config.yaml"],
    "replay": ["theirs", "--step", "1"],
    "scale": ["theirs", "2"],
    "serve agent": ["theirs"],
    "serve search": ["--corpus", "theirs/rows.jsonl"],
    "data show": ["theirs/rows.jsonl"],
    "data make": ["theirs", "--out", "made.jsonl", "--n", "1"],
    "data sample": ["theirs", "calculator", "--out", "rows.jsonl", "--n", "1", "--samples", "1"],
    "data cache import": ["theirs/rows.jsonl", "--out", "cache.db"],
    "data cache export": ["theirs/rows.jsonl", "--out", "cache.jsonl"],
}
"""Every command on the folder: its words after its name."""

WAITS = {"view": 4.0, "watch": 4.0, "serve agent": 6.0, "serve search": 4.0}
"""Seconds until a command that serves or waits is interrupted."""

HOSTILE: dict[str, dict[str, Any]] = {
    "code": {
        "task.env": "evil:Env",
        "task.reward": "evil:reward",
        "run.trackers": ["evil:Tracker"],
    },
    "writes": {
        "task.reward": {"judge": {"url": SERVER, "cache": "HOME/graft/recipes.jsonl"}},
        "run.dir": "PRIVATE",
        "engine.exchange": "PRIVATE",
    },
    "reads": {
        "task.env": "prompts",
        "task.args": {"data": "PRIVATE/rows.jsonl"},
        "model.chat_template": "PRIVATE/id_rsa",
        "sft.data": "PRIVATE/rows.jsonl",
        "sft.steps": 1,
    },
    "servers": {
        "task.reward": {"judge": {"url": SERVER}},
        "engine.url": [SERVER],
        "distill.teacher": SERVER,
        "model.path": "OWNER/NAME",
        "model.shape": {},
        "run.trackers": ["wandb"],
    },
    "programs": {"task.agent": f"touch PRIVATE/{MARK}", "engine.args": {"trust_remote_code": True}},
    "links": {},
}


def command_names(command: Any, name: str = "") -> Iterator[str]:
    """Every command of the program: "eval", "data cache import", ..."""
    if not hasattr(command, "commands"):
        yield name
    for word, inner in getattr(command, "commands", {}).items():
        yield from command_names(inner, f"{name} {word}".strip())


def test_every_command_is_tried() -> None:
    assert set(command_names(get_command(app))) == COMMANDS.keys()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


def prepare(world: Path, kind: str) -> None:
    """The stranger's run in world/work, with what is hostile about it."""
    work = world / "work"
    shutil.rmtree(work)
    work.mkdir()
    evil(work)
    run = Path(shutil.copytree(world / "base", work / "theirs"))
    (run / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    text = json.dumps(HOSTILE[kind])
    places = {"PRIVATE": str(world / "private"), "HOME": str(world / "home")}
    for mark, place in places.items():
        text = text.replace(mark, place)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    for key, value in json.loads(text).items():
        section, _, name = key.partition(".")
        settings[section][name] = value
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    if (
        kind == "links"
    ):  # results of an evaluation, a report and others would end in the user's files
        for name in ("evaluations", "exchange", "tensorboard"):
            shutil.rmtree(run / name, ignore_errors=True)
            (run / name).symlink_to(world / "private")
        for name in ("report.html", "scale.json", "changes.jsonl", "errors.log"):
            (run / name).unlink(missing_ok=True)
            (run / name).symlink_to(world / "private" / "rows.jsonl")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_does_more_than_show(world: Path, command: str, kind: str) -> None:
    prepare(world, kind)
    outcome = observe(world, [*command.split(), *COMMANDS[command]], WAITS.get(command, 60.0))
    is_interrupted = command in WAITS and outcome.code in (130, 1)
    fault = "" if is_interrupted and not outcome.effects else fault_of(outcome)
    assert fault == "", outcome.text[-2000:]


QUICK = [("eval", "links"), ("eval", "servers"), ("train", "code"), ("replay", "reads")]


@pytest.mark.parametrize(("command", "kind"), QUICK)
def test_some_commands_do_nothing_but_show(world: Path, command: str, kind: str) -> None:
    prepare(world, kind)
    assert fault_of(observe(world, [command, *COMMANDS[command]])) == ""

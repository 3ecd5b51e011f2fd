"""Runs and recipes of strangers whose settings write, read, connect or start something: none of it happens.

Every key and argument of `graft.trust.settings` gets hostile values, in every form that a recipe knows, and
the commands that use settings open them. A failure is an effect: a file of the user that was opened or
changed, a connection, a program, an import.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import yaml

from graft.trust.settings import ARGUMENTS, KEYS, NAMES, Effect
from trust.bank import Row
from trust.effects import MARK, Outcome, observe
from trust.file_cases import evil
from trust.files import RECIPE

SMALL, FULL = 24, 900
"""The second: every attack at least once."""
SERVER = "http://127.0.0.1:9/v1"
"""Nobody listens there; a connection is noted before it is refused."""


def run(count: int, seed: int) -> Iterator[Row]:
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["graft.cli", "graft.evaluate.run", "graft.doctor.recipe", "graft.train.session"]
    )
    with tempfile.TemporaryDirectory(prefix="graft-written-") as where:
        world = make_world(Path(where))
        rng = Random(seed)
        cases = sorted(attacks(world).items())
        drawn = rng.sample(cases, min(count, len(cases))) + rng.choices(
            cases, k=max(0, count - len(cases))
        )
        for group in ("runs", "recipes"):
            row = Row("written", group, 0)
            for name, changes in drawn:
                command = rng.choice(RUN_COMMANDS if group == "runs" else RECIPE_COMMANDS)
                row.count += 1
                if fault := attack(world, changes, command, is_run=group == "runs"):
                    row.failures.append(f"{name}: graft {' '.join(command)}: {fault}")
            yield row


RUN_COMMANDS = [
    ["eval", "theirs", "--tasks", "1"],
    ["eval", "theirs", "--tasks", "1", "--on", "calculator"],
    ["rollout", "theirs"],
    ["replay", "theirs", "--step", "1"],
    ["doctor", "theirs/config.yaml"],
    ["plan", "theirs/config.yaml", "--no-probe"],
    ["train", "theirs/config.yaml"],
    ["data", "sample", "theirs", "calculator", "--out", "rows.jsonl", "--n", "1", "--samples", "1"],
    ["generate", "theirs", "--prompt", "1+1=", "--max-tokens", "2"],
    ["export", "theirs", "--out", "exported"],
]
RECIPE_COMMANDS = [
    ["doctor", "theirs.yaml"],
    ["plan", "theirs.yaml", "--no-probe"],
    ["eval", "model", "--recipe", "theirs.yaml", "--tasks", "1"],
    ["rollout", "model", "--recipe", "theirs.yaml"],
]


def make_world(root: Path) -> Path:
    """A user with a key, private files and a run, which is taken for a stranger's."""
    import graft

    for name in ("private", "home", "work"):
        (root / name).mkdir()
    (root / "private" / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (root / "private" / "id_rsa").write_text("secret\n")
    before = os.environ.get("XDG_CONFIG_HOME")
    os.environ["XDG_CONFIG_HOME"] = str(root / "home")
    try:
        section = {**RECIPE["run"], "dir": str(root)}
        graft.train({**RECIPE, "run": {**section, "name": "base"}}, progress=False)
    finally:
        os.environ.pop("XDG_CONFIG_HOME")
        if before is not None:
            os.environ["XDG_CONFIG_HOME"] = before
    (root / "base" / "config.yaml.sig").unlink()
    newest = max((root / "base" / "checkpoints").iterdir())
    shutil.copytree(newest, root / "model", ignore=shutil.ignore_patterns("trainer*"))
    return root


def attacks(world: Path) -> dict[str, dict[str, Any]]:
    """Changes of a recipe by name: {"task.args data: a list": {"task.args": {"data": [...]}}}."""
    private = world / "private"
    hostile: dict[Effect, list[str]] = {
        Effect.READ: [str(private / "rows.jsonl"), "~/rows.jsonl", "../private/rows.jsonl"],
        Effect.MODEL: [str(private), "OWNER/NAME", SERVER],
        Effect.BUNDLED: [str(private / "id_rsa"), "~/id_rsa"],
        Effect.WRITE: [str(private / "new"), str(world / "home" / "graft" / "recipes.jsonl"), "~"],
        Effect.CONNECT: [SERVER, "127.0.0.1:9"],
        Effect.EXECUTE: [f"touch {private / MARK}"],
        Effect.SECRET: ["HOME"],
        Effect.NAME: ["evil:name"],
        Effect.PARTS: ["evil:part"],
    }
    found: dict[str, dict[str, Any]] = {}
    for key, effect in KEYS.items():
        for number, text in enumerate(hostile.get(effect, [])):
            for form, value in {"text": text, "list": [text], "map": {"O": text}}.items():
                found[f"{key} {number}: a {form}"] = {key: value}
    line = json.dumps({"path": str(world / "work" / "theirs.yaml")})
    for name, effect in ARGUMENTS.items():
        for number, text in enumerate(hostile.get(effect, [])):
            for form, changes in forms_of(name, text, line).items():
                found[f"{name} {number}: {form}"] = changes
    for name in NAMES:
        found[f"{name}: a reward"] = {"task.reward": name}
        found[f"{name}: a tool"] = {"task.wrappers": [{"tools": {"use": [name]}}]}
        found[f"{name}: a source"] = {"task.wrappers": [{"search_tool": {"source": name}}]}
    return found


def forms_of(name: str, text: str, line: str) -> dict[str, dict[str, Any]]:
    """One argument in the places that a recipe has for arguments."""
    judge = {"url": SERVER, "model": f"m\n{line}\n", name: text}
    return {
        "args": {"task.env": "prompts", "task.args": {"rows": [{"prompt": "a"}], name: text}},
        "item": {"task.env": [{"env": "prompts", "args": {name: text}}]},
        "eval_args": {"task.eval_args": {name: text}},
        "held out": {"eval.env": [{"env": "prompts", "args": {name: text}}]},
        "reward": {"task.reward": {"judge": judge}},
        "rewards": {"task.reward": [{"judge": judge, "weight": 0.5}]},
        "wrapper": {"task.wrappers": [{"search_tool": {"corpus": "small", name: text}}]},
        "tool": {"task.wrappers": [{"tools": {"use": [{"search": {name: text}}]}}]},
        "server": {"task.wrappers": [{"tools": {"use": [{"mcp": {name: text}}]}}]},
        "demonstrations": {"sft.demo_args": {name: text}, "sft.steps": 1},
    }


def attack(world: Path, changes: dict[str, Any], command: list[str], *, is_run: bool) -> str:
    """What a command did for a stranger; "": nothing."""
    work = world / "work"
    shutil.rmtree(work)
    work.mkdir()
    evil(work)
    settings = yaml.safe_load((world / "base" / "config.yaml").read_text())
    for key, value in changes.items():
        section, _, name = key.partition(".")
        settings[section][name] = value
    if is_run:
        shutil.copytree(world / "base", work / "theirs")
        (work / "theirs" / "config.yaml").write_text(yaml.safe_dump(settings))
    else:
        (work / "theirs.yaml").write_text(yaml.safe_dump(settings))
        (work / "theirs.yaml").chmod(0o666)  # others can write it
        shutil.copytree(world / "model", work / "model")
    return fault_of(observe(world, command))


def fault_of(outcome: Outcome) -> str:
    """What is wrong with the way a command ended; "": nothing."""
    if outcome.effects:
        return "; ".join(dict.fromkeys(outcome.effects))
    if "Traceback (most recent" in outcome.text or outcome.code not in (0, 1, 2):
        return f"exit code {outcome.code}: {outcome.text[-400:]}"
    return ""

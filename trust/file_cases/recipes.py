"""Recipes that grow: aliases and interpolations that would fill the memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from trust.file_cases.case import CODE, Command, case, lookers, run_copy, some


def aliases(rng: Random) -> str:
    """Billion laughs."""
    width, depth = rng.randrange(5, 12), rng.randrange(8, 40)
    lines = ["a0: &a0 [lol, lol]"]
    for level in range(1, depth):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join(lines)


def interpolations(rng: Random) -> str:
    width, depth = rng.randrange(2, 10), rng.randrange(20, 60)
    lines = ["a0: lolololololol"]
    for level in range(1, depth):
        lines.append(f"a{level}: '" + f"${{a{level - 1}}}" * width + "'")
    return "\n".join(lines)


RECIPES: list[Callable[[Random], str]] = [
    aliases,
    interpolations,
    lambda rng: "a: " + "[" * rng.randrange(1000, 100_000),
    lambda rng: "a: " + "{b: " * rng.randrange(1000, 50_000),
    lambda rng: "\n".join(" " * n + "a:" for n in range(rng.randrange(1000, 5000))),
    lambda rng: f'model: !!python/object/apply:exec ["{CODE}"]',
    lambda rng: "model: !!python/name:os.system",
    lambda rng: "model: &a {path: *a}",
    lambda rng: "task: {env: '" + "${task.env}" * rng.randrange(1, 1000) + "'}",
    lambda rng: "run: {name: '${run.dir}', dir: '${run.name}'}",
    lambda rng: "model: {path: '" + "a" * 50_000_000 + "'}",
    lambda rng: "\n".join(f"k{n}: 1" for n in range(300_000)),
    lambda rng: "train: {steps: " + "9" * 10_000 + "}",
    lambda rng: "train: {steps: 0x" + "f" * rng.randrange(5000, 500_000) + "}",
    lambda rng: "train: {steps: " + ":".join(["59"] * rng.randrange(2000, 50_000)) + "}",
    lambda rng: 'task: {env: "ev\\x1b[2J\\x1b]0;owned\\x07\\u202eil:Env"}',
    lambda rng: "train: {steps: .inf, lr: .nan}",
    lambda rng: "model: {shape: {width: 1e18, layers: 1e18}}\ntask: {env: calculator}",
    lambda rng: (
        "model: {alphabet: '', shape: {width: 1000000, layers: 100000}}\ntask: {env: calculator}"
    ),
    lambda rng: "\0\0\0",
    lambda rng: "\ufeff" + "? " * rng.randrange(1000, 100_000),
    lambda rng: "a: " + "!!binary " + "A" * 40_000_000,
    lambda rng: "<<: " * 3000,
    lambda rng: "run: {name: ../../../../tmp/escaped, dir: /proc}\ntask: {env: calculator}",
]


@case("recipes", RECIPES)
def growing_recipe(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    (folder / "recipe.yaml").write_text(variant(rng), encoding="utf-8")
    return some(
        rng, [["config", "recipe.yaml"], ["doctor", "recipe.yaml"], ["plan", "recipe.yaml"]]
    )


@case("recipes", RECIPES)
def growing_config_of_a_run(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    run = run_copy(folder, base)
    text = variant(rng)
    if rng.random() < 0.3:
        text = (run / "config.yaml").read_text() + "\n" + text
    (run / "config.yaml").write_text(text, encoding="utf-8")
    return [
        ["runs", "."],
        ["report", "theirs", "--out", "r.html"],
        *some(rng, lookers("theirs"), 1),
    ]

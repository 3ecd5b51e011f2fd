"""States of an optimizer and weights that are no numbers: none is resumed, saved or published."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from trust.file_cases.case import Command, case, checkpoint, run_copy

BAD = ("nan", "inf", "-inf")


def spoil(file: Path, rng: Random, kind: str, value: float) -> None:
    """Write a number into one place of one tensor whose name has `kind` in it."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(file, framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        header = stored.metadata()
    name = rng.choice(sorted(name for name in tensors if kind in name))
    flat = tensors[name].view(-1)
    flat[rng.randrange(len(flat))] = value
    save_file(tensors, file, header)


@case(
    "optimizer state",
    [
        *(("/exp_avg/", bad) for bad in BAD),
        *(("/exp_avg_sq/", bad) for bad in (*BAD, -1e-3, -1e-30)),
    ],
)
def moment_of_adam(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    kind, value = variant
    place = checkpoint(run_copy(folder, base))
    spoil(place / "trainer" / "part-00000.safetensors", rng, kind, float(value))
    own = str(base / "recipe.yaml")
    train = ["train", own, "run.dir=.", "run.name=theirs", "train.steps=3"]
    return [train, ["export", "theirs", "--out", "exported"]]


@case("optimizer state", BAD)
def weight_of_a_policy(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    place = checkpoint(run_copy(folder, base))
    spoil(place / "model.safetensors", rng, "", float(variant))
    own = str(base / "recipe.yaml")
    return [
        ["train", own, "run.dir=.", "run.name=theirs", "train.steps=3"],
        ["export", "theirs", "--out", "exported"],
        ["eval", "theirs", "--tasks", "1"],
    ]

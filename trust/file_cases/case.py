"""A hostile file by seed, and what cases have in common."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

CANARY = "canary"
"""Written by the code of a hostile file, in the folder of its case."""
CODE = f"open({CANARY!r}, 'w').write('code ran')"
MODULE = f"{CODE}\ndef __getattr__(name):\n    {CODE}\n    raise AttributeError(name)\n"

SECRET = "graft-secret-5d1e0c"
"""In a file of the user that a link of a case leads to."""

Command = list[str]


@dataclass(frozen=True)
class FileCase:
    """One attack: `make` writes the files and returns the commands that open them."""

    group: str
    name: str
    variant: Any
    make: Callable[[Path, Random, Path, Any], list[Command]]


KINDS: list[list[FileCase]] = []
"""The variants of each kind of attack."""


def case(
    group: str, variants: Sequence[Any] = (None,)
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a kind of attack, with one case for each variant."""

    def add(make: Callable[..., Any]) -> Callable[..., Any]:
        name = make.__name__
        KINDS.append(
            [FileCase(group, f"{name} {n}", variant, make) for n, variant in enumerate(variants)]
        )
        return make

    return add


def chosen(count: int, seed: int) -> Iterator[tuple[FileCase, Random]]:
    """`count` cases, one of each kind in turn; after the last variant they begin again, with other draws."""
    rng = Random(seed)
    kinds = [rng.sample(kind, len(kind)) for kind in KINDS]
    order = [
        kind[turn] for turn in range(max(map(len, kinds))) for kind in kinds if turn < len(kind)
    ]
    for number in range(count):
        yield order[number % len(order)], Random(f"{seed} {number}")


class Payload:
    """Pickled, it is a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, (CODE,))


def evil(folder: Path) -> None:
    (folder / "evil.py").write_text(MODULE)


def run_copy(folder: Path, base: Path, changes: dict[str, Any] | None = None) -> Path:
    """The run of `base` as a download: no signature of this user; with keys of its config.yaml changed."""
    import yaml

    target = folder / "theirs"
    shutil.copytree(base / "run", target)
    (target / "config.yaml.sig").unlink(missing_ok=True)
    if changes:
        config = yaml.safe_load((target / "config.yaml").read_text())
        for key, value in changes.items():
            section, _, name = key.partition(".")
            config[section][name] = value
        (target / "config.yaml").write_text(yaml.safe_dump(config))
    return target


def checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def lookers(run: str) -> list[Command]:
    """Every command that looks at a run."""
    return [
        ["eval", run, "--tasks", "1"],
        ["rollout", run],
        ["replay", run, "--step", "1"],
        ["doctor", f"{run}/config.yaml"],
        ["plan", f"{run}/config.yaml", "--no-probe"],
        ["export", run, "--out", "exported"],
        ["report", run, "--out", "report.html"],
        ["runs", "."],
        ["generate", run, "--prompt", "1+1=", "--max-tokens", "2"],
        ["data", "sample", run, "calculator", "--out", "rows.jsonl", "--n", "1", "--samples", "1"],
    ]


def some(rng: Random, commands: list[Command], most: int = 2) -> list[Command]:
    return rng.sample(commands, min(most, len(commands)))

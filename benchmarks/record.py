"""Keeps measured figures: one row each in docs/numbers.json, which the pages show.

    python -m benchmarks.gpu --only rollouts --record        # and every other benchmark with --record
    python scripts/numbers.py                                # then write them into the pages

A figure that was there is replaced. Commit, date, machine and command are added here, so a benchmark hands
over what it measured and nothing else.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "numbers.json"


_RESULTS = "benchmarks/evidence/results.jsonl"
"""Rows that benchmarks append while they run: no code."""


@dataclass(frozen=True)
class Figure:
    name: str
    """Unique: "gpu.0.6B-training-step-64x8-256-512"; tables of the pages go by how it begins."""
    what: str
    value: float
    unit: str = ""
    rounds: tuple[float, ...] = ()
    note: str = ""


def read_rows() -> list[dict[str, Any]]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def record(figures: Iterable[Figure], machine: str = "", command: str = "") -> None:
    """Add these figures to docs/numbers.json, as measured now by this command on this machine."""
    about = {
        "commit": current_commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine or describe_machine(),
        "command": command or current_command(),
    }
    rows = {row["name"]: row for row in read_rows()}
    rows |= {figure.name: row_of(figure, about) for figure in figures}
    lines = ",\n".join(f" {json.dumps(row, ensure_ascii=False)}" for row in rows.values())
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"recorded in {FILE}; `python scripts/numbers.py` writes it into the pages")


def take_flag(arguments: list[str]) -> tuple[list[str], bool]:
    """The arguments without --record, and whether it was there; for benchmarks that take plain words."""
    return [argument for argument in arguments if argument != "--record"], "--record" in arguments


def table_name() -> str:
    """How figures of this machine's processor begin: x86 or arm."""
    return {"x86_64": "x86", "aarch64": "arm"}.get(platform.machine(), platform.machine())


def row_of(figure: Figure, about: dict[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": figure.name,
        "what": figure.what,
        "value": rounded(figure.value),
    }
    if len(figure.rounds) > 1:
        row["spread"] = [rounded(min(figure.rounds)), rounded(max(figure.rounds))]
    row |= {"unit": figure.unit, **about}
    return row | ({"note": figure.note} if figure.note else {})


def rounded(value: float) -> float:
    """Three digits, or all of a whole number: 70431.8 -> 70400, 2.4687 -> 2.47, 3145694 -> 3145694."""
    if isinstance(value, int):
        return value
    short = float(f"{value:.3g}")
    return int(short) if short.is_integer() and abs(short) >= 100 else short


def slug(text: str) -> str:
    """The end of a figure's name: "0.6B rollouts 8x8 256->512" -> 0.6B-rollouts-8x8-256-512."""
    return re.sub(r"[^\w.]+", "-", text).strip("-")


def current_commit() -> str:
    """The commit that is checked out; refused while the measured code differs from it."""
    if commit := os.environ.get("GRAFT_COMMIT"):  # a copy of the files without their history
        return commit
    changed = _git("status", "--porcelain", "--", "graft", "benchmarks", "recipes", f":!{_RESULTS}")
    if changed:
        raise SystemExit(
            f"record: these files differ from the commit that the figure would name:\n{changed}\n"
            "Commit them and measure again, or leave --record out"
        )
    return _git("rev-parse", "--short=7", "HEAD")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SystemExit(
            f"record: git {arguments[0]} failed ({error}); name the measured commit: GRAFT_COMMIT=..."
        ) from error
    return done.stdout.strip()


def describe_machine() -> str:
    import torch  # not above: a benchmark of memory counts what its own process has loaded

    about = f"torch {torch.__version__}, Python {platform.python_version()}"
    if torch.cuda.is_available():
        return f"one {torch.cuda.get_device_name()}, {about}"
    cores = torch.get_num_threads()
    return f"{cores} core{'s' * (cores > 1)} of {_processor()}, {about}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    name = re.search(r"^model name\s*: (.*)$", text, re.M)
    return name[1] if name else platform.machine()


def current_command() -> str:
    """As it was typed: "python -m benchmarks.cpu_step A 8"; --record itself is no part of it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"-m {spec.name.removesuffix('.__main__')}" if spec else sys.argv[0]
    arguments, _ = take_flag(sys.argv[1:])
    return f"python {program} {shlex.join(arguments)}".strip()

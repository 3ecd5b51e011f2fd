"""Environments against GEM (gem-llm 0.1.0), both measured in one run on this machine.

    python -m benchmarks.envs [--rounds 9] [--seconds 0.15] [--only sudoku] [--json FILE] [--record]

GEM has its own venv (.venv/gem, made on first use); the two libraries take turns, case by
case and round by round. Rates are medians; the ratio is the median of the rounds' own ratios, so that
a host that is slow for a while is slow for both. Above 1 graft is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import Figure, record, slug

ROOT = Path(__file__).parent.parent
GEM = ROOT / ".venv" / "gem"
PACKAGES = ("gem-llm==0.1.0", "datasets", "pandas", "requests", "pylatexenc")

GAMES = [
    "game:GuessTheNumber-v0-hard",
    "game:Mastermind-v0-hard",
    "game:Minesweeper-v0-hard",
    "game:Wordle-v0-hard",
    "game:Hangman-v0-hard",
    "game:FifteenPuzzle-v0-hard",
    "game:Sudoku-v0-hard",
    "game:TowerofHanoi-v0-hard",
    "game:Game2048-v0-hard",
    "game:Sokoban-v0-easy",
    "game:Crosswords-v0-hard",
    "game:WordSearch-v0-hard",
]
REASONING = ["rg:letter_counting", "rg:leg_counting", "rg:arc_1d"]
RESETS = ["game:Sudoku-v0-hard", "game:Sokoban-v0-easy"]


class Worker:
    """A process that measures one library."""

    def __init__(self, name: str, python: Path, env: dict[str, str]) -> None:
        self.name = name
        command = [str(python), str(ROOT / "benchmarks" / "envs_worker.py"), name]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env=env, cwd=ROOT,
        )  # fmt: skip
        self.modes: list[str] = self._read()["modes"]

    def measure(self, **order: Any) -> float:
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)
        answer = self._read()
        if "error" in answer:
            raise RuntimeError(f"{self.name}, {order}: {answer['error']}")
        return answer["rate"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker of {self.name} ended; run it by hand to see why")
        return json.loads(line)


def gem_python() -> Path:
    """GEM's interpreter, installed when it is not there."""
    python = GEM / "bin" / "python"
    if not (GEM / ".ready").exists():
        print(f"installing {PACKAGES[0]} into {GEM.relative_to(ROOT)} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(GEM)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *PACKAGES], check=True)
        (GEM / ".ready").touch()
    return python


def word_lists(folder: Path) -> None:
    """The files that GEM would download with nltk, written from our own lists: same words for both."""
    from graft_envs.games import words

    corpus = folder / "corpora" / "words"
    corpus.mkdir(parents=True)
    for name, listed in (("en-basic", words.basic()), ("en", words.full())):
        (corpus / name).write_text("\n".join(listed) + "\n")
    with zipfile.ZipFile(folder / "corpora" / "words.zip", "w") as archive:
        for file in corpus.iterdir():
            archive.write(file, f"words/{file.name}")


def calibrated(worker: Worker, seconds: float, **order: Any) -> int:
    """How many steps take this library about `seconds`."""
    steps = 64
    while True:
        rate = worker.measure(**order, steps=steps)
        if steps / rate > seconds / 4:
            return max(int(rate * seconds), 8)
        steps *= 4


def compare(graft: Worker, gem: Worker, rounds: int, seconds: float, **order: Any) -> dict:
    """Both libraries by turns, the same number of steps; where there are modes, each one's better."""
    has_modes = order["case"] == "vector"
    runs = [
        (worker, mode, {**order, "mode": mode})
        for worker in (graft, gem)
        for mode in (worker.modes if has_modes else [""])
    ]
    if "steps" not in order:
        _, _, how = next(run for run in runs if run[0] is gem)
        steps = calibrated(gem, seconds, **how)
        runs = [(worker, mode, {**how, "steps": steps}) for worker, mode, how in runs]
    rates: dict[str, dict[str, list[float]]] = {"graft": {}, "gem": {}}
    for number in range(rounds):
        for worker, mode, how in runs:
            rate = worker.measure(**how, round=number)
            rates[worker.name].setdefault(mode, []).append(rate)
    best = {
        name: max((median(values), mode) for mode, values in by_mode.items())
        for name, by_mode in rates.items()
    }
    return {
        "case": order["case"],
        "id": order.get("id", ""),
        "graft": best["graft"][0],
        "graft_mode": best["graft"][1],
        "gem": best["gem"][0],
        "gem_mode": best["gem"][1],
        "ratio": median(
            ours / theirs
            for ours, theirs in zip(
                rates["graft"][best["graft"][1]], rates["gem"][best["gem"][1]], strict=True
            )
        ),
        "rounds": rates,
    }


def orders() -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = [{"case": "single", "id": i} for i in GAMES + REASONING]
    listed += [{"case": "reset", "id": env_id} for env_id in RESETS]
    listed += [{"case": "vector", "id": env_id} for env_id in GAMES + REASONING]
    listed += [{"case": "sleep", "steps": 5}, {"case": "python", "steps": 4}]
    return [*listed, {"case": "grading", "steps": 1}]


def figure(row: dict[str, Any]) -> Figure:
    what = f"{row['case']} {row['id']}".strip()
    rounds = tuple(row["rounds"]["graft"][row["graft_mode"]])
    note = f"GEM {row['gem']:,.0f}/s, ratio {row['ratio']:.1f}"
    return Figure(f"envs.{slug(what)}", what, row["graft"], "/s", rounds, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.15, help="per measurement")
    parser.add_argument("--only", default="", help="cases or ids that contain this text")
    parser.add_argument("--json", default="", help="also write every reading to this file")
    parser.add_argument("--record", action="store_true", help="keep them in docs/numbers.json")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="graft-bench-"))
    try:
        word_lists(folder)
        env = {**os.environ, "NLTK_DATA": str(folder), "OMP_NUM_THREADS": "1"}
        graft = Worker("graft", Path(sys.executable), {**env, "PYTHONPATH": str(ROOT)})
        # its python tool runs whatever `python` comes first, which may be a slow start script
        path = f"{gem_python().parent}{os.pathsep}{env['PATH']}"
        gem = Worker("gem", gem_python(), {**env, "PATH": path, "PYTHONPATH": ""})
        print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
              f"Python {platform.python_version()}; per second, medians of {options.rounds}")  # fmt: skip
        print(f"| {'case':<8} | {'id':<28} | {'graft':>10} | {'GEM':>10} | ratio |")
        print(f"|{'-' * 10}|{'-' * 30}|{'-' * 12}|{'-' * 12}|-------|")
        rows = []
        for order in orders():
            if options.only.lower() not in f"{order['case']} {order.get('id', '')}".lower():
                continue
            try:
                row = compare(graft, gem, options.rounds, options.seconds, **order)
            except RuntimeError as error:
                print(f"| {order['case']:<8} | {order.get('id', ''):<28} | {error}")
                continue
            rows.append(row)
            print(f"| {row['case']:<8} | {row['id']:<28} | {row['graft']:>10,.0f} | "
                  f"{row['gem']:>10,.0f} | {row['ratio']:>5.1f} |", flush=True)  # fmt: skip
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1))
        if options.record:
            record(map(figure, rows))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

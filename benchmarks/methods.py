"""Several methods on the same task, seed by seed: every run is `graft train` in a process of its own."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Suite(NamedTuple):
    """One comparison: methods by the end of their recipes' names, and the overrides of all."""

    methods: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    own: dict[str, tuple[str, ...]] = {}
    """Overrides by method: what differs between them besides their recipes."""
    needs_model: bool = False
    recipe: str = "{suite}-{method}"
    """Name of a method's recipe in the folder of the comparison."""
    after: str = ""
    """The suite whose runs, of the same seed, are where its own begin."""
    after_method: dict[str, str] = {}
    """Of which method that run was, where it was another."""
    budget: int = 0
    """Sampled tokens at which methods are compared; 0: what all of them have reached."""


def commands(
    recipes: str, name: str, suite: Suite, options: argparse.Namespace
) -> dict[Path, list[str]]:
    """The command of every run, by its folder; `recipes` is the folder of bundled recipes."""
    found: dict[Path, list[str]] = {}
    for seed in options.seeds:
        for method in suite.methods if not options.methods else options.methods:
            folder = options.out / f"{name}-{method}-{seed}"
            recipe = suite.recipe.format(suite=name, method=method)
            own = suite.own.get(method, ())
            model = [f"model.path={options.model}"] if suite.needs_model else []
            if suite.after:
                before = f"{suite.after}-{suite.after_method.get(method, method)}-{seed}"
                model = [f"model.path={options.out / before}"]
            found[folder] = [
                sys.executable, "-m", "graft", "train", f"{recipes}/{recipe}",
                f"run.dir={options.out}", f"run.name={folder.name}", f"run.seed={seed}",
                *model, *suite.overrides, *own, *options.overrides,
            ]  # fmt: skip
    return found


def run_all(todo: dict[Path, list[str]], jobs: int, limit: float) -> None:
    """Up to `jobs` at a time; what has a summary is done, what fails is printed and left out."""
    waiting = [folder for folder in todo if not (folder / "summary.json").exists()]
    running: dict[Path, subprocess.Popen[bytes]] = {}
    began = time.monotonic()
    while waiting or running:
        while waiting and len(running) < jobs and time.monotonic() - began < limit:
            folder = waiting.pop(0)
            log = folder.with_suffix(".log")
            log.parent.mkdir(parents=True, exist_ok=True)
            print(f"{folder.name} ...", flush=True)
            with log.open("wb") as file:
                running[folder] = subprocess.Popen(todo[folder], stdout=file, stderr=file)
        if time.monotonic() - began >= limit:
            waiting.clear()
        time.sleep(0.5)
        for folder, process in list(running.items()):
            if process.poll() is not None:
                del running[folder]
                how = "done" if process.returncode == 0 else f"failed, see {folder}.log"
                print(f"{folder.name}: {how}, {time.monotonic() - began:.0f} s", flush=True)


def read_options(about: str, suites: Mapping[str, Suite], out: str, arguments: list[str] | None):
    """The command line of a comparison."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("suite", choices=suites)
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    parser.add_argument("--model", default="", help="what to train, where the suite needs one")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=None)
    parser.add_argument("--seeds", type=lambda text: list(map(int, text.split(","))), default=[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=36_000, help="no run begins after so long")
    parser.add_argument("--out", type=Path, default=Path(out))
    options = parser.parse_intermixed_args(arguments)
    if suites[options.suite].needs_model and not options.model:
        parser.error(f"{options.suite} trains a model: give --model (a folder or a .gguf file)")
    if options.jobs > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // options.jobs, 1)))
    return options


def folders_of(todo: Mapping[Path, list[str]], suite: str) -> dict[Path, tuple[str, int]]:
    """Of every run, its method and seed."""
    named = {folder: folder.name.removeprefix(f"{suite}-").rpartition("-") for folder in todo}
    return {folder: (method, int(seed)) for folder, (method, _, seed) in named.items()}

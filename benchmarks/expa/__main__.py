"""EARL against its baselines at the same number of sampled tokens.

    python -m benchmarks.expa toy                                      # a CPU, about 40 minutes
    python -m benchmarks.expa arithmetic --model smollm2.gguf --jobs 4 # one GPU

Every run is `graft train` in a process of its own, `--jobs` at a time; finished ones are not run again.
Prints a Markdown table and writes it beside curves.png in --out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.expa.curves import draw, read_curve, table
from benchmarks.expa.suites import SUITES, Suite


def commands(name: str, suite: Suite, options: argparse.Namespace) -> dict[Path, list[str]]:
    """The command of every run, by its folder."""
    found: dict[Path, list[str]] = {}
    for seed in options.seeds:
        for method in suite.methods if not options.methods else options.methods:
            folder = options.out / f"{name}-{method}-{seed}"
            own = [suite.warm_up[method]] if method in suite.warm_up else []
            model = [f"model.path={options.model}"] if suite.needs_model else []
            if suite.after:
                before = f"{suite.after}-{suite.after_method.get(method, method)}-{seed}"
                model = [f"model.path={options.out / before}"]
            found[folder] = [
                sys.executable, "-m", "graft", "train", f"expa/{suite.recipe or name}-{method}",
                f"run.dir={options.out}", f"run.name={folder.name}", f"run.seed={seed}",
                *model, *suite.overrides, *own, *options.overrides,
            ]  # fmt: skip
    return found


def run_all(todo: dict[Path, list[str]], jobs: int, limit: float) -> None:
    """Up to `jobs` at a time; what has a summary is done, what fails says so and is left out."""
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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    parser.add_argument("--model", default="", help="what to train, where the suite needs one")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=None)
    parser.add_argument("--seeds", type=lambda text: list(map(int, text.split(","))), default=[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=36_000, help="no run begins after so long")
    parser.add_argument("--out", type=Path, default=Path("runs/expa"))
    options = parser.parse_intermixed_args(arguments)
    suite = SUITES[options.suite]
    if suite.needs_model and not options.model:
        parser.error(f"{options.suite} trains a model: give --model (a folder or a .gguf file)")
    if options.jobs > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // options.jobs, 1)))
    todo = commands(options.suite, suite, options)
    run_all(todo, options.jobs, options.limit)
    curves = []
    for folder in todo:
        method, _, seed = folder.name.removeprefix(f"{options.suite}-").rpartition("-")
        if (curve := read_curve(folder, method, int(seed))).points:
            curves.append(curve)
    if not curves:
        sys.exit("no run has been evaluated; look at the logs")
    curves.sort(key=lambda curve: (suite.methods.index(curve.method), curve.seed))
    text = table(curves, suite.budget)
    (options.out / f"{options.suite}.md").write_text(text + "\n", encoding="utf-8")
    draw(curves, options.suite, options.out / f"{options.suite}.png")
    print(f"\n{text}")


if __name__ == "__main__":
    main()

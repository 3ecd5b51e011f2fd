"""EARL against its baselines at the same number of sampled tokens.

    python -m benchmarks.expa toy                                      # a CPU, about 40 minutes
    python -m benchmarks.expa arithmetic --model smollm2.gguf --jobs 4 # one GPU

Every run is `graft train` in a process of its own, `--jobs` at a time; finished ones are not run again.
Prints a Markdown table and writes it beside curves.png in --out.
"""

from __future__ import annotations

import sys

from benchmarks.expa.curves import draw, read_curve, table
from benchmarks.expa.suites import SUITES
from benchmarks.methods import commands, folders_of, read_options, run_all


def main(arguments: list[str] | None = None) -> None:
    options = read_options(__doc__ or "", SUITES, "runs/expa", arguments)
    suite = SUITES[options.suite]
    todo = commands("expa", options.suite, suite, options)
    run_all(todo, options.jobs, options.limit)
    curves = [read_curve(folder, *of) for folder, of in folders_of(todo, options.suite).items()]
    curves = [curve for curve in curves if curve.points]
    if not curves:
        sys.exit("no run has been evaluated; look at the logs")
    curves.sort(key=lambda curve: (suite.methods.index(curve.method), curve.seed))
    text = table(curves, suite.budget)
    (options.out / f"{options.suite}.md").write_text(text + "\n", encoding="utf-8")
    draw(curves, options.suite, options.out / f"{options.suite}.png")
    print(f"\n{text}")


if __name__ == "__main__":
    main()

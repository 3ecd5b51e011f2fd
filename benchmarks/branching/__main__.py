"""GRPO, ARPO and AEPO at the same budget of attempts, from the same warm-up.

    python -m benchmarks.branching warm --seeds 0,1,2            # the policies that all of them begin with
    python -m benchmarks.branching toy --seeds 0,1,2             # a CPU, minutes a run
    python -m benchmarks.branching cost                          # 16 from 8 roots against 16 roots
    python -m benchmarks.branching smol-warm --model smollm2     # the same three on one GPU
    python -m benchmarks.branching smol
    python -m benchmarks.branching smol-cost

Every run is `graft train` in a process of its own, `--jobs` at a time; finished ones are not run again.
Prints a Markdown table, numbers per step, and writes it beside a picture in --out.
"""

from __future__ import annotations

import sys

from benchmarks.branching.curves import draw, read_outcome, table
from benchmarks.branching.suites import SUITES
from benchmarks.methods import commands, folders_of, read_options, run_all


def main(arguments: list[str] | None = None) -> None:
    options = read_options(__doc__ or "", SUITES, "runs/branching", arguments)
    suite = SUITES[options.suite]
    todo = commands("arpo", options.suite, suite, options)
    run_all(todo, options.jobs, options.limit)
    runs = folders_of(todo, options.suite).items()
    outcomes = [o for folder, of in runs if (o := read_outcome(folder, *of)) is not None]
    outcomes = [outcome for outcome in outcomes if outcome.steps]
    if not outcomes:
        sys.exit(
            "nothing to compare: no run has taken its steps (a warm-up has none); see the logs"
        )
    outcomes.sort(key=lambda outcome: (suite.methods.index(outcome.method), outcome.seed))
    text = table(outcomes)
    (options.out / f"{options.suite}.md").write_text(text + "\n", encoding="utf-8")
    if any(outcome.points for outcome in outcomes):
        draw(outcomes, options.suite, options.out / f"{options.suite}.png")
    print(f"\n{text}")


if __name__ == "__main__":
    main()

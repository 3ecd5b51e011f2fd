"""A step of a model on many GPUs, and how to divide them: computed, not measured (benchmarks/PLANNER.md).

    python -m benchmarks.fleet --gpus 64 --shape 8B
    python -m benchmarks.fleet --gpus 64 --shape 8B --gpu h100 --staleness 2 --tool-seconds 5

Exit code 1: no layout fits.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.fleet.hardware import GPUS, shape_named
from benchmarks.fleet.planner import Planner
from benchmarks.fleet.report import show_layouts, what_fits, why_not
from benchmarks.fleet.scaling import TrainingJob
from graft.train.memory.workload import Workload

LONGEST = 4
"""The longest answer relative to the mean, unless --max-response is given."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", type=_at_least(1), required=True, help="how many")
    add("--shape", required=True, help="the model on them: 8B, 70B, ..., or a model's folder")
    add("--gpu", choices=GPUS, default="h200")
    add("--tasks", type=_at_least(1), default=128, help="per step")
    add("--samples", type=_at_least(1), default=8, help="answers per task")
    add("--prompt", type=_at_least(0), default=1024, help="tokens of a prompt")
    add("--response", type=_at_least(1), default=4096, help="tokens of an answer, on average")
    add("--max-response", type=_at_least(0), help="tokens of the longest; default 4 x the average")
    add("--spread", type=float, default=0.6, help="standard deviation of the log of lengths")
    add("--tool-seconds", type=float, default=0.0, help="that an attempt waits for tools in total")
    add("--staleness", type=_at_least(0), default=0, help="steps that sampling may run ahead")
    chosen = parser.parse_args(arguments)
    longest = chosen.max_response
    if longest is None:
        longest = LONGEST * chosen.response
    if longest and longest < chosen.response:
        parser.error(f"--max-response {longest} is below the average of {chosen.response}")
    job = TrainingJob(
        shape_named(chosen.shape),
        Workload(chosen.tasks, chosen.samples, chosen.prompt, chosen.response),
        spread=chosen.spread,
        longest=longest,
        tool_seconds=chosen.tool_seconds,
        staleness=chosen.staleness,
    )
    planner = Planner(job, GPUS[chosen.gpu], chosen.gpus)
    if planner.best is not None:
        show_layouts(planner, planner.best, chosen.shape)
        return 0
    print(
        f"{chosen.shape} does not fit on {chosen.gpus} x {planner.gpu.name}. {why_not(planner)}. "
        f"{what_fits(planner)}"
    )
    return 1


def _at_least(least: int):
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: needs {least} or more")
        return int(text)

    return number


if __name__ == "__main__":
    sys.exit(main())

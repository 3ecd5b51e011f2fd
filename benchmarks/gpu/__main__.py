"""Every number of the goals table in one run: roofs first, then graft, then peers.

    python -m benchmarks.gpu [--only rollouts,16x16] [--shapes 0.6B,1.7B] [--quick] [--out FOLDER]
    python -m benchmarks.gpu --device cpu --shapes tiny --quick       # to try the benchmark itself
    python -m benchmarks.gpu --record                                 # keep the figures for the pages

The first shape gets every job, the others rollouts, training and the full step. A job that fails
is a row with its error; the run goes on. One that leaves the GPU unusable (an illegal address) starts
the program again from the next job. `gpu.json` and `gpu.md` are written after every job.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.exact import gap_rows
from benchmarks.expa.cost import calls_row
from benchmarks.gpu import attention, peers, rollouts, training
from benchmarks.gpu.agents import agents
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.packing import packing
from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.roofs import roofs
from benchmarks.gpu.start import start
from benchmarks.gpu.structured import structured
from benchmarks.gpu.warm_up import warm_up
from benchmarks.gpu.works import anchor_of, works_of
from benchmarks.record import Figure, record, slug
from benchmarks.shapes import SHAPES
from graft.models.device_choice import choose_device, choose_dtype

Job = Callable[[Bench], list[Row]]


def jobs_of(shapes: list[str]) -> dict[str, Job]:
    """By name, in the order of importance."""
    main, *others = shapes
    anchor = anchor_of(main)
    jobs: dict[str, Job] = {"roofs": roofs}

    def add(name: str, function: Callable[..., list[Row]], *args: object) -> None:
        jobs[name] = lambda bench: function(bench, *args)

    def add_rollouts(shape: str) -> None:
        for work in works_of(shape):
            add(f"rollouts {shape} {work.title}", rollouts.rollouts, shape, work)

    add_rollouts(main)
    add(f"rollouts {main} {anchor.title}, kv fp8", rollouts.rollouts, main, anchor, "fp8")
    add(f"agents {main}", agents, main)
    add(f"agents {main}, kv fp8", agents, main, "fp8")
    add(f"gap {main}", gap_rows, main)
    add(f"calls {main}", calls_row, main)
    add(f"structured {main}", structured, main, anchor)
    add(f"training {main}", training.training, main, anchor)
    add(f"step {main}", training.step, main, anchor)
    add(f"packing {main}", packing, main)
    add(f"forks {main}", rollouts.forks, main)
    add(f"sync {main}", training.sync, main)
    if "1.7B" in others:  # it has a goal
        add_rollouts("1.7B")
    add(f"start {main}", start, main)
    add("warm-up", warm_up, main)
    add(f"guard {main}", rollouts.guard, main, anchor)
    add(f"memory {main}", training.memory, main, anchor)
    add("attention of decoding", attention.decoding)
    add("attention of training", attention.training)
    add(f"generate {main}", peers.generate, main, anchor)
    add(f"trl {main}", peers.trl, main, anchor)
    for shape in others:
        add(f"training {shape}", training.training, shape, anchor_of(shape))
        add(f"step {shape}", training.step, shape, anchor_of(shape))
        if shape != "1.7B":
            add_rollouts(shape)
    return jobs


def machine(device: torch.device) -> dict[str, str]:
    about = {"torch": torch.__version__, "python": platform.python_version()}
    if device.type != "cuda":
        return {"device": platform.processor() or platform.machine(), **about}
    query = "--query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
        state = done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        state = "unknown"
    return {"device": torch.cuda.get_device_name(device), **about, "at the start": state}


def is_usable(bench: Bench) -> bool:
    """An illegal address or a failed assertion on the device ends every later call to it."""
    try:
        bench.wait()
    except RuntimeError:
        return False
    return True


def run(name: str, job: Job, bench: Bench, report: Report) -> None:
    """One job; its rows, its seconds, or its error."""
    print(f"\n{name} ...", flush=True)
    started = time.perf_counter()
    entry: dict[str, object] = {"seconds": 0.0, "error": "it did not end"}
    report.jobs[name] = entry
    report.save()  # so that --resume passes over a job that took the process with it
    try:
        bench.free()
        rows = job(bench)
        del entry["error"]
    except Exception as error:
        traceback.print_exc()
        entry["error"] = f"{type(error).__name__}: {error}"
        rows = [Row(name, "", None, note=_one_line(str(entry["error"])))]
    entry["seconds"] = round(time.perf_counter() - started, 2)
    report.rows += rows
    report.roofs = bench.roofs
    report.save()
    for row in rows:
        print(row.line())
    print(f"{name}: {entry['seconds']} s", flush=True)


def _one_line(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:160]


def _start_again(arguments: list[str], seconds: float) -> None:
    """Become a fresh process that goes on with the next job; the driver's files are closed first."""
    os.closerange(3, 4096)
    again = [*arguments, "--resume", "--limit", str(seconds)]
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *again])


def main(arguments: list[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shapes", default="0.6B,1.7B,4B,135M", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--only", default="", help="jobs whose name contains one of these texts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=16, help="per row")
    parser.add_argument("--limit", type=float, default=480, help="no job begins after so long")
    parser.add_argument("--quick", action="store_true", help="two rounds of everything")
    parser.add_argument("--micro", type=int, default=16_384, help="tokens per micro-batch")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-gpu"))
    parser.add_argument("--previous", type=Path, help="a gpu.json to compare with")
    parser.add_argument("--profile", action="store_true", help="top kernels instead of the table")
    parser.add_argument("--resume", action="store_true", help="go on with the gpu.json in --out")
    parser.add_argument("--record", action="store_true", help="keep the rows in docs/numbers.json")
    args = parser.parse_args(arguments)

    began = time.time()
    device = choose_device(args.device)
    rounds = 2 if args.quick else args.rounds
    bench = Bench(device, choose_dtype("auto", device)[0], rounds, args.seconds, args.micro)
    shapes = args.shapes.split(",")
    if unknown := sorted(set(shapes) - set(SHAPES)):
        parser.error(f"unknown shapes {', '.join(unknown)}; known: {', '.join(SHAPES)}")
    if args.profile:
        from benchmarks.gpu.profile import profiles

        profiles(bench, shapes[0], anchor_of(shapes[0]))
        return Report(args.out, machine(device), time.time())
    if args.resume:
        report = Report.load(args.out / "gpu.json")
        bench.roofs = report.roofs
    else:
        report = Report(args.out, machine(device), time.time())
    wanted = [part for part in args.only.split(",") if part]
    for name, job in jobs_of(shapes).items():
        is_wanted = not wanted or any(word in name for word in wanted)
        if not is_wanted or name in report.jobs:
            continue
        left = args.limit - (time.time() - began)
        if left < 0:
            print(f"{name}: left out, {args.limit:.0f} s are over")
            continue
        run(name, job, bench, report)
        if not is_usable(bench):
            print("the GPU takes no more calls from this process; starting another", flush=True)
            _start_again(list(sys.argv[1:] if arguments is None else arguments), left)
    print(f"\n{report.markdown()}")
    if args.previous is not None:
        print(f"\n{report.against(Report.load(args.previous))}")
    if args.record:
        record(figures(report.rows, "gpu" if device.type == "cuda" else "trial"))
    return report


def figures(rows: list[Row], table: str) -> list[Figure]:
    """The figures of the rows that were measured; a later run replaces those of the same names."""
    return [
        Figure(
            f"{table}.{slug(row.name)}", row.name, row.value, row.unit, tuple(row.rounds), row.note
        )
        for row in rows
        if row.value is not None
    ]


if __name__ == "__main__":
    main()

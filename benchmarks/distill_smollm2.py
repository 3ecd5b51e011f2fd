"""A shallower SmolLM2 learns from one that RL has trained: SFT, GKD, on-policy distillation, GRPO. One GPU.

    python -m benchmarks.distill_smollm2 --model HuggingFaceTB/SmolLM2-135M-Instruct --seconds 220

    teacher   all layers: the recipe's warm-up, then GRPO
    student   half of the layers (benchmarks.shallow): a warm-up on the same demonstrations
    rows      attempts of the teacher, for SFT
    methods   from this student, each at every learning rate, all at the same time

Each is `graft train distill/smollm2` in a process of its own. When the seconds are over what still runs is
stopped, and the table has what was measured until then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.distill import GRPO, RL, read_curve, settings_of, table
from benchmarks.jobs import Job, run_jobs

GRAFT = (sys.executable, "-m", "graft")
RATES = ("2e-5", "1e-4")
METHODS = ("reverse", "opd", "sft", "grpo")
SHARED = (
    "run.trackers=[]", "run.save_every=0",
    "engine.kv_tokens=131072", "train.tokens_per_micro=16384",  # several share a GPU
)  # fmt: skip
LEAST = 0.1
"""Score of a student that has learned something in its warm-up; below it the methods begin from the
teacher's own warm-up, so that a student with too few layers does not end the comparison."""


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Everything that is run, in the order in which it begins."""
    shared = (*SHARED, f"run.dir={options.out}", f"run.eval_tasks={options.tasks}")

    def train(name: str, *own: str) -> list[str]:
        given = (f"run.name={name}", *shared, *own, *options.overrides)
        return [*GRAFT, "train", "distill/smollm2", *given]

    def method(name: str) -> list[str]:
        kind, _, rate = name.partition("-")
        sizes = options.steps, options.rows, max(options.steps // 5, 1)
        return train(
            name,
            f"model.path={start_of(options.out)}",
            f"distill.teacher={options.out / 'teacher'}",
            f"sft.data={options.out / 'rows.jsonl' if kind == 'sft' else ''}",
            "run.seed=1",  # other tasks than those of the teacher's rows
            *settings_of(kind, rate, *sizes),
        )

    teacher = (
        f"model.path={options.model}", *GRPO, f"rollout.tasks={options.rows // 8}", "rollout.samples=8",
        "train.lr=1e-4", "train.schedule=constant", "run.eval_every=8", "run.save_every=8", "run.keep_last=9",
    )  # fmt: skip
    student = (
        f"model.path={options.out / 'shallow'}", *GRPO, "sft.steps=300", "sft.lr=3e-4", "sft.warmup=20",
        "sft.eval_every=100", "train.steps=0",
    )  # fmt: skip
    shallow = [
        sys.executable,
        "-m",
        "benchmarks.shallow",
        options.model,
        str(options.out / "shallow"),
    ]
    count = str(options.steps * options.rows * 21 // 20)  # some are wrong, and left out
    sample = ("--n", count, "--samples", "1", "--out", str(options.out / "rows.jsonl"))
    rows = [*GRAFT, "data", "sample", str(options.out / "teacher"), "calculator", *sample]
    until, names = (
        options.seconds * 0.45,
        [f"{k}-{r}" for r in options.rates for k in options.methods],
    )
    needs = {name: ("student", "rows" if name.startswith("sft") else "teacher") for name in names}
    return [
        Job("teacher", partial(train, "teacher", *teacher), until=until),
        Job("shallow", lambda: [*shallow, "--layers", str(options.layers)]),
        Job("student", partial(train, "student", *student), ("shallow",), until),
        Job("rows", lambda: rows, ("teacher",)),
        *(Job(name, partial(method, name), needs[name]) for name in names),
    ]


def start_of(out: Path) -> Path:
    """What all methods continue from."""
    scores = [sampled for *_, sampled, _ in evaluations(out / "student")]
    if scores and scores[-1] >= LEAST:
        return out / "student"
    return max((out / "teacher" / "checkpoints").glob("sft-*"))


def evaluations(folder: Path) -> Iterator[tuple[str, int, float, float]]:
    """Phase, step, sampled and greedy score, as far as the run has come."""
    file = folder / "metrics.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        row = json.loads(line) if line.endswith("}") else {}
        if "eval/sampled" in row:
            yield row["phase"], row["step"], row["eval/sampled"], row["eval/greedy"]


class Report:
    """Prints each evaluation once."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders, self.seen = folders, set[tuple[str, str, int]]()

    def __call__(self, now: float) -> None:
        for folder in self.folders:
            for phase, step, sampled, greedy in evaluations(folder):
                if (key := (folder.name, phase, step)) not in self.seen:
                    self.seen.add(key)
                    print(
                        f"{now:4.0f} s  {folder.name}, {phase} step {step}: sampled {sampled:.3f}, "
                        f"greedy {greedy:.3f}",
                        flush=True,
                    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--layers", type=int, default=15, help="of the student")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS),
                        help=f"of sft, {', '.join(RL)}")  # fmt: skip
    parser.add_argument("--rates", type=lambda text: text.split(","), default=list(RATES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=512, help="attempts in a step")
    parser.add_argument("--tasks", type=int, default=256, help="held-out tasks")
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=36_000)
    parser.add_argument("--out", type=Path, default=Path("runs/distill-smollm2"))
    options = parser.parse_intermixed_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    threads = (os.cpu_count() or 1) // min(options.jobs, len(options.methods) * len(options.rates))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(threads, 1)))
    jobs = jobs_of(options)
    report = Report([options.out / job.name for job in jobs])
    run_jobs(jobs, options.out, options.seconds, options.jobs, report)
    runs = [job.name for job in jobs if "-" in job.name]
    curves = [read_curve(options.out / name, name, 1, is_whole=False) for name in runs]
    text = table([curve for curve in curves if curve is not None and curve.tokens])
    (options.out / "compare.md").write_text(text + "\n", encoding="utf-8")
    print(f"\nfrom {start_of(options.out)}\n{text}")


if __name__ == "__main__":
    main()

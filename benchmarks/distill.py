"""SFT, GKD, on-policy distillation and GRPO at equal tokens, from one student that SFT has begun.

    graft train quickstart                                     # the teacher
    graft data sample runs/quickstart calculator --n 2500 --samples 2 --out runs/teacher-rows.jsonl
    python -m benchmarks.distill start                         # the student that all methods continue from
    python -m benchmarks.distill compare run.seed=1            # every method at every learning rate
    python -m benchmarks.distill compare run.seed=1 --methods reverse-1e-3,opd-2e-4

All have the same grid of learning rates, rows per step, number of steps and schedule: a linear decay to a
tenth. A learning rate that stays as it is keeps the student away from what the decay of SFT has reached. The
rows are of tasks of seed 0, so that run.seed=1 attempts others. Every run is `graft train` in a process of
its own; finished ones are not run again. Prints a Markdown table: held-out score after each part of the
tokens, mean over seeds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from benchmarks.methods import Suite, commands, folders_of, read_options, run_all

RATES = ("2e-4", "1e-3", "3e-3")
STEPS, ROWS = 48, 128
_SAMPLED = "distill.divergence=null"
GRPO = ("algo.name=grpo", "algo.reduction=token", "distill.teacher=", _SAMPLED)
RL = {
    "gkd": ("distill.divergence={js: {beta: 0.5}}",),
    "reverse": ("distill.divergence=reverse",),
    "opd": ("algo.name=opd", _SAMPLED),
    "opd_16x8": ("algo.name=opd", _SAMPLED),
    "grpo": GRPO,
}
"""All but GRPO need no groups: as many tasks as rows, or an eighth with 8 attempts each."""
_SHARED = ("model.shape={}", "run.eval_tasks=300", "run.trackers=[]", "run.log_episodes=0")


def settings_of(method: str, rate: str, steps: int, rows: int, every: int) -> tuple[str, ...]:
    """A method's overrides: `steps` of `rows` rows each, held-out tasks after `every` of them."""
    plan = ("schedule=linear", "min_lr=0.1", "warmup=5", f"steps={steps}", f"lr={rate}")
    if method == "sft":
        own = (*plan, f"eval_every={every}", f"batch={rows}")
        return (*(f"sft.{one}" for one in own), "train.steps=0")
    samples = 8 if method in ("grpo", "opd_16x8") else 1
    size = (f"rollout.tasks={rows // samples}", f"rollout.samples={samples}")
    own = (*RL[method], *size, *(f"train.{one}" for one in plan))
    return (*own, f"run.eval_every={every}", "sft.steps=0")


METHODS = {
    f"{method}-{rate}": settings_of(method, rate, STEPS, ROWS, STEPS // 3)
    for method in ("sft", *RL)
    for rate in RATES
}
SUITES = {
    "start": Suite(
        ("sft",), ("train.steps=0", "sft.eval_every=100", "run.eval_tasks=300"), recipe="toy"
    ),
    "compare": Suite(
        tuple(METHODS),
        _SHARED,
        METHODS,
        recipe="toy",
        after="start",
        after_method=dict.fromkeys(METHODS, "sft"),
    ),
}


class Curve(NamedTuple):
    method: str
    seed: int
    tokens: list[float]
    """Trained tokens before each evaluation."""
    sampled: list[float]
    greedy: list[float]
    distance: tuple[float, float] | None
    """From the teacher in the first and the last five steps: KL of opd, divergence of gkd."""


def read_curve(folder: Path, method: str, seed: int, is_whole: bool = True) -> Curve | None:
    """None of a run that has not come to its end, or unless `is_whole` has not begun."""
    if not (folder / ("summary.json" if is_whole else "metrics.jsonl")).exists():
        return None
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    tokens, total = list[float](), 0.0
    scored = list[dict[str, float]]()
    for row in rows:
        total += row["num_trained_tokens"]
        if "eval/sampled" in row:
            tokens.append(total)
            scored.append(row)
    names = ("distill/divergence", "distill/kl")
    seen = [row[name] for row in rows for name in names if name in row]
    distance = (mean(seen[:5]), mean(seen[-5:])) if seen else None
    sampled, greedy = ([row[f"eval/{name}"] for row in scored] for name in ("sampled", "greedy"))
    return Curve(method, seed, tokens, list(sampled), list(greedy), distance)


def table(curves: list[Curve]) -> str:
    """Markdown: a line per method and learning rate."""
    titles = (
        "method",
        "learning rate",
        "seeds",
        "trained tokens",
        "sampled",
        "greedy at the end",
        "distance",
    )
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for method in dict.fromkeys(curve.method for curve in curves):
        mine = [curve for curve in curves if curve.method == method]
        name, _, rate = method.partition("-")
        ways = [curve.distance for curve in mine if curve.distance is not None]
        cells = (
            f"`{name}`",
            rate,
            str(len(mine)),
            f"{mean(curve.tokens[-1] for curve in mine):,.0f}",
            ", ".join(_spread(values) for values in zip(*(c.sampled for c in mine), strict=True)),
            _spread([curve.greedy[-1] for curve in mine]),
            ", ".join(f"{mean(part):.4f}" for part in zip(*ways, strict=True)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: list[float] | tuple[float, ...]) -> str:
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


def main(arguments: list[str] | None = None) -> None:
    options = read_options(__doc__ or "", SUITES, "runs/distill", arguments)
    suite = SUITES[options.suite]
    todo = commands("distill", options.suite, suite, options)
    run_all(todo, options.jobs, options.limit)
    runs = folders_of(todo, options.suite).items()
    curves = [curve for folder, of in runs if (curve := read_curve(folder, *of)) is not None]
    curves = [curve for curve in curves if curve.tokens]
    if not curves:
        sys.exit("nothing to compare: no run has an evaluation on its way; see the logs")
    curves.sort(key=lambda curve: (suite.methods.index(curve.method), curve.seed))
    text = table(curves)
    (options.out / f"{options.suite}.md").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}")


if __name__ == "__main__":
    main()

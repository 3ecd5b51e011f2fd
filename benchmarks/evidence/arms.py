"""One run of one arm with one seed, from warm-up to score; a row of results.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import graft
from benchmarks.evidence.budget import BudgetSpent, count_tokens, limited, read_steps
from benchmarks.evidence.claim import Arm, Claim
from benchmarks.record import current_commit, describe_machine, slug

MAX_STEPS = 1_000_000
"""Never reached: the budget is in tokens, and learning rates are constant."""
GAP = "sampling/sampling_logp_difference/max"
PARTS = 8
QUIET = ("run.eval_tasks=0", "run.eval_every=0", "run.log_episodes=0", "run.save_every=0")

Row = dict[str, Any]


def run_arm(claim: Claim, arm: Arm, seed: int, folder: Path, deadline: float) -> Row:
    """Train and score; raises TimeIsUp at the deadline, after which the same call continues."""
    tracked = (*QUIET, f"run.dir={folder}", f"run.seed={seed}", f"run.trackers=[{_TRACKER}]")
    form = "-".join(("warm-up", *arm.form))
    warm = folder / slug(f"{claim.name}-{form}-seed{seed}")
    with limited(0, deadline):
        if not (warm / "summary.json").exists():
            settings = (
                *tracked,
                f"run.name={warm.name}",
                *claim.settings,
                *claim.warm_up,
                *arm.form,
            )
            graft.sft(claim.recipe, *settings, progress=False)
    run = folder / slug(f"{claim.name}-{arm.name}-seed{seed}")
    settings = (
        *(*tracked, f"run.name={run.name}", f"train.steps={MAX_STEPS}", "train.schedule=constant"),
        *("model.shape={}", "model.alphabet=", f"model.path={warm}", "sft.steps=0"),
        *(*claim.settings, *claim.rl, *arm.form, *arm.settings),
    )
    if count_tokens(read_steps(run)) < claim.tokens:
        try:
            with limited(claim.tokens, deadline):
                graft.train(claim.recipe, *settings, progress=False)
        except BudgetSpent:
            pass
    scores = graft.evaluate(
        str(run), tasks=claim.tasks, reward=claim.reward or None, progress=False
    )
    [measured] = scores.values()
    return row_of(claim, arm, seed, read_steps(run), next(iter(measured.values())).value)


_TRACKER = "benchmarks.evidence.budget:Budget"


def row_of(claim: Claim, arm: Arm, seed: int, steps: list[Row], score: float) -> Row:
    """What results.jsonl keeps of a finished run."""
    parts = [steps[len(steps) * i // PARTS : len(steps) * (i + 1) // PARTS] for i in range(PARTS)]
    return {
        "claim": claim.name,
        "arm": arm.name,
        "seed": seed,
        "score": round(score, 4),
        "tasks": claim.tasks,
        "tokens": count_tokens(steps),
        "steps": len(steps),
        "curve": [round(mean(step["reward"] for step in part), 4) for part in parts if part],
        "turns": round(mean(step["rollout/turns"] for step in parts[-1]), 3),
        "entropy": round(mean(step["entropy"] for step in parts[-1]), 4),
        "calls": round(sum(step["tools/calls_made"] for step in steps)),
        "columns": {
            name: round(mean(step[metric] for step in parts[-1]), 4)
            for name, metric in claim.columns
        },
        "gap": max(step[GAP] for step in steps),
        "seconds": round(sum(step["step_time"] for step in steps), 1),
        "commit": current_commit(),
        "machine": describe_machine(),
        "command": command_of(claim, arm, seed),
    }


def command_of(claim: Claim, arm: Arm, seed: int) -> str:
    return (
        f"python -m benchmarks.evidence {claim.name} --arms {json.dumps(arm.name)} --seeds {seed}"
    )

"""The figures of Gemma 3 270M in docs/models.md, from the folder of a finished run.

graft train gemma
python -m benchmarks.evidence.gemma runs/gemma --record      # without --record they are only printed
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.evidence.exactness import GAP
from benchmarks.quickstart import SCORES
from benchmarks.record import Figure, record


def figures(summary: dict[str, Any], steps: list[dict[str, Any]]) -> list[Figure]:
    """Scores before and after RL, the seconds of each phase, and the largest gap of all trained tokens."""
    scores = [
        Figure(f"gemma.{key}.{when}", f"{what} {when} RL", summary[when][key])
        for key, what in SCORES.items()
        for when in ("before", "after")
    ]
    seconds = [
        Figure(f"gemma.{phase}", f"seconds of {phase}", round(value), "s")
        for phase, value in summary["seconds_per_phase"].items()
    ]
    steps = [step for step in steps if step["phase"] == "rl"]
    tokens = sum(int(step["num_trained_tokens"]) for step in steps)
    return [
        *scores,
        *seconds,
        Figure("gemma.tasks", "held-out tasks", summary["standard_error"]["tasks"]),
        Figure("gemma.tokens", "tokens sampled and trained in RL", tokens),
        Figure("gemma.gap", "largest gap of their log-probs", max(s[f"{GAP}/max"] for s in steps)),
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--record", action="store_true", help="keep them in docs/numbers.json")
    asked = parser.parse_args(arguments)
    summary = json.loads((asked.run / "summary.json").read_text(encoding="utf-8"))
    lines = (asked.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = figures(summary, [json.loads(line) for line in lines])
    for row in rows:
        print(f"{row.what}: {row.value} {row.unit}")
    if asked.record:
        about, versions = summary["machine"], summary["versions"]
        threads = f"{about['threads']} thread{'s' * (about['threads'] > 1)}"
        record(
            rows,
            machine=f"{threads} on a busy {about['architecture']} host, torch {versions['torch']}",
            command="graft train gemma",
        )


if __name__ == "__main__":
    main()

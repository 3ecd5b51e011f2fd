"""The figures of the quickstart, from the folder of a finished run.

graft train quickstart run.seed=1 run.name=seed1
python -m benchmarks.quickstart runs/seed1 --record      # without --record they are only printed
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from benchmarks.record import Figure, record

SCORES = {
    "sampled": "sampled accuracy",
    "greedy": "greedy accuracy",
    "tool_rate": "attempts that use the tool",
}


def figures(name: str, summary: dict[str, Any]) -> list[Figure]:
    """Scores before and after RL, and the seconds of each phase."""
    scores = [
        Figure(f"quickstart.{name}.{key}.{when}", f"{name}: {what} {when} RL", summary[when][key])
        for key, what in SCORES.items()
        for when in ("before", "after")
    ]
    phases = summary["seconds_per_phase"].items()
    return scores + [
        Figure(f"quickstart.{name}.{phase}", f"{name}: seconds of {phase}", round(seconds), "s")
        for phase, seconds in phases
    ]


def command_of(config: dict[str, Any]) -> str:
    """What started such a run of the quickstart."""
    run, credit = config["run"], config["algo"]["credit"]
    command = f"graft train quickstart run.seed={run['seed']} run.name={run['name']}"
    return f"{command} 'algo.credit={json.dumps(credit)}'" if credit else command


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "run", type=Path, help="seed0, seed1, seed2, control: the name in the pages"
    )
    parser.add_argument("--record", action="store_true", help="keep them in docs/numbers.json")
    asked = parser.parse_args(arguments)
    summary = json.loads((asked.run / "summary.json").read_text(encoding="utf-8"))
    rows = figures(asked.run.name, summary)
    for row in rows:
        print(f"{row.what}: {row.value} {row.unit}")
    if asked.record:
        about, versions = summary["machine"], summary["versions"]
        cores = f"{about['threads']} threads on {about['device']} ({about['architecture']})"
        record(
            rows,
            machine=f"{cores}, torch {versions['torch']}, Python {versions['python']}",
            command=command_of(yaml.safe_load((asked.run / "config.yaml").read_text("utf-8"))),
        )


if __name__ == "__main__":
    main()

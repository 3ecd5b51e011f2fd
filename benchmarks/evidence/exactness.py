"""Does it matter that engine and learner have the same bits?

    python -m benchmarks.evidence.exactness --seeds 0 1 2 --staleness 0 4 --at-once 3

The same runs with `model.exact` on and off, and with rollouts some steps ahead of the learner. A run that
results.jsonl already has is left out, so the command can be repeated until it is done. What would refute the
use of exactness in this regime: the same scores, curves and spread between seeds without it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

RESULTS = Path(__file__).with_name("results.jsonl")
GAP = "sampling/sampling_logp_difference"
TIMEOUT = 600


def read_results() -> list[dict[str, Any]]:
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def run(case: dict[str, Any], recipe: str, more: list[str]) -> dict[str, Any]:
    """Scores before and after, the curve in ten parts, and the gap of one run."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            *(f"run.dir={folder}", "run.name=run", "run.trackers=[]", f"run.seed={case['seed']}"),
            *(
                f"model.exact={str(case['exact']).lower()}",
                f"rollout.staleness={case['staleness']}",
            ),
        ]
        command = [sys.executable, "-m", "graft", "train", recipe, *settings, *more]
        subprocess.run(command, check=True, timeout=TIMEOUT, stdout=subprocess.DEVNULL)
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text(encoding="utf-8"))
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [line for line in map(json.loads, lines) if line["phase"] == "rl"]
    parts = [steps[len(steps) * i // 10 : len(steps) * (i + 1) // 10] for i in range(10)]
    return {
        **case,
        "before": summary["before"],
        "after": summary["after"],
        "curve": [round(mean(step["reward"] for step in part), 4) for part in parts if part],
        "gap_mean": mean(step[f"{GAP}/mean"] for step in steps),
        "gap_max": max(step[f"{GAP}/max"] for step in steps),
        "seconds": summary["seconds"],
        "machine": summary["machine"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--at-once", type=int, default=1, help="runs that share the machine")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_args()
    cases = [
        {"claim": 9, "recipe": asked.recipe, "overrides": asked.overrides, "seed": seed,
         "exact": exact, "staleness": staleness}
        for staleness, seed, exact in product(asked.staleness, asked.seeds, (True, False))
    ]  # fmt: skip
    done = [{key: result.get(key) for key in cases[0]} for result in read_results()]
    left = [case for case in cases if case not in done]
    print(f"{len(cases) - len(left)} of {len(cases)} runs are done", flush=True)
    with ThreadPoolExecutor(asked.at_once) as pool:
        for result in pool.map(lambda case: run(case, asked.recipe, asked.overrides), left):
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            shown = {
                key: result[key] for key in ("seed", "exact", "staleness", "after", "gap_mean")
            }
            print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()

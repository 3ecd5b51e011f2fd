"""Measures claims, arm by arm and seed by seed, and appends each finished run to results.jsonl.

    python -m benchmarks.evidence --list
    python -m benchmarks.evidence turns --seeds 0 1 2 --minutes 20
    python -m benchmarks.evidence turns --tokens 100000 --out mine.jsonl     # a larger budget, kept apart
    python -m benchmarks.evidence.page                                      # then docs/evidence.md

A run that the file already has is left out, and one that was stopped continues from its checkpoint, so the
command can be repeated until nothing is left to do.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.evidence.arms import Row, run_arm
from benchmarks.evidence.budget import TimeIsUp
from benchmarks.evidence.claim import Arm, Claim
from benchmarks.evidence.claims import CLAIMS
from benchmarks.evidence.page import RESULTS


def read_rows(file: Path) -> list[Row]:
    """The rows of runs of arms; older benchmarks keep rows of other forms in the same file."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [row for row in map(json.loads, lines) if "arm" in row]


def missing_runs(claim: Claim, seeds: list[int], rows: list[Row]) -> list[tuple[Arm, int]]:
    """The runs that the file does not have, a whole seed of all arms first."""
    done = {(row["claim"], row["arm"], row["seed"]) for row in rows}
    pairs = [(arm, seed) for seed in seeds for arm in claim.arms]
    return [pair for pair in pairs if (claim.name, pair[0].name, pair[1]) not in done]


def measure(claim: Claim, seeds: list[int], folder: Path, out: Path, deadline: float) -> bool:
    """Make the missing runs one after another; whether all are done."""
    for arm, seed in missing_runs(claim, seeds, read_rows(out)):
        if time.monotonic() > deadline:
            return False
        try:
            row = run_arm(claim, arm, seed, folder, deadline)
        except TimeIsUp:
            return False
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{claim.name}, {arm.name}, seed {seed}: {row['score']:.3f}", flush=True)
    return True


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help=", ".join(CLAIMS))
    parser.add_argument("--list", action="store_true", help="claims, arms and budgets")
    parser.add_argument("--arms", nargs="+", help="only these; all by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--tokens", type=int, help="sampled tokens of each run, in place of the claim's"
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="stop in time; default 20")
    parser.add_argument("--folder", type=Path, default=Path("runs/evidence"), help="of the runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    if asked.list:
        for claim in CLAIMS.values():
            print(f"{claim.name}: {claim.title} ({claim.tokens:,} tokens a run)")
            print(
                *(f"  {arm.name}: {' '.join((*arm.form, *arm.settings))}" for arm in claim.arms),
                sep="\n",
            )
        return
    if unknown := [name for name in asked.claims if name not in CLAIMS]:
        parser.error(f"no claim {unknown[0]!r}; there is {', '.join(CLAIMS)}")
    deadline = time.monotonic() + 60 * asked.minutes
    for name in asked.claims or CLAIMS:
        claim = CLAIMS[name]
        if asked.arms:
            arms = tuple(arm for arm in claim.arms if arm.name in asked.arms)
            if len(arms) < len(asked.arms):
                parser.error(f"{name} has the arms {', '.join(arm.name for arm in claim.arms)}")
            claim = replace(claim, arms=arms)
        if asked.tokens:
            if asked.out == RESULTS:
                parser.error("--tokens is another budget than that of the page: name a file, --out")
            claim = replace(claim, tokens=asked.tokens)
        if not measure(claim, asked.seeds, asked.folder, asked.out, deadline):
            print("the time is over; the same command continues")
            return


if __name__ == "__main__":
    main()

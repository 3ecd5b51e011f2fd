"""`python -m trust`: run the banks, print the table, name every failure."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from trust.bank import HEAD, Row

BANKS = [
    "programs", "outputs", "cheats", "deaths", "kills", "files", "written", "secrets", "self_reward",
    "one_attempt", "bodies", "daemons", "soak",
]  # fmt: skip
SHOWN = 20  # failures named per row; --out has all of them


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trust", description=__doc__)
    parser.add_argument("banks", nargs="*", help=f"of {', '.join(BANKS)} (default: all)")
    parser.add_argument("--full", action="store_true", help="the counts of docs/security.md")
    parser.add_argument("--count", type=int, help="attempts per bank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    asked = parser.parse_args()
    if unknown := [name for name in asked.banks if name not in BANKS]:
        parser.error(f"no bank named {', '.join(unknown)}; there are {', '.join(BANKS)}")
    if asked.count is not None and asked.count < 1:
        parser.error(f"--count {asked.count}: at least one attempt")

    rows: list[Row] = []
    print(HEAD, flush=True)
    for name in asked.banks or BANKS:
        bank = importlib.import_module(f"trust.{name}")
        count = asked.count or (bank.FULL if asked.full else bank.SMALL)
        started = time.monotonic()
        for row in bank.run(count, asked.seed):
            row.seconds, started = time.monotonic() - started, time.monotonic()
            rows.append(row)
            print(row.line(), flush=True)
            if asked.out:  # after each row: a long run that is stopped keeps what it measured
                asked.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    for row in rows:
        for failure in row.failures[:SHOWN]:
            print(f"failed: {row.bank} ({row.group}): {failure}")
    return int(any(not row.ok for row in rows))


if __name__ == "__main__":
    sys.exit(main())

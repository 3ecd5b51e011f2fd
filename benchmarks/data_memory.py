"""How much memory it takes to read a file that is larger than one would like to hold.

    python -m benchmarks.data_memory --gigabytes 2 --row-bytes 1000 [--record]

Writes a jsonl of chats into a temporary folder and reads it in three processes, each of which prints
its peak of resident memory: `graft data show`, all rows in order, and chats opened and drawn in a
shuffled order. The folder is removed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.record import Figure, record, slug

SHOW = "from graft.data.show import inspect; inspect(path)"
ROWS = """
from graft.data.rows import read_rows
for row in read_rows(path): pass
"""
CHATS = """
import random
from graft.data.chats import open_chats
chats = open_chats(path)
for number in random.Random(0).sample(range(len(chats)), min(10_000, len(chats))): chats[number]
"""
WAYS = {"graft data show": SHOW, "read_rows": ROWS, "open_chats, 10,000 drawn": CHATS}
PEAK = """
import resource, sys
path = sys.argv[1]
{code}
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1 if sys.platform == "linux" else 1024))
"""


def write_chats(file: Path, size: int, row_bytes: int) -> int:
    """Rows with ids and prompts that all differ; how many there are."""
    rows = written = 0
    filler = "the quick brown fox jumps over the lazy dog " * (row_bytes // 44 + 1)
    with file.open("w", encoding="utf-8") as out:
        while written < size:
            question, answer = f"What comes after {rows}?", f"{rows + 1}. {filler}"
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": ""}]
            room = max(1, row_bytes - len(json.dumps({"id": rows, "messages": messages})) - 1)
            messages[1]["content"] = answer[:room]
            written += out.write(json.dumps({"id": rows, "messages": messages}) + "\n")
            rows += 1
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--row-bytes", type=int, default=1000)
    parser.add_argument("--record", action="store_true", help="keep them in docs/numbers.json")
    args = parser.parse_args()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "chats.jsonl"
        rows = write_chats(file, int(args.gigabytes * 1e9), args.row_bytes)
        print(f"{file.stat().st_size / 1e9:.2f} GB, {rows:,} rows")
        for name, code in WAYS.items():
            started = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", PEAK.format(code=code), str(file)],
                check=True,
                capture_output=True,
                text=True,
            )
            seconds, peak = time.perf_counter() - started, int(done.stdout.split()[-1]) / 1e3
            print(f"{name:<26} peak {peak:6,.0f} MB {seconds:7.1f} s", flush=True)
            figures.append(
                Figure(f"data-memory.{slug(name)}", name, peak, "MB", note=f"{seconds:.0f} s")
            )
    if args.record:
        record(figures)


if __name__ == "__main__":
    main()

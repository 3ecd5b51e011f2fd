"""The warm-up of the quickstart on this device: `graft train quickstart` in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.report import Row

MUST, AIM = 15.0, 8.0
TIMEOUT = 300


def warm_up(bench: Bench, name: str) -> list[Row]:
    """Seconds of the phase: demonstrations, steps, checks and checkpoints."""
    few = ["sft.steps=2", "sft.batch=4"] if name == "tiny" else []
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"run.dir={folder}", "run.trackers=[]", "run.eval_tasks=8", "train.steps=0"]
        command = [sys.executable, "-m", "graft", "train", "quickstart", *settings, *few]
        subprocess.run(
            [*command, f"model.device={bench.device.type}"],
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=TIMEOUT,
        )
        run = Path(folder) / "quickstart"
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        logged = [json.loads(line) for line in (run / "metrics.jsonl").open(encoding="utf-8")]
    times = [row["step_time"] for row in logged if row["phase"] == "sft"]
    learning = f"learning {sum(times):.1f} s, the first step {times[0]:.1f} s"
    note = f"{len(times)} steps: {learning}; the process {summary['seconds']:.1f} s"
    seconds = summary["seconds_per_phase"]["sft"]
    how = {"is_less_better": True, "note": note}
    return [Row("warm-up of the quickstart", "s", seconds, MUST, AIM, **how)]

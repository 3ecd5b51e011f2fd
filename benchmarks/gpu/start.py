"""From nothing to the first token: a fresh process imports, builds the model and samples once.

python -m benchmarks.gpu.start 0.6B cuda        # one start; prints its phases as JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.report import Row


def start(bench: Bench, name: str) -> list[Row]:
    """Twice, with one folder for compiled kernels: empty the first time, filled the second."""
    rows: list[Row] = []
    is_goal = name == "0.6B"
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch",
        }
        for state, must in (("cold", 60.0), ("warm", 20.0)):
            started = time.time()  # a clock that both processes read
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.gpu.start", name, str(bench.device)],
                env={**os.environ, **caches},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                timeout=180,
            )
            phases: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
            seconds = phases.pop("at") - started
            phases = {"process and imports": seconds - sum(phases.values()), **phases}
            note = ", ".join(f"{phase} {spent:.1f} s" for phase, spent in phases.items())
            title = f"{name} start to first token, {state} kernel cache"
            goals = (must, 8.0) if is_goal else (None, None)
            rows.append(Row(title, "s", seconds, *goals, is_less_better=True, note=note))
    return rows[::-1]  # the warm one is the goal people meet every day


def main(name: str, device: str) -> None:
    import asyncio

    import torch

    from benchmarks.gpu.works import anchor_of
    from benchmarks.shapes import SHAPES, random_decoder
    from graft.engine.native.engine import NativeEngine
    from graft.models.device_choice import choose_dtype
    from graft.types import Sampling

    phases: dict[str, float] = {}
    began = time.time()

    def phase(title: str) -> None:
        nonlocal began
        phases[title] = time.time() - began
        began = time.time()

    where = torch.device(device)
    decoder = random_decoder(SHAPES[name], where, choose_dtype("auto", where)[0])
    phase("model")
    engine = NativeEngine(decoder, kv_tokens=anchor_of(name).kv_tokens)
    phase("engine")
    context = engine.open(range(16))
    asyncio.run(context.sample(Sampling(max_tokens=1, min_tokens=1)))
    phase("first token")
    print(json.dumps({**phases, "at": began}))


if __name__ == "__main__":
    main(*sys.argv[1:])

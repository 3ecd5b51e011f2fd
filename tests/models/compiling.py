"""Runs the scripts beside it that compile kernels for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_compiler(script: str, cache: Path, *args: str) -> str:
    """What the script prints. A process of its own, without Triton's interpreter."""
    here = Path(__file__).parent
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, (str(here.parents[1]), kept.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, str(here / script), *args],
        env={**kept, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

"""`graft ...` and `python -m graft ...`: a word before the libraries load, and Ctrl-C while they do."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

LOADS_A_MODEL = (
    "train",
    "sft",
    "eval",
    "rollout",
    "generate",
    "replay",
    "export",
    "plan",
    "doctor",
)
"""Commands that import torch: seconds on a quiet machine, a quarter of a minute on a busy one."""


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    command, *words = [*sys.argv[1:], ""]
    if command in LOADS_A_MODEL and "--help" not in words and os.environ.get("RANK", "0") == "0":
        print(f"graft {command}: loading libraries", file=sys.stderr, flush=True)
    from graft.cli import main as run

    run()


def _interrupt(number: int, frame: Any) -> None:
    """Raise KeyboardInterrupt; while a module is being imported, leave at once instead.

    numpy and torch swallow the exception when it comes in the middle of their import, and the program
    would go on with half of a library.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"graft: interrupted while libraries were loading\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()

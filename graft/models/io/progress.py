"""The progress of a load that takes more than two seconds, on stderr.

    loading 'models/qwen' 4.1 of 61.1 GB, 3.8 GB/s

A terminal's line is rewritten and removed at the end; a log gets a line every ten seconds.
"""

from __future__ import annotations

import sys
import time

import torch.distributed as dist

QUIET_SECONDS = 2.0
SECONDS_BETWEEN_DRAWS = 0.1
SECONDS_BETWEEN_LINES = 10.0


class LoadProgress:
    """Bytes of a model that were read, drawn at each `advance`; of several processes the first draws."""

    def __init__(self, origin: str, total: int) -> None:
        self.origin, self.total, self.done = origin, total, 0
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0
        self.is_terminal = sys.stderr.isatty()
        self.started = time.monotonic()
        self.next_draw = self.started + QUIET_SECONDS
        self.is_drawn = False

    def advance(self, num_bytes: int) -> None:
        self.done += num_bytes
        now = time.monotonic()
        if not self.is_first or now < self.next_draw:
            return
        text, self.is_drawn = self.describe(now), True
        if self.is_terminal:
            self.next_draw = now + SECONDS_BETWEEN_DRAWS
            print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
        else:
            self.next_draw = now + SECONDS_BETWEEN_LINES
            print(text, file=sys.stderr, flush=True)

    def describe(self, now: float) -> str:
        rate = self.done / max(now - self.started, 1e-9)
        sizes = f"{self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB"
        return f"loading {self.origin} {sizes}, {rate / 1e9:.1f} GB/s"

    def close(self) -> None:
        if self.is_drawn and self.is_terminal:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)

"""When the next request may start: one rate for all threads, and the server's Retry-After.

rate=4                  starts at 0.00, 0.25, 0.50, ... s, over all threads
Retry-After: 2          no request starts in the next 2 s
"""

from __future__ import annotations

import math
import threading
import time


class RateLimit:
    """Starts are at least 1/rate seconds apart; None: no limit."""

    def __init__(self, rate: float | None = None) -> None:
        if rate is not None and not (rate > 0 and math.isfinite(rate)):
            raise ValueError(
                f"judge: rate={rate}; give the requests per second, above 0, or None for no limit"
            )
        self.gap = 1 / rate if rate else 0.0
        self._free = 0.0  # when the next start is allowed
        self._taking = threading.Lock()

    def wait(self, end: float) -> bool:
        """Reserve the next start and wait for it; False at once if it is after `end`."""
        with self._taking:
            start = max(self._free, time.monotonic())
            if start > end:
                return False
            self._free = start + self.gap
        if (left := start - time.monotonic()) > 0:
            time.sleep(left)
        return True

    def hold(self, seconds: float) -> None:
        """Let no thread start a request for this time."""
        with self._taking:
            self._free = max(self._free, time.monotonic() + seconds)

"""When the next request may start: one rate for all threads, and the server's Retry-After.

rate=4                  starts at 0.00, 0.25, 0.50, ... s, over all threads
Retry-After: 2          no request starts in the next 2 s
"""

from __future__ import annotations

import math
import threading
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime


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


def read_retry_after(text: str | None) -> float:
    """The seconds of a Retry-After header, which is a number or a date; 0 for any other text.

    >>> read_retry_after("2"), read_retry_after("soon"), read_retry_after(None)
    (2.0, 0.0, 0.0)
    """
    if not text:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        try:
            date = parsedate_to_datetime(text)
        except ValueError:
            return 0.0
        known = date if date.tzinfo else date.replace(tzinfo=UTC)
        seconds = (known - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0

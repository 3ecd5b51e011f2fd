"""The bench: where to measure, for how long, and the clock."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Bench:
    device: torch.device
    dtype: torch.dtype
    rounds: int
    seconds: float
    """After so long no round begins, but for a second one unless the first took twice as long."""
    tokens_per_micro: int
    roofs: dict[str, float] = field(default_factory=dict[str, float])

    def wait(self) -> None:
        """Until the device has finished all work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def time(self, work: Callable[[], object]) -> float:
        """Seconds from an idle device to an idle device."""
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started

    def repeat(self, once: Callable[[], float]) -> list[float]:
        """What the rounds measured; fewer of them where one is long."""
        values: list[float] = []
        started = time.perf_counter()
        while len(values) < self.rounds:
            values.append(once())
            spent = time.perf_counter() - started
            if spent > self.seconds and (len(values) > 1 or spent > 2 * self.seconds):
                break
        return values

    def free(self) -> None:
        """Give memory back between jobs: the next one's peak is its own."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0

    @property
    def memory_bytes(self) -> float:
        """All of the device's; infinite where there is no limit."""
        if self.device.type != "cuda":
            return float("inf")
        return torch.cuda.get_device_properties(self.device).total_memory

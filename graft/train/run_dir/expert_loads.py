"""The load of every expert in the last steps of a run, for a picture: one small file, written again.

    {"phase": "rl", "first": 11, "last": 20, "layers": [0, 1], "loads": [[1.2, 0.8, ...], [...]]}

Loads are multiples of the even share, means over the steps from `first` to `last`. In the metrics of each
step they would be thousands of numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graft.files import write_text

if TYPE_CHECKING:
    from torch import Tensor

FILE = "experts.json"
"""In a run's folder."""
EVERY = 10
"""Steps between two files, which the mean is over."""


class ExpertLoads:
    """Adds up the loads of steps until they are written."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._about: dict[str, Any] = {}
        self._total: Tensor | None = None

    def add(self, phase: str, step: int, layers: list[int], loads_LE: Tensor) -> None:
        """Count a step; the first one and every EVERY-th are written."""
        if self._total is not None and self._about["phase"] != phase:
            self.write()
        is_first = not self._about
        if self._total is None:
            self._about = {"phase": phase, "first": step, "layers": layers}
            self._total = loads_LE * 0.0
        self._total = self._total + loads_LE
        self._about["last"] = step
        if is_first or step % EVERY == 0:
            self.write()

    def write(self) -> None:
        """Write the mean of the steps since the last file, if there are any."""
        if self._total is None:
            return
        mean = self._total / (self._about["last"] - self._about["first"] + 1)
        rounded = [[round(load, 3) for load in row] for row in mean.tolist()]
        write_text(self.path, json.dumps(self._about | {"loads": rounded}))
        self._total = None

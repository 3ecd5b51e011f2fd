"""The wanted number of workers, which `graft scale RUN N` changes while a run trains."""

from __future__ import annotations

import json
from pathlib import Path

SCALE = "workers.json"
"""The file, in the run's folder: {"workers": 4}"""


class ScaleFile:
    """Reads the file of a run; each content counts once."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / SCALE
        self._text = ""

    def changed(self) -> int | None:
        """The wanted number since the last call; 0: the file holds none; None: nothing has changed."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except OSError:  # `graft scale` was not called
            return None
        if text == self._text:
            return None
        self._text = text
        try:
            return max(int(json.loads(text)["workers"]), 0)
        except (ValueError, KeyError, TypeError):
            return 0

"""One line that is rewritten while something goes on: in a terminal, in a notebook, nowhere else."""

from __future__ import annotations

import sys
import time
from typing import Any

SECONDS_BETWEEN_DRAWS = 0.1


def notebook_shell() -> Any:
    """IPython's shell where it belongs to a notebook kernel; None elsewhere."""
    ipython = sys.modules.get("IPython")  # never imported for this
    shell = None if ipython is None else ipython.get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


def is_watched() -> bool:
    """Whether a person sees what is drawn: a terminal or a notebook."""
    return sys.stderr.isatty() or notebook_shell() is not None


class ProgressLine:
    """`collect 5/16  reward 0.42  0:12`, drawn again at each `advance`.

    show  None: in a terminal or a notebook; True: also elsewhere, as one line at the end; False: never
    """

    def __init__(self, name: str, total: int, unit: str, show: bool | None = None) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done = 0
        self.note = ""
        self._shown = is_watched() if show is None else show
        self._started, self._drawn = time.monotonic(), 0.0
        self._handle: Any = None  # of the notebook's output

    def advance(self, note: str = "") -> None:
        self.done, self.note = self.done + 1, note
        if self._shown and time.monotonic() - self._drawn >= SECONDS_BETWEEN_DRAWS:
            self._draw()

    @property
    def text(self) -> str:
        seconds = int(time.monotonic() - self._started)
        parts = [f"{self.name} {self.done}/{self.total} {self.unit}", self.note]
        return "  ".join([*filter(None, parts), f"{seconds // 60}:{seconds % 60:02d}"])

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if notebook_shell() is not None:
            self._draw_in_notebook({"text/plain": self.text})
        elif sys.stderr.isatty():
            print(f"\r\x1b[2K{self.text}", end="", file=sys.stderr, flush=True)

    def _draw_in_notebook(self, shown: dict[str, str]) -> None:
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def __enter__(self) -> ProgressLine:
        if self._shown:
            self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._shown:
            return
        self._draw()
        if notebook_shell() is None:
            print("" if sys.stderr.isatty() else self.text, file=sys.stderr, flush=True)


def run_display(steps: int, shown: bool) -> Any:
    """The display of a run: a live panel in a terminal; in a notebook a line that is rewritten."""
    from graft.train.monitor.display import Display

    class NotebookDisplay(Display):
        """Steps rewrite one line per phase; remarks are printed."""

        _line: ProgressLine | None = None

        def phase(self, name: str, steps: int) -> None:
            self._line = None
            super().phase(name, steps)
            self._line = ProgressLine(name, steps, "steps", True)

        def _print(self, text: str) -> None:
            if self._line is not None and text.startswith(f"{self._line.name} "):
                self._line._draw_in_notebook({"text/plain": text})
            else:
                super()._print(text)

    kind = NotebookDisplay if notebook_shell() is not None else Display
    return kind(steps, quiet=not shown)

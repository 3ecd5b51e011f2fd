"""A progress line that is rewritten in place, in a terminal or a notebook; elsewhere nothing is drawn."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

SECONDS_BETWEEN_DRAWS = 0.1
SECONDS_BETWEEN_TICKS = 0.5


def notebook_shell() -> Any:
    """IPython's shell where it belongs to a notebook kernel; None elsewhere."""
    ipython = sys.modules.get("IPython")  # never imported for this
    shell = None if ipython is None else ipython.get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


def is_watched() -> bool:
    """Whether a person sees what is drawn: a terminal or a notebook."""
    return sys.stderr.isatty() or notebook_shell() is not None


class ProgressLine:
    """`collect Wordle 5/16 tasks  reward 0.42  0:12`, drawn again at each `advance`.

    In a terminal the line is removed at the end; in a notebook the next one in the same cell takes its
    place: a loop of a hundred collections leaves no hundred lines.

    show  None: in a terminal or a notebook; True: also elsewhere, and the last line stays; False: never
    """

    def __init__(self, name: str, total: int, unit: str, show: bool | None = None) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done = 0
        self.note = ""
        self._shown = is_watched() if show is None else show
        self._started, self._drawn = time.monotonic(), 0.0
        self._stays = bool(show)

    def advance(self, note: str = "") -> None:
        self.done, self.note = self.done + 1, note
        if self._shown and time.monotonic() - self._drawn >= SECONDS_BETWEEN_DRAWS:
            self._draw()

    @asynccontextmanager
    async def ticking(self) -> AsyncIterator[None]:
        """Redraw the line at intervals, so that its clock advances between two tasks.

        The intervals also wake the event loop. A notebook's stop button only takes effect when the loop
        runs, and while it waits for a slow environment it would otherwise sleep.
        """

        async def tick() -> None:
            while True:
                await asyncio.sleep(SECONDS_BETWEEN_TICKS)
                if self._shown:
                    self._draw()

        clock = asyncio.create_task(tick())
        try:
            yield
        finally:
            clock.cancel()

    @property
    def text(self) -> str:
        seconds = int(time.monotonic() - self._started)
        parts = [f"{self.name} {self.done}/{self.total} {self.unit}", self.note]
        return "  ".join([*filter(None, parts), f"{seconds // 60}:{seconds % 60:02d}"])

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if notebook_shell() is not None:
            draw_in_notebook(self.name, self.text)
        elif sys.stderr.isatty():
            print(f"\r\x1b[2K{self.text}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> ProgressLine:
        if self._shown:
            self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._shown:
            return
        self._draw()
        if notebook_shell() is not None:
            return
        if sys.stderr.isatty():
            print("\n" if self._stays else "\r\x1b[2K", end="", file=sys.stderr, flush=True)
        else:
            print(self.text, file=sys.stderr, flush=True)


_handles: dict[str, tuple[int, Any]] = {}
"""By the name of a line: the notebook's cell it was last drawn in, and the output there."""


def draw_in_notebook(name: str, text: str) -> None:
    """Show a line in the running cell, or rewrite the one of this name that it has."""
    from IPython.display import display  # pyright: ignore[reportMissingImports]

    shown, cell = {"text/plain": text}, notebook_shell().execution_count
    if name in _handles and _handles[name][0] == cell:
        _handles[name][1].update(shown, raw=True)
    else:
        _handles[name] = cell, display(shown, raw=True, display_id=True)


def run_display(steps: int, shown: bool) -> Any:
    """The display of a run: a live panel in a terminal; in a notebook a line that is rewritten."""
    from graft.train.monitor.display import Display

    class NotebookDisplay(Display):
        """Steps rewrite one line per phase; remarks are printed."""

        is_step = False

        def update(self, step: int, metrics: Mapping[str, float]) -> None:
            self.is_step = True
            super().update(step, metrics)
            self.is_step = False

        def _print(self, text: str) -> None:
            if self.is_step and not self.console.quiet:
                draw_in_notebook(f"run {self._name}", text)
            else:
                super()._print(text)

    kind = NotebookDisplay if notebook_shell() is not None else Display
    return kind(steps, quiet=not shown)

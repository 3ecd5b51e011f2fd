"""What a person sees while a run goes on: a live panel in a terminal, plain lines elsewhere.

It receives plain dicts and episodes and knows nothing of the loop that sends them.

    with Display(60) as display:
        display.phase("warm-up", 400)
        display.update(1, {"loss": 3.1, "tokens_per_second": 4512})
        ...
        display.phase("rl", 60)
        display.update(12, {"reward": 0.5, "tools/rate": 0.93})

writes, where nobody watches, `rl 12/60  reward 0.500  tools 93%  left 0:48`.
"""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TextIO

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from graft.train.words import clip, clock_face, score, sparkline, summary, visible
from graft.types import Author, Episode

STYLES = {Author.TASK: "dim", Author.POLICY: "green", Author.ENV: "cyan"}


class Display:
    """Progress, tables and transcripts of one run. `quiet` prints nothing at all; `json` leaves
    stdout to the caller's JSON and writes plain lines to stderr."""

    def __init__(
        self,
        total_steps: int,
        quiet: bool = False,
        stream: TextIO | None = None,
        json: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        out: TextIO = stream or (sys.stderr if json else sys.stdout)
        if isinstance(out, io.TextIOWrapper) and "utf" not in out.encoding.lower():
            out.reconfigure(errors="replace")  # a model may write any character
        self.console = Console(file=out, quiet=quiet, highlight=False, soft_wrap=True)
        # rich alone would also animate a pipe, where FORCE_COLOR is set
        watched = out.isatty() and self.console.is_terminal and not self.console.is_dumb_terminal
        self.is_live = watched and not json and not quiet
        self._clock = clock
        self._live: Live | None = None
        self._spinner = Spinner("dots")
        self._begin("train", total_steps)

    def _begin(self, name: str, steps: int) -> None:
        self._name, self._total, self._step = name, steps, 0
        self._metrics: Mapping[str, float] = {}
        self._rewards: list[float] = []
        self._started = self._clock()
        self._first: int | None = None  # a resumed phase does not begin at step 1

    def phase(self, name: str, steps: int) -> None:
        """Close the current phase with a line of its own and start the next, of `steps` steps."""
        self._finish()
        self._begin(name, steps)
        if not self.is_live:
            self._print(f"{name}: {steps} steps")

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step `step` (the first is 1) is done, and these are its numbers."""
        if self._first is None:
            self._first = step
        self._step, self._metrics = step, dict(metrics)
        if "reward" in metrics:
            self._rewards.append(metrics["reward"])
        if not self.is_live:
            left = f"  left {clock_face(self.seconds_left())}" if step < self._total else ""
            self._print(f"{self._name} {step}/{self._total}  {summary(metrics)}{left}")

    def seconds_left(self) -> float:
        """Of this phase, at the pace it has had so far."""
        if self._first is None:
            return math.nan
        pace = (self._clock() - self._started) / (self._step - self._first + 1)
        return pace * max(0, self._total - self._step)

    def note(self, text: str) -> None:
        """One remark, above the live panel if there is one."""
        self._print(visible(text))

    def table(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Held-out scores before and after, and what changed; nothing where nothing was scored."""
        if not before and not after:
            return
        grid = Table(box=SIMPLE)
        grid.add_column("held out")
        for title in ("before", "after", "change"):
            grid.add_column(title, justify="right")
        for name in dict.fromkeys([*before, *after]):
            old, new = before.get(name), after.get(name)
            change = None if old is None or new is None else new - old
            moved = Text(score(change, "+.3f"), style="green" if (change or 0) > 0 else "")
            grid.add_row(Text(name), score(old), score(new), moved)
        self.console.print(grid)

    def transcript(self, episode: Episode, leaf: int) -> None:
        """One attempt as it was read and written, each author's words in a row and a colour.

        task    2+3=
        policy  [2+3]
        env     5;
        policy  5
        reward  1.00 (done)
        """
        end = episode.leaves[leaf]
        rows = Table.grid(padding=(0, 2))
        for number, tip in enumerate(end.tips):
            if number:  # the history was rewritten here: a new prompt, and on from there
                rows.add_row("", Text(f"context {number + 1}", style="dim"))
            spans = [episode.spans[index] for index in episode.walk(tip)]
            for author, run in groupby(spans, key=lambda span: span.author):
                said = "".join(span.text for span in run)
                if not said and author is Author.TASK:
                    said = "\n".join(str(m.get("content", "")) for m in episode.task.prompt)
                words = Text(clip(visible(said.rstrip("\n"))), style=STYLES[author])
                rows.add_row(Text(author, style=f"bold {STYLES[author]}"), words)
        verdict = Text(f"{end.reward:.2f} ({end.status})", style="bold")
        rows.add_row(Text("reward", style="bold"), verdict)
        self.console.print(rows)

    def closing(self, run_folder: str | Path, next_commands: Sequence[str]) -> None:
        """Where the run lies, and what one may do with it."""
        self._finish()
        text = Text("run folder: ").append(str(run_folder), style="bold")
        for command in next_commands:
            text.append("\n  ").append(command, style="cyan")
        self.console.print(text)

    def __enter__(self) -> Display:
        if self.is_live:
            self._live = Live(
                get_renderable=self._panel,
                console=self.console,
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._finish()

    def _finish(self) -> None:
        """The line that stays of a phase when its panel goes; plain output has its own already."""
        if self.is_live and self._step:
            took = clock_face(self._clock() - self._started)
            trend = f"  {sparkline(self._rewards, 24)}" if self._rewards else ""
            counted = f"{self._name} {self._step}/{self._total} in {took}"
            self._print(f"{counted}  {summary(self._metrics)}{trend}")
            self._step = 0

    def _panel(self) -> Group:
        """Two lines: how far, and how well."""
        head = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(1, self._total), completed=self._step, width=28)
        left = f"{clock_face(self.seconds_left())} left" if self._step else "starting"
        name = Text(self._name, style="bold")
        head.add_row(self._spinner, name, bar, f"{self._step}/{self._total}", left)
        body = Text(f"  {summary(self._metrics)}")
        if self._rewards:
            body.append(f"  {sparkline(self._rewards, 24)}", style="green")
        return Group(head, body)

    def _print(self, text: str) -> None:
        self.console.print(Text(text))

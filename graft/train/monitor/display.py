"""The display of a run: a live panel in a terminal, plain lines elsewhere.

It receives plain dicts and episodes and does not depend on the training loop.

    with Display(60) as display:
        display.phase("warm-up", 400)
        display.update(1, {"loss": 3.1, "tokens_per_second": 4512})
        ...
        display.phase("rl", 60)
        display.update(12, {"reward": 0.5, "tools/rate": 0.93})
        display.alarm("entropy fell to 0.02 of its start ...")

writes every few seconds, if the output is not a terminal, `rl 12/60  reward 0.500  tools 93%  left 0:48`,
and in a terminal shows a table under the progress bar:

              now   last 10     first
    reward  0.500     0.431     0.008   ▁▂▄▅▇
    tools     93%       88%       42%   ▁▃▅▇█
"""

from __future__ import annotations

import io
import math
import sys
import time
from collections import deque
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

from graft.train.monitor.formatting import clip, clock_face, score, sparkline
from graft.train.monitor.labels import (
    LIVE_COLUMNS,
    RECENT,
    SCORE_COLUMNS,
    WATCHED,
    in_words,
    watched,
)
from graft.train.monitor.printable import visible
from graft.types import Author, Episode

ALARM_STYLES = {"warning": "yellow", "alarm": "bold red"}

MAX_POINTS = 512
"""Values of one metric that are kept for its sparkline; more are averaged."""

PLAIN_SECONDS = 5.0
"""Between plain lines of one phase: a log of a quick warm-up is not hundreds of lines."""

STYLES = {Author.TASK: "dim", Author.POLICY: "green", Author.ENV: "cyan"}


class Trend:
    """One metric over a phase, in bounded memory: each kept value is the mean of `per` steps.

    at most 4 values: 1 2 3 4, then a 5 -> (1+2)/2 (3+4)/2 and, with per = 2, the 5 waits for the next value
    """

    def __init__(self, first: float, most: int = MAX_POINTS) -> None:
        self.first = first
        self._recent = deque([first], maxlen=RECENT)
        self._kept, self._waiting = [first], list[float]()
        self._per, self._most = 1, most

    def add(self, value: float) -> None:
        self._recent.append(value)
        waiting = [*self._waiting, value]
        if len(waiting) == self._per and len(self._kept) >= self._most:
            pairs = zip(self._kept[::2], self._kept[1::2], strict=True)
            self._kept = [a / 2 + b / 2 for a, b in pairs]
            self._per *= 2
        if len(waiting) == self._per:
            self._kept.append(_mean(waiting))
            waiting = []
        self._waiting = waiting

    @property
    def last(self) -> float:
        return self._recent[-1]

    @property
    def lately(self) -> float:
        return _mean(list(self._recent))

    @property
    def values(self) -> list[float]:
        waiting = self._waiting  # another thread draws the panel
        return [*self._kept, _mean(waiting)] if waiting else self._kept


class Display:
    """Progress, tables and transcripts of one run. `quiet` prints nothing; `json` keeps stdout for the
    caller's JSON and writes plain lines to stderr, `plain_seconds` apart."""

    def __init__(
        self,
        total_steps: int,
        quiet: bool = False,
        stream: TextIO | None = None,
        json: bool = False,
        clock: Callable[[], float] = time.monotonic,
        plain_seconds: float = PLAIN_SECONDS,
    ) -> None:
        out: TextIO = stream or (sys.stderr if json else sys.stdout)
        if isinstance(out, io.TextIOWrapper) and "utf" not in out.encoding.lower():
            out.reconfigure(errors="replace")  # a model may write any character
        self.console = Console(file=out, quiet=quiet, highlight=False, soft_wrap=True)
        # rich alone would also animate a pipe, where FORCE_COLOR is set
        watched = out.isatty() and self.console.is_terminal and not self.console.is_dumb_terminal
        self.is_live = watched and not json and not quiet
        self._clock, self._plain_seconds = clock, plain_seconds
        self._live: Live | None = None
        self._spinner = Spinner("dots")
        self._alarms = 0
        self._last_alarm = ""
        self._begin("train", total_steps)

    def _begin(self, name: str, steps: int) -> None:
        self._name, self._total, self._step = name, steps, 0
        self._metrics: Mapping[str, float] = {}
        self._trends: dict[str, Trend] = {}
        self._started = self._clock()
        self._first: int | None = None  # a resumed phase does not begin at step 1
        self._printed, self._printed_at = 0, -math.inf

    def phase(self, name: str, steps: int) -> None:
        """Close the current phase with a summary line and start the next, of `steps` steps."""
        self._finish()
        self._begin(name, steps)
        if not self.is_live:
            self._print(f"{name}: {steps} step{'s' if steps != 1 else ''}")

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of step `step` (the first is 1)."""
        if self._first is None:
            self._first = step
        self._step, self._metrics = step, dict(metrics)
        for name, *_ in watched(metrics):
            if name in self._trends:
                self._trends[name].add(metrics[name])
            else:
                self._trends[name] = Trend(metrics[name])
        is_due = self._clock() - self._printed_at >= self._plain_seconds
        if not self.is_live and (is_due or step >= self._total):
            self._print_step()

    def _print_step(self) -> None:
        self._printed, self._printed_at = self._step, self._clock()
        is_last = self._step >= self._total
        left = "" if is_last else f"  left {clock_face(self.seconds_left())}"
        self._print(f"{self._name} {self._step}/{self._total}  {in_words(self._metrics)}{left}")

    def seconds_left(self) -> float:
        """Remaining seconds of this phase at its mean step time so far."""
        if self._first is None:
            return math.nan
        per_step = (self._clock() - self._started) / (self._step - self._first + 1)
        return per_step * max(0, self._total - self._step)

    def note(self, text: str) -> None:
        """Print one line, above the live panel if there is one."""
        self._print(visible(text))

    def alarm(self, text: str, level: str = "alarm", step: int | None = None) -> None:
        """Print an alarm or warning (`level` "warn"), at the current step if none is given.

        The live table shows how many there were.
        """
        word = "warning" if level == "warn" else "alarm"
        at = self._step if step is None else step
        self._alarms += 1
        self._last_alarm = f"step {at}: {visible(text)}"
        self.console.print(Text(f"{word} at {self._last_alarm}", style=ALARM_STYLES[word]))

    def table(
        self, before: Mapping[str, float], after: Mapping[str, float], leakage: str = ""
    ) -> None:
        """Print held-out scores before and after, and the change; nothing without scores.

        leakage   which held-out tasks are trained on, if any are
        """
        if not before and not after:
            return
        grid = Table(box=SIMPLE)
        titles = ("score", *SCORE_COLUMNS[1:]) if leakage else SCORE_COLUMNS
        for number, title in enumerate(titles):
            grid.add_column(title, justify="right" if number else "left")
        for name in dict.fromkeys([*before, *after]):
            old, new = before.get(name), after.get(name)
            change = None if old is None or new is None else new - old
            moved = Text(score(change, "+.3f"), style="green" if (change or 0) > 0 else "")
            grid.add_row(Text(name), score(old), score(new), moved)
        self.console.print(grid)
        if leakage:
            text = f"not held out: {leakage}; these scores measure memory too"
            self.console.print(Text(text, style=ALARM_STYLES["warning"]))

    def transcript(
        self, episode: Episode, leaf: int, is_graded: bool = True, is_whole: bool = False
    ) -> None:
        """Print one attempt, each author's text in a row and a colour.

        Long spans are shortened unless `is_whole`; without `is_graded` no reward is shown.

        task    2+3=
        policy  [2+3]
        env     5;
        policy  5
        reward  1.00 (done)
        """
        end = episode.leaves[leaf]
        rows = Table.grid(padding=(0, 2))
        for number, tip in enumerate(end.tips):
            if number:  # the history was rewritten here: a new prompt
                rows.add_row("", Text(f"context {number + 1}", style="dim"))
            spans = [episode.spans[index] for index in episode.walk(tip)]
            for author, run in groupby(spans, key=lambda span: span.author):
                text = "".join(span.text for span in run)
                if not text and author is Author.TASK:
                    text = "\n".join(str(m.get("content", "")) for m in episode.task.prompt)
                text = visible(text.rstrip("\n"))
                words = Text(text if is_whole else clip(text), style=STYLES[author])
                rows.add_row(Text(author, style=f"bold {STYLES[author]}"), words)
        reward = f"{end.reward:.2f}" if is_graded else "-"
        verdict = Text(f"{reward} ({end.status})", style="bold")
        if end.seat:
            rows.add_row(Text("seat", style="bold"), Text(f"{end.seat}, game {end.match}"))
        rows.add_row(Text("reward", style="bold"), verdict)
        self.console.print(rows)

    def closing(self, run_folder: str | Path, next_commands: Sequence[str]) -> None:
        """Print the run's folder and commands to continue with."""
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
        """Print the summary line of a phase; plain output gets its last step, if it has not."""
        if not self.is_live and self._step != self._printed:
            self._print_step()
        if self.is_live and self._step:
            took = clock_face(self._clock() - self._started)
            reward = self._trends.get("reward")
            trend = f"  {sparkline(reward.values, 24)}" if reward else ""
            counted = f"{self._name} {self._step}/{self._total} in {took}"
            self._print(f"{counted}  {in_words(self._metrics, is_brief=True)}{trend}")
            self._step = 0

    def _panel(self) -> Group:
        """Progress, metrics and alarms; the metrics in one line where the window is low."""
        head = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(1, self._total), completed=self._step, width=28)
        left = f"{clock_face(self.seconds_left())} left" if self._step else "starting"
        name = Text(self._name, style="bold")
        head.add_row(self._spinner, name, bar, f"{self._step}/{self._total}", left)
        fits = self.console.height >= len(self._trends) + 6
        body = self._live_table() if fits else Text(f"  {in_words(self._metrics, is_brief=True)}")
        parts = [head, *([body] if self._trends else [])]
        if self._alarms:
            count = "1 alarm" if self._alarms == 1 else f"{self._alarms} alarms"
            text = f"  {count}, the last at {self._last_alarm}".replace("\n", " ")
            style = ALARM_STYLES["alarm"]
            parts.append(Text(text, style=style, no_wrap=True, overflow="ellipsis"))
        return Group(*parts)

    def _live_table(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        for side in ("left", "right", "right", "right", "left"):
            grid.add_column(justify=side, no_wrap=True)
        grid.add_row(*(Text(title, style="dim") for title in ("", *LIVE_COLUMNS, "")))
        for name, word, form, _ in WATCHED:
            if (trend := self._trends.get(name)) is None:
                continue
            # a metric of some steps only (accuracy) keeps its last value
            values = (trend.last, trend.lately, trend.first)
            bars = Text(sparkline(trend.values, 24), style="green")
            grid.add_row(Text(f"  {word}"), *(Text(form(value)) for value in values), bars)
        return grid

    def _print(self, text: str) -> None:
        self.console.print(Text(text))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # not fsum, which raises for inf and -inf together

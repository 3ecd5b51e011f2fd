"""What `graft plan` prints: a forecast for this device."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from graft.planning.forecast import Forecast
from graft.planning.step_time import StepTime, known_rates
from graft.train.memory.footprint import gigabytes, num_parameters
from graft.train.memory.plan import MemoryPlan
from graft.train.memory.workload import SFT_CHECK_EVERY
from graft.train.monitor.formatting import clock_face


def show_forecast(found: Forecast, stream: TextIO | None = None) -> None:
    console, memory = plain_console(stream), found.memory
    dtype = str(found.dtype).removeprefix("torch.")
    console.print(
        f"{found.name}: {num_parameters(found.shape):,} parameters in {dtype} on {found.device_memory.name}"
    )
    console.print(_memory_table(memory))
    doing = "computed twice (recompute)" if memory.recompute else "kept (no recompute)"
    console.print(
        f"micro-batch {memory.tokens_per_micro:,} tokens, activations {doing}; "
        f"KV pool {memory.kv_tokens:,} tokens"
    )
    if found.measured is not None:
        console.print(_probe_table(found))
    if found.step_time is None:
        console.print("time: unknown without the probe on this device")
    else:
        console.print(_time_table(found.likely, found.step_time))
        for line in _about_time(found, found.step_time):
            console.print(line, style="dim")
    for note in found.notes:
        console.print(note)
    verdict = "fits" if memory.fits else "does not fit"
    numbers = f"{gigabytes(memory.total)} of {gigabytes(memory.usable)}"
    advice = "" if memory.fits else f". {found.advice}"
    console.print(f"{verdict}: {numbers}{advice}", style="green" if memory.fits else "red")


def plain_console(stream: TextIO | None = None) -> Console:
    """Plain text where the output is not a terminal."""
    out = stream or sys.stdout
    if isinstance(out, io.TextIOWrapper) and "utf" not in out.encoding.lower():
        out.reconfigure(errors="replace")
    return Console(file=out, highlight=False, soft_wrap=True)


def number_table(texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """Columns of texts, then columns of numbers."""
    table = Table(*texts, box=SIMPLE)
    for title in numbers:
        table.add_column(title, justify="right")
    return table


def _memory_table(memory: MemoryPlan) -> Table:
    table = number_table(["memory", "when", "changed by"], ["bytes"])
    for item in memory.items:
        table.add_row(item.name, item.when, item.key, gigabytes(item.bytes))
    table.add_section()
    table.add_row("total", "at the worst moment", "", gigabytes(memory.total))
    table.add_row("usable", f"of {gigabytes(memory.available)}", "", gigabytes(memory.usable))
    return table


def _probe_table(found: Forecast) -> Table:
    """Predicted and measured seconds of the probe."""
    measured, known = found.measured, known_rates(found.device_memory.name)
    assert measured is not None
    table, rates = number_table(["probe"], ["predicted", "measured"]), measured.rates
    for name, seconds, kind in (
        (f"learn {measured.tokens:,} tokens", measured.learn, "train"),
        ("optimizer step", measured.optimizer, "optimizer"),
        (f"decoding step of {measured.batch}", measured.decode_step, "decode"),
    ):
        guess = (
            "-" if known is None else _span(seconds * getattr(rates, kind) / getattr(known, kind))
        )
        table.add_row(name, guess, _span(seconds))
    peak = "-" if measured.peak is None else gigabytes(measured.peak)
    table.add_row("training memory", gigabytes(measured.predicted_peak), peak)
    return table


def _time_table(likely: StepTime | None, most: StepTime) -> Table:
    """Seconds with attempts as long as the examples, if there are some, and with the longest attempts."""
    columns = {"likely": likely, "at most": most}
    shown = {name: one for name, one in columns.items() if one is not None}
    table = number_table(["time"], list(shown))

    def row(name: str, seconds: Callable[[StepTime], float]) -> None:
        table.add_row(name, *(_span(seconds(one)) for one in shown.values()))

    row("prompts, per step", lambda one: one.prefill)
    row("decoding, per step", lambda one: one.decode)
    row("learning, per step", lambda one: one.learn)
    row("optimizer, per step", lambda one: one.optimizer)
    row("a step", lambda one: one.step)
    table.add_section()
    if most.sft:
        row("the warm-up", lambda one: one.sft)
    row(f"{most.steps} steps", lambda one: one.steps * one.step)
    if most.evaluations:
        row(f"{most.evaluations} evaluations", lambda one: one.evaluations * one.evaluation)
    row("the whole run", lambda one: one.run)
    if most.shortest_sft < most.sft:
        row("with the shortest warm-up", lambda one: one.shortest_run)
    return table


def _about_time(found: Forecast, most: StepTime) -> list[str]:
    """Which lengths the table assumes, and what it does not include."""
    lines: list[str] = []
    if found.examples is not None:
        own, tried = found.examples.example, found.examples.attempt
        lines.append(
            f"likely: attempts like the examples that call tools, {tried.prompt} + {tried.sampled} "
            f"tokens and {tried.observed} of results; a warm-up example has {sum(own)}"
            if tried.observed
            else f"likely: attempts like the examples, {tried.prompt} + {tried.sampled} tokens"
        )
    lines.append("at most: every attempt fills its budget; environments and tools come on top")
    if most.shortest_sft < most.sft:
        lines.append(f"sft.stop_at may end the warm-up from step {SFT_CHECK_EVERY} on")
    return lines


def _span(seconds: float) -> str:
    """
    >>> _span(0.00123), _span(2.5), _span(5400)
    ('0.0012 s', '2.5 s', '1:30:00')
    """
    if seconds >= 100:
        return clock_face(seconds)
    return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"

"""`graft plan RECIPE`: memory and time of a recipe on this device, as tables or JSON."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from graft.config import Config
from graft.models.device import choose_device, choose_dtype
from graft.models.shape import ModelShape
from graft.planning.lengths import lengths_of
from graft.planning.probe import MeasuredRates, probe
from graft.planning.step_time import Rates, StepTime, estimate_step_time, known_rates
from graft.train.memory.device_memory import DeviceMemory, device_memory_of
from graft.train.memory.footprint import gigabytes, num_parameters
from graft.train.memory.plan import MemoryItem, MemoryPlan, plan_memory, remedy
from graft.train.memory.workload import (
    SFT_CHECK_EVERY,
    ExampleLengths,
    SequenceLengths,
    workload_of,
)
from graft.train.model import recipe_shape
from graft.train.monitor.formatting import clock_face

PROBED = "found by the probe"


@dataclass(frozen=True, slots=True)
class Forecast:
    """Computed and measured memory and time."""

    name: str
    shape: ModelShape
    dtype: torch.dtype
    device_memory: DeviceMemory
    memory: MemoryPlan
    expected: StepTime | None
    """From the rates of a known device."""
    measured: MeasuredRates | None
    step_time: StepTime | None
    """With the probe's rates if there was one; every attempt fills its budget."""
    examples: ExampleLengths | None
    """Likely lengths of attempts."""
    likely: StepTime | None
    """Step time with attempts of those lengths."""
    notes: list[str]
    advice: str
    """What to change, if it does not fit."""

    def to_json(self) -> dict[str, Any]:
        memory = self.memory
        return {
            "recipe": self.name,
            "device": self.device_memory.name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "parameters": num_parameters(self.shape),
            "memory": {
                "items": [item._asdict() for item in memory.items],
                "total": memory.total,
                "usable": memory.usable,
                "available": memory.available,
            },
            "kv_tokens": memory.kv_tokens,
            "tokens_per_micro": memory.tokens_per_micro,
            "recompute": memory.recompute,
            "seconds": _seconds(self.step_time),
            "likely_seconds": _seconds(self.likely),
            "lengths": None if self.examples is None else asdict(self.examples),
            "expected_seconds": _seconds(self.expected),
            "probe": None if self.measured is None else asdict(self.measured),
            "notes": self.notes,
            "fits": memory.fits,
            "advice": self.advice,
        }


def _seconds(found: StepTime | None) -> dict[str, float] | None:
    if found is None:
        return None
    derived = {"rollout": found.rollout, "step": found.step, "run": found.run}
    derived["shortest_run"] = found.shortest_run
    return {**asdict(found), **derived}


def forecast(
    config: Config, *, probing: bool = True, device_memory: DeviceMemory | None = None
) -> Forecast:
    """Compute the memory, choose sizes, and run the probe if they fit."""
    device = choose_device(config.model.device)
    dtype, note = choose_dtype(config.model.dtype, device)
    shape = recipe_shape(config)
    device_memory = device_memory or device_memory_of(device)
    memory = plan_memory(config, shape, dtype, device_memory)
    known = known_rates(device_memory.name)
    notes, examples = [note] if note else [], None
    if memory.fits and (probing or known):
        try:
            examples = lengths_of(config)
        except Exception as error:  # of data or an environment: the forecast works without them
            notes.append(f"lengths of attempts are not known: {type(error).__name__}: {error}")
    measured = None
    if probing and memory.fits:
        measured = probe(config, shape, dtype, device_memory, memory, examples and examples.attempt)
        memory = corrected(memory, measured)
    found = sum(item.bytes for item in memory.items if item.name == PROBED)
    left = replace(device_memory, available=device_memory.available - found)

    rates = measured.rates if measured else known

    def at(rates: Rates | None, examples: ExampleLengths | None = None) -> StepTime | None:
        return (
            None
            if rates is None
            else estimate_step_time(config, shape, dtype, memory, rates, examples)
        )

    return Forecast(
        name=config.run.name,
        shape=shape,
        dtype=dtype,
        device_memory=device_memory,
        memory=memory,
        expected=at(known),
        measured=measured,
        step_time=at(
            rates, None if examples is None else replace(examples, attempt=budget(config))
        ),
        examples=examples,
        likely=None if examples is None else at(rates, examples),
        notes=notes,
        advice="" if memory.fits else remedy(config, shape, dtype, left),
    )


def budget(config: Config) -> SequenceLengths:
    """Lengths of the longest attempt."""
    work = workload_of(config)
    return SequenceLengths(work.prompt, work.sampled, work.observed)


def corrected(memory: MemoryPlan, measured: MeasuredRates) -> MemoryPlan:
    """Add what the probe measured beyond its prediction; never subtract."""
    if measured.peak is None or measured.peak <= measured.predicted_peak:
        return memory
    more = measured.peak - measured.predicted_peak
    found = MemoryItem(PROBED, more, "learning", "train.tokens_per_micro")
    return replace(memory, items=[*memory.items, found])


def show(found: Forecast, stream: TextIO | None = None) -> None:
    """Print tables; plain text where the output is not a terminal."""
    out = stream or sys.stdout
    if isinstance(out, io.TextIOWrapper) and "utf" not in out.encoding.lower():
        out.reconfigure(errors="replace")
    console = Console(file=out, highlight=False, soft_wrap=True)
    memory = found.memory
    dtype = str(found.dtype).removeprefix("torch.")
    console.print(
        f"{found.name}: {num_parameters(found.shape):,} parameters in {dtype} on {found.device_memory.name}"
    )
    console.print(memory_table(memory))
    doing = "computed twice (recompute)" if memory.recompute else "kept (no recompute)"
    console.print(
        f"micro-batch {memory.tokens_per_micro:,} tokens, activations {doing}; "
        f"KV pool {memory.kv_tokens:,} tokens"
    )
    if found.measured is not None:
        console.print(probe_table(found))
    if found.step_time is None:
        console.print("time: unknown without the probe on this device")
    else:
        console.print(time_table(found))
        for line in about_time(found):
            console.print(line, style="dim")
    for note in found.notes:
        console.print(note)
    verdict = "fits" if memory.fits else "does not fit"
    numbers = f"{gigabytes(memory.total)} of {gigabytes(memory.usable)}"
    advice = "" if memory.fits else f". {found.advice}"
    console.print(f"{verdict}: {numbers}{advice}", style="green" if memory.fits else "red")


def memory_table(memory: MemoryPlan) -> Table:
    table = Table("memory", "when", "changed by", box=SIMPLE)
    table.add_column("bytes", justify="right")
    for item in memory.items:
        table.add_row(item.name, item.when, item.key, gigabytes(item.bytes))
    table.add_section()
    table.add_row("total", "at the worst moment", "", gigabytes(memory.total))
    table.add_row("usable", f"of {gigabytes(memory.available)}", "", gigabytes(memory.usable))
    return table


def probe_table(found: Forecast) -> Table:
    """Predicted and measured seconds of the probe."""
    measured = found.measured
    assert measured is not None
    table = Table("probe", box=SIMPLE)
    table.add_column("predicted", justify="right")
    table.add_column("measured", justify="right")
    known = known_rates(found.device_memory.name)

    def row(name: str, seconds: float, measured_rate: float, known_rate: float | None) -> None:
        guess = "-" if known_rate is None else span(seconds * measured_rate / known_rate)
        table.add_row(name, guess, span(seconds))

    rates = measured.rates
    row(f"learn {measured.tokens:,} tokens", measured.learn, rates.train, known and known.train)
    row("optimizer step", measured.optimizer, rates.optimizer, known and known.optimizer)
    name = f"decoding step of {measured.batch}"
    row(name, measured.decode_step, rates.decode, known and known.decode)
    peak = "-" if measured.peak is None else gigabytes(measured.peak)
    table.add_row("training memory", gigabytes(measured.predicted_peak), peak)
    return table


def time_table(found: Forecast) -> Table:
    """Seconds with attempts as long as the examples, if there are some, and with the longest attempts."""
    columns = [one for one in (found.likely, found.step_time) if one is not None]
    table = Table("time", box=SIMPLE)
    for name in ("likely", "at most")[-len(columns) :]:
        table.add_column(name, justify="right")

    def row(name: str, seconds: Callable[[StepTime], float]) -> None:
        table.add_row(name, *(span(seconds(one)) for one in columns))

    most = columns[-1]
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


def about_time(found: Forecast) -> list[str]:
    """Which lengths the table assumes, and what it does not include."""
    most = "at most: every attempt fills its budget"
    lines = [f"{most}; environments and tools come on top"]
    if found.examples is not None:
        own, tried = found.examples.example, found.examples.attempt
        lines.insert(
            0,
            f"likely: attempts like the examples that call tools, {tried.prompt} + {tried.sampled} "
            f"tokens and {tried.observed} of results; a warm-up example has {sum(own)}"
            if tried.observed
            else f"likely: attempts like the examples, {tried.prompt} + {tried.sampled} tokens",
        )
    if found.step_time is not None and found.step_time.shortest_sft < found.step_time.sft:
        lines.append(f"sft.stop_at may end the warm-up from step {SFT_CHECK_EVERY} on")
    return lines


def span(seconds: float) -> str:
    """
    >>> span(0.00123), span(2.5), span(5400)
    ('0.0012', '2.5', '1:30:00')
    """
    return (
        clock_face(seconds)
        if seconds >= 100
        else f"{seconds:.2g}"
        if seconds < 1
        else f"{seconds:.1f}"
    )

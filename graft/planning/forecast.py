"""`graft plan RECIPE`: memory and time of a recipe on this device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from graft.config import Config
from graft.models.device_choice import choose_device, choose_dtype
from graft.models.shape import ModelShape
from graft.planning.probe import MeasuredRates, probe
from graft.planning.step_time import Rates, StepTime, estimate_step_time, known_rates, larger
from graft.rollout.examples import shortened
from graft.train.actions import actions_of
from graft.train.build import env_factory
from graft.train.memory.device_memory import DeviceMemory, device_memory_of
from graft.train.memory.footprint import num_parameters
from graft.train.memory.plan import MemoryItem, MemoryPlan, plan_memory, remedy
from graft.train.memory.workload import ExampleLengths, SequenceLengths, workload_of
from graft.train.model import load_tokenizer, make_chat, recipe_shape, source_of
from graft.train.sft_dataset import demonstrations, row_builder
from graft.types import Author, Episode

PROBED = "found by the probe"
NUM_EXAMPLES = 64
"""Examples of the warm-up whose lengths are counted: before a run no others are known. The quickstart's
budget is 96 tokens; its demonstrations have 9 of a prompt, 19 of the teacher and 8 of the calculator."""


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
        if rates is None:
            return None
        return estimate_step_time(config, shape, dtype, memory, rates, examples)

    likely = None if examples is None else at(rates, examples)
    longest = at(rates, None if examples is None else replace(examples, attempt=budget(config)))
    if likely is not None and longest is not None:
        # how much of a full context is prompt, and how much results, is not known
        longest = larger(likely, longest)
    return Forecast(
        name=config.run.name,
        shape=shape,
        dtype=dtype,
        device_memory=device_memory,
        memory=memory,
        expected=at(known),
        measured=measured,
        step_time=longest,
        examples=examples,
        likely=likely,
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


def lengths_of(config: Config) -> ExampleLengths | None:
    """Lengths of the recipe's examples; None without a warm-up."""
    if not config.sft.is_on:
        return None
    drawn, rows = _examples(config)
    answered = [one for one in drawn if any(span.author == Author.ENV for span in one.spans)]
    return ExampleLengths(_mean(drawn), _mean(answered or drawn), rows)


def _examples(config: Config) -> tuple[list[Episode], int | None]:
    source = source_of(config)
    tokenizer = load_tokenizer(config, source)
    actions = actions_of(config, tokenizer, recipe_shape(config).vocab_size)
    chat = make_chat(config, tokenizer)
    # examples need these components only, without the model
    components = cast(
        "Any", SimpleNamespace(config=config, tokenizer=tokenizer, chat=chat, actions=actions)
    )
    if config.sft.data:
        chats, build = row_builder(components, config.sft.data)
        apart = max(len(chats) // NUM_EXAMPLES, 1)
        places = range(0, len(chats), apart)[:NUM_EXAMPLES]
        limit = config.rollout.max_context
        return [shortened(build(place, chats[place]), limit) for place in places], len(chats)
    env = env_factory(config, tokenizer)
    components.setup = SimpleNamespace(make_env=env)
    examples = demonstrations(components)
    steps = range(1, 1 + math.ceil(NUM_EXAMPLES / config.sft.batch))
    return [one for step in steps for one in examples(step)], None


def _mean(drawn: Sequence[Episode]) -> SequenceLengths:
    def tokens(author: Author) -> int:
        count = sum(len(span) for one in drawn for span in one.spans if span.author == author)
        return math.ceil(count / len(drawn))

    return SequenceLengths(tokens(Author.TASK), tokens(Author.POLICY), tokens(Author.ENV))

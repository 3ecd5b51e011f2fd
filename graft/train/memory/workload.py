"""The work of a recipe's step: how many sequences, and their lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from graft.config import Config
from graft.train.memory.device_memory import DeviceMemory

MAX_RUNNING = 1024
"""Sequences that the engine decodes together."""
SFT_CHECK_EVERY = 25
"""Steps between checks on held-out tasks, where a warm-up may stop early."""
SFT_CHECK_TASKS = 128


class SequenceLengths(NamedTuple):
    """Mean tokens of one attempt."""

    prompt: int
    sampled: int
    observed: int
    """Tokens of the environment's answers."""


@dataclass(frozen=True, slots=True)
class ExampleLengths:
    """Lengths of a warm-up's examples, and of attempts of a policy that imitates them."""

    example: SequenceLengths
    attempt: SequenceLengths
    """Mean of the examples with an answer of the environment (a tool call), if there are any."""
    rows: int | None
    """Rows of the warm-up's file; None: a teacher, which has no limit."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A step's attempts at their longest: each fills `rollout.max_context`.

    Tokens that are not sampled count as the prompt, which the samples of a task share. Recipes of many turns
    can sample their whole context; a quarter then counts as the prompt.
    """

    groups: int
    samples: int
    prompt: int
    sampled: int
    observed: int = 0
    """Tokens of the environment's answers in each attempt, where known."""

    @property
    def rows(self) -> int:
        return self.groups * self.samples

    @property
    def context(self) -> int:
        return self.prompt + self.written

    @property
    def written(self) -> int:
        """Tokens of one attempt after its prompt."""
        return self.sampled + self.observed

    @property
    def unique(self) -> int:
        """Tokens that the learner computes: a shared token once."""
        return self.groups * (self.prompt + self.samples * self.written)


def workload_of(config: Config) -> Workload:
    rollout = config.rollout
    most = rollout.max_context - max(rollout.max_context // 4, 1)
    sampled = min(rollout.max_tokens * rollout.max_turns, most)
    return Workload(rollout.tasks, rollout.samples, rollout.max_context - sampled, sampled)


def running(config: Config) -> int:
    """Sequences that run at a time: of a training step or an evaluation."""
    rollout = config.rollout
    train = min(rollout.tasks, rollout.concurrency) * rollout.samples
    held_out = held_out_groups(config) * max(config.eval.samples, 1)
    return min(max(train, held_out, 1), MAX_RUNNING)


def held_out_groups(config: Config) -> int:
    """Held-out tasks that are attempted at a time."""
    count = config.run.eval_tasks * max(len(config.held_out_envs), 1)
    return min(count, config.rollout.concurrency)


def longest_context(config: Config) -> int:
    """Tokens of the longest attempt, in training or evaluation."""
    return max(config.rollout.max_context, config.eval.max_context)


def page_size(config: Config, device_memory: DeviceMemory) -> int:
    """Tokens per KV page: the recipe's, or the engine's default."""
    return config.engine.page_size or (64 if device_memory.fused else 16)


def smallest_pool(config: Config, page: int) -> int:
    """One longest context in whole pages: with less no attempt could finish."""
    return _in_pages(longest_context(config), page) + page


def wanted_pool(config: Config, page: int) -> int:
    """All contexts of a step at their longest, with shared prompts: more is never used."""
    work, rollout = workload_of(config), config.rollout
    groups = min(rollout.tasks, rollout.concurrency)
    prompt, row = _in_pages(work.prompt, page), _in_pages(work.sampled, page)
    train = groups * (prompt + rollout.samples * (row + page))
    context = workload_of(config.as_evaluated()).context
    held_out = held_out_groups(config) * max(config.eval.samples, 1) * _in_pages(context, page)
    return max(train, held_out, smallest_pool(config, page))


def _in_pages(tokens: int, page: int) -> int:
    return math.ceil(tokens / page) * page


def largest_micro(config: Config, tokens_per_micro: int) -> int:
    """Tokens of the largest micro-batch: a single row may be longer, a whole step shorter."""
    rows = config.rollout.tasks * config.rollout.samples if config.train.steps else 0
    rows = max(rows, config.sft.batch if config.sft.is_on else 0)
    context = config.rollout.max_context
    return max(min(tokens_per_micro, rows * context), context)

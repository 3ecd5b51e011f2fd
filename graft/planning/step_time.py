"""Seconds of each phase of a step, from what it must compute and move and a device's rates.

    N parameters, V vocabulary, D width, B sequences decoded together

Decoding reads the weights and the keys and values once per token of the batch: bytes. Prompts and
training are matrix products: FLOPs. The optimizer reads and writes its state: bytes. A rate is what a
device really reaches: its roof times the share that this code has, or what the probe measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from graft.algos.presets import resolve_preset
from graft.config import Config
from graft.models.shape import ModelShape
from graft.train.memory.footprint import kv_bytes, num_parameters
from graft.train.memory.plan import MemoryPlan, has_reference
from graft.train.memory.workload import (
    MAX_RUNNING,
    SFT_CHECK_EVERY,
    SFT_CHECK_TASKS,
    ExampleLengths,
    Workload,
    workload_of,
)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does per second in each kind of work."""

    decode: float
    """Bytes."""
    prefill: float
    """FLOPs."""
    train: float
    """FLOPs."""
    optimizer: float
    """Bytes."""
    step: float = 0.0
    """Seconds per layer that a decoding step takes at least, however small the batch: launches."""


ROOFS = {"H200": (4.58e12, 801e12), "H100": (3.1e12, 780e12)}
"""Part of a device's name -> bytes read and bf16 FLOPs per second. The H200's are measured, the
H100's are the vendor's, less what the H200 falls short of its own."""
SHARES = {"decode": 0.55, "prefill": 0.62, "train": 0.62, "optimizer": 0.44}
"""Of these roofs, as measured with Qwen3-0.6B on an H200."""
LAUNCHES = 32e-6
"""Seconds per layer of a decoding step of one sequence there."""


def known_rates(name: str) -> Rates | None:
    """Rates of a device we know; of any other only a probe can tell."""
    for part, (bandwidth, flops) in ROOFS.items():
        if part in name:
            return Rates(
                decode=SHARES["decode"] * bandwidth,
                prefill=SHARES["prefill"] * flops,
                train=SHARES["train"] * flops,
                optimizer=SHARES["optimizer"] * bandwidth,
                step=LAUNCHES,
            )
    return None


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds, of one step and of everything a recipe runs. Tools and environments come on top."""

    prefill: float
    decode: float
    learn: float
    optimizer: float
    evaluation: float
    """One evaluation: all held-out tasks, sampled and greedy."""
    sft: float
    """The whole warm-up, looks at held-out tasks included."""
    shortest_sft: float
    """The warm-up until its first look, where `sft.stop_at` may end it; else the whole."""
    steps: int
    evaluations: int

    @property
    def rollout(self) -> float:
        return self.prefill + self.decode

    @property
    def step(self) -> float:
        return self.rollout + self.learn + self.optimizer

    @property
    def run(self) -> float:
        return self.sft + self.steps * self.step + self.evaluations * self.evaluation

    @property
    def shortest_run(self) -> float:
        """The run whose warm-up ends at its first look at held-out tasks."""
        return self.run - self.sft + self.shortest_sft


def pace(
    config: Config,
    shape: ModelShape,
    dtype: torch.dtype,
    memory: MemoryPlan,
    rates: Rates,
    examples: ExampleLengths | None = None,
) -> StepTime:
    """Of attempts as long as `examples`; without them every attempt fills its budget."""
    work, run, sft = workload_of(config), config.run, config.sft
    warm_up = replace(work, groups=sft.batch, samples=1)
    if examples is not None:
        work = replace(work, **examples.attempt._asdict())
        warm_up = replace(warm_up, **examples.example._asdict())
    ends_alike = work == workload_of(config)  # where their budget does
    rounds = config.train.epochs * config.train.minibatches
    held_out = replace(work, groups=max(run.eval_tasks, 1), samples=1)
    steps = config.train.steps
    evaluations = 0
    if run.eval_tasks and config.task.env:
        between = steps // run.eval_every if run.eval_every else 0
        evaluations = 1 + between + (steps > 0)
    update = optimizer_bytes(shape, dtype) / rates.optimizer
    critic = resolve_preset(config.algo.name).needs_critic
    recompute = memory.recompute
    sft_flops = train_flops(shape, warm_up, recompute)

    def prefill(asked: Workload) -> float:
        prompts = forward_flops(shape, asked.groups * asked.prompt, asked.prompt / 2)
        answers = forward_flops(shape, asked.rows * asked.observed, asked.context / 2)
        return (prompts + answers) / rates.prefill

    def decode(asked: Workload) -> float:
        return decode_seconds(config, shape, dtype, asked, memory.kv_tokens, rates, ends_alike)

    def attempts(asked: Workload) -> float:
        return prefill(asked) + decode(asked)

    sft_steps = sft_steps_of(config, examples)
    sft_step = sft_flops / rates.train + update
    look = attempts(replace(work, groups=SFT_CHECK_TASKS, samples=1))

    def warm_up_of(count: int) -> float:
        looks = count // SFT_CHECK_EVERY if sft.stop_at and config.task.env else 0
        return count * sft_step + looks * look

    until_stop = min(SFT_CHECK_EVERY, sft_steps) if sft.stop_at else sft_steps
    return StepTime(
        prefill=prefill(work),
        decode=decode(work),
        learn=learn_flops(config, shape, work, recompute) / rates.train,
        optimizer=rounds * update * (2 if critic else 1),
        evaluation=2 * attempts(held_out),
        sft=warm_up_of(sft_steps),
        shortest_sft=warm_up_of(until_stop),
        steps=steps,
        evaluations=evaluations,
    )


def sft_steps_of(config: Config, examples: ExampleLengths | None) -> int:
    """Steps of the warm-up; of `sft.epochs` as many as the rows of its file make."""
    sft = config.sft
    if sft.steps or examples is None or examples.rows is None:
        return sft.steps
    learned = examples.rows - round(examples.rows * sft.eval_share)
    return math.ceil(sft.epochs * learned / sft.batch)


def body_parameters(shape: ModelShape) -> int:
    ends = shape.head_rows + (0 if shape.tied else shape.vocab_size)
    return num_parameters(shape) - ends * shape.width


def decode_step_bytes(
    shape: ModelShape, dtype: torch.dtype, batch: int, groups: float, shared: float, private: float
) -> float:
    """Weights, keys and values (a group's shared ones once), logits written and read."""
    head = shape.head_rows * shape.width
    weights = (body_parameters(shape) + head) * dtype.itemsize
    tokens = batch * private + groups * shared
    logits = 2 * batch * shape.head_rows * dtype.itemsize
    return weights + kv_bytes(shape, dtype) * tokens + logits


def decode_seconds(
    config: Config,
    shape: ModelShape,
    dtype: torch.dtype,
    work: Workload,
    kv_tokens: int,
    rates: Rates,
    ends_alike: bool = True,
) -> float:
    """All rows in waves of what runs together, one step per token, at half its length on average.

    Rows that do not end alike end evenly spread up to twice their mean: twice as many steps, with half
    of the rows on average.
    """
    batch = min(work.rows, config.rollout.concurrency * work.samples, MAX_RUNNING)
    per_row = work.written + work.prompt / work.samples
    batch = max(min(batch, int(kv_tokens / per_row)), 1)
    waves = max(work.rows / batch, 1.0)  # no wave waits for the last row of the one before
    steps = work.sampled
    if not ends_alike:
        batch, steps = max(batch // 2, 1), 2 * steps
    moved = decode_step_bytes(
        shape, dtype, batch, batch / work.samples, work.prompt, work.written / 2
    )
    step = max(moved / rates.decode, shape.layers * rates.step)
    return waves * steps * step


def attention_flops(shape: ModelShape, tokens: float, seen: float) -> float:
    return 4.0 * shape.layers * shape.q_size * seen * tokens


def forward_flops(shape: ModelShape, tokens: float, seen: float, logits: float = 0.0) -> float:
    head = 2.0 * shape.head_rows * shape.width * logits
    return 2.0 * body_parameters(shape) * tokens + attention_flops(shape, tokens, seen) + head


def mean_seen(work: Workload) -> float:
    """Tokens that a unique token of the step attends to, on average."""
    responses = work.samples * work.written
    pairs = work.prompt**2 / 2 + responses * (work.prompt + work.written / 2)
    return pairs / (work.prompt + responses)


def train_flops(
    shape: ModelShape, work: Workload, recompute: bool, with_head: bool = True
) -> float:
    """Forward and backward of a whole step; logits are counted twice, as they are in chunks."""
    seen, tokens = mean_seen(work), float(work.unique)
    body = 6.0 * body_parameters(shape) * tokens + 3.5 * attention_flops(shape, tokens, seen)
    again = forward_flops(shape, tokens, seen) if recompute else 0.0
    head = 8.0 * shape.head_rows * shape.width * work.rows * work.sampled * with_head
    return body + again + head


def learn_flops(config: Config, shape: ModelShape, work: Workload, recompute: bool) -> float:
    """All passes over a step's rows: training, and what the algorithm asks for besides."""
    train, preset = config.train, resolve_preset(config.algo.name)
    seen, tokens, logits = mean_seen(work), float(work.unique), float(work.rows * work.sampled)
    passes = int(has_reference(config)) + int(train.epochs * train.minibatches > 1)
    total = train.epochs * train_flops(shape, work, recompute)
    total += passes * forward_flops(shape, tokens, seen, logits)
    if preset.needs_critic:
        total += train.epochs * train_flops(shape, work, recompute, with_head=False)
        total += forward_flops(shape, tokens, seen)
    return total


def optimizer_bytes(shape: ModelShape, dtype: torch.dtype) -> float:
    """Gradient read for its norm and for the step; master and two moments read and written."""
    copy = dtype.itemsize if dtype.itemsize < 4 else 0
    return num_parameters(shape) * (8.0 + 24.0 + copy)

"""Seconds of each phase of a step, from its FLOPs and bytes and a device's rates.

    N parameters, V vocabulary, D width, B sequences decoded together

Decoding reads the weights and the keys and values once per token of the batch: bytes. Prompts and
training are matrix products: FLOPs. The optimizer reads and writes its state: bytes. A rate is what this
code reaches on a device: a share of the device's roof, or what the probe measured.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from graft.config import Config
from graft.engine.native.kv.pages import kv_bytes
from graft.models.shape import ModelShape
from graft.train.algorithm import preset_of
from graft.train.memory.footprint import num_parameters
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
    """Work per second of a device, for each kind of work."""

    decode: float
    """Bytes."""
    prefill: float
    """FLOPs."""
    train: float
    """FLOPs."""
    optimizer: float
    """Bytes."""
    step: float = 0.0
    """Seconds per layer of a decoding step, for any batch: the starts of kernels and small products."""


ROOFS = {"H200": (4.55e12, 763e12), "H100": (3.1e12, 780e12)}
"""Bytes read and bf16 products per second. The H200's are measured; the H100's are the vendor's, reduced by
the share that the H200 misses of its own."""
SHARES = {"decode": 0.62, "prefill": 0.65, "train": 0.62, "optimizer": 0.44}
"""Of a GPU's roofs, as measured with Qwen3-0.6B on an H200 (docs/performance.md)."""
LAUNCH = 2.522335846091047e-05
"""Seconds per layer of a decoding step there, for any number of rows."""


def known_rates(name: str) -> Rates | None:
    """Rates of an H200 or H100; other devices need a probe."""
    for gpu, (bandwidth, flops) in ROOFS.items():
        if gpu in name:
            return Rates(
                decode=SHARES["decode"] * bandwidth,
                prefill=SHARES["prefill"] * flops,
                train=SHARES["train"] * flops,
                optimizer=SHARES["optimizer"] * bandwidth,
                step=LAUNCH,
            )
    return None


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step and of the whole run, without tools and environments."""

    prefill: float
    decode: float
    learn: float
    optimizer: float
    evaluation: float
    """One evaluation: all held-out tasks, sampled and greedy."""
    sft: float
    """The whole warm-up, its checks on held-out tasks included."""
    shortest_sft: float
    """The warm-up until its first check, where `sft.stop_at` may end it; else the whole."""
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
        """A run whose warm-up ends at its first check on held-out tasks."""
        return self.run - self.sft + self.shortest_sft


def larger(one: StepTime, other: StepTime) -> StepTime:
    """The larger of both times, phase by phase."""
    pairs = zip(astuple(one), astuple(other), strict=True)
    return StepTime(*(max(pair) for pair in pairs))


def estimate_step_time(
    config: Config,
    shape: ModelShape,
    dtype: torch.dtype,
    memory: MemoryPlan,
    rates: Rates,
    examples: ExampleLengths | None = None,
) -> StepTime:
    """Estimate a step of attempts as long as `examples`; without them every attempt fills its budget."""
    work, run, sft = workload_of(config), config.run, config.sft
    warm_up = replace(work, groups=sft.batch, samples=1)
    if examples is not None:
        work = replace(work, **examples.attempt._asdict())
        warm_up = replace(warm_up, **examples.example._asdict())
    rounds = config.train.epochs * config.train.minibatches
    held_out = replace(
        work if examples is not None else workload_of(config.as_evaluated()),
        groups=max(run.eval_tasks * len(config.held_out_envs), 1),
        samples=1,
    )
    sampled = replace(held_out, samples=max(config.eval.samples, 1))
    steps = config.train.steps
    evaluations = 0
    if run.eval_tasks and config.task.env:
        between = steps // run.eval_every if run.eval_every else 0
        evaluations = 1 + between + (steps > 0)
    update = optimizer_bytes(shape, dtype) / rates.optimizer
    critic = preset_of(config).needs_critic
    recompute = memory.recompute
    sft_flops = train_flops(shape, warm_up, recompute)

    def prefill(rollout: Workload) -> float:
        prompts = forward_flops(shape, rollout.groups * rollout.prompt, rollout.prompt / 2)
        answers = forward_flops(shape, rollout.rows * rollout.observed, rollout.context / 2)
        return (prompts + answers) / rates.prefill

    longest = workload_of(config).sampled if examples is not None else 0

    def decode(rollout: Workload) -> float:
        return decode_seconds(config, shape, dtype, rollout, memory.kv_tokens, rates, longest)

    def attempts(rollout: Workload) -> float:
        return prefill(rollout) + decode(rollout)

    sft_steps = sft_steps_of(config, examples)
    sft_step = sft_flops / rates.train + update
    check = attempts(replace(work, groups=SFT_CHECK_TASKS, samples=1))

    def warm_up_of(count: int) -> float:
        checks = count // SFT_CHECK_EVERY if sft.stop_at and config.task.env else 0
        return count * sft_step + checks * check

    until_stop = min(SFT_CHECK_EVERY, sft_steps) if sft.stop_at else sft_steps
    return StepTime(
        prefill=prefill(work),
        decode=decode(work),
        learn=learn_flops(config, shape, work, recompute) / rates.train,
        optimizer=rounds * update * (2 if critic else 1),
        evaluation=attempts(sampled) + attempts(held_out),
        sft=warm_up_of(sft_steps),
        shortest_sft=warm_up_of(until_stop),
        steps=steps,
        evaluations=evaluations,
    )


def sft_steps_of(config: Config, examples: ExampleLengths | None) -> int:
    """Steps of the warm-up; with `sft.epochs` from the rows of its file."""
    sft = config.sft
    if sft.steps or examples is None or examples.rows is None:
        return sft.steps
    learned = examples.rows - round(examples.rows * sft.eval_share)
    return math.ceil(sft.epochs * learned / sft.batch)


def body_parameters(shape: ModelShape) -> int:
    ends = shape.head_rows + (0 if shape.tied else shape.vocab_size)
    return num_parameters(shape) - ends * shape.width


def active_parameters(shape: ModelShape) -> int:
    """Count what a token is multiplied by in the body: not the experts that it does not pass through."""
    return body_parameters(shape) - shape.num_params + shape.num_active_params


def read_parameters(shape: ModelShape, batch: Any) -> Any:
    """Count what a step of `batch` rows reads of the body, if rows choose their experts independently."""
    if shape.experts is None:
        return body_parameters(shape)
    experts = shape.experts
    unread = (1 - experts.top_k / experts.count) ** batch
    matrices = len(shape.expert_layers) * (2 + shape.is_gated) * experts.count
    return body_parameters(shape) - matrices * shape.width * experts.ff * unread


def decode_step_bytes(
    shape: ModelShape, dtype: torch.dtype, batch: Any, tokens: Any, rounds_kv: bool = False
) -> Any:
    """Weights, logits of `batch` rows written and read, keys and values of `tokens`; numbers or arrays."""
    weights = (read_parameters(shape, batch) + shape.head_rows * shape.width) * dtype.itemsize
    logits = 2 * batch * shape.head_rows * dtype.itemsize
    return weights + logits + kv_bytes(shape, dtype, rounds_kv) * tokens


def decode_seconds(
    config: Config,
    shape: ModelShape,
    dtype: torch.dtype,
    work: Workload,
    kv_tokens: int,
    rates: Rates,
    longest: int = 0,
) -> float:
    """All rows in waves of those that run together, one step per token, at half their length on average.

    Rows of different lengths are assumed uniform up to twice their mean, but not beyond the `longest`: up to
    twice as many steps, with as many fewer rows on average. 0: all have the same length.
    """
    batch = min(work.rows, config.rollout.concurrency * work.samples, MAX_RUNNING)
    per_row = work.written + work.prompt / work.samples
    batch = max(min(batch, int(kv_tokens / per_row)), 1)
    waves = max(work.rows / batch, 1.0)  # a wave starts as rows of the one before end
    steps = max(min(2 * work.sampled, longest), work.sampled)
    batch = max(batch * work.sampled // steps, 1)
    tokens = batch * work.written / 2 + batch / work.samples * work.prompt  # a shared prompt once
    moved = decode_step_bytes(shape, dtype, batch, tokens, config.engine.rounds_kv)
    step = moved / rates.decode + shape.layers * rates.step
    return waves * steps * step


def attention_flops(shape: ModelShape, tokens: float, seen: float) -> float:
    return 4.0 * shape.layers * shape.q_size * seen * tokens


def forward_flops(shape: ModelShape, tokens: float, seen: float, logits: float = 0.0) -> float:
    head = 2.0 * shape.head_rows * shape.width * logits
    return 2.0 * active_parameters(shape) * tokens + attention_flops(shape, tokens, seen) + head


def mean_seen(work: Workload) -> float:
    """Mean number of tokens that a token of the step attends to."""
    responses = work.samples * work.written
    pairs = work.prompt**2 / 2 + responses * (work.prompt + work.written / 2)
    return pairs / (work.prompt + responses)


def train_flops(
    shape: ModelShape, work: Workload, recompute: bool, with_head: bool = True
) -> float:
    """Forward and backward of a whole step; logits count twice, since chunks recompute them."""
    seen, tokens = mean_seen(work), float(work.unique)
    body = 6.0 * active_parameters(shape) * tokens + 3.5 * attention_flops(shape, tokens, seen)
    again = forward_flops(shape, tokens, seen) if recompute else 0.0
    head = 8.0 * shape.head_rows * shape.width * work.rows * work.sampled * with_head
    return body + again + head


def policy_flops(
    shape: ModelShape, work: Workload, recompute: bool, epochs: int, passes: int
) -> float:
    """Training on a step's rows, and `passes` further forward passes over them."""
    logits = float(work.rows * work.sampled)
    further = passes * forward_flops(shape, float(work.unique), mean_seen(work), logits)
    return epochs * train_flops(shape, work, recompute) + further


def learn_flops(config: Config, shape: ModelShape, work: Workload, recompute: bool) -> float:
    """All passes over a step's rows: training, and the other passes of the algorithm."""
    train = config.train
    passes = int(has_reference(config)) + int(train.epochs * train.minibatches > 1)
    total = policy_flops(shape, work, recompute, train.epochs, passes)
    if preset_of(config).needs_critic:
        total += train.epochs * train_flops(shape, work, recompute, with_head=False)
        total += forward_flops(shape, float(work.unique), mean_seen(work))
    if train.router_balance:  # a pass that counts the tokens of each expert
        total += train.epochs * forward_flops(shape, float(work.unique), mean_seen(work))
    return total


def optimizer_bytes(shape: ModelShape, dtype: torch.dtype) -> float:
    """Gradient read for its norm and for the step; master and two moments read and written."""
    copy = dtype.itemsize if dtype.itemsize < 4 else 0
    return num_parameters(shape) * (8.0 + 24.0 + copy)

"""Seconds and memory of a step on many GPUs: computed, not measured.

A step samples, learns and sends the new weights; with staleness bound s:

    s = 0    step = rollout + learn + sync
    s = 1    step = max(rollout, learn) + sync
    s > 1    step = max(stream, longest / s, learn) + sync

`rollout` ends with the longest answer: lengths are log-normal, a replica's batch shrinks, and the last row
decodes alone. Sampling s steps ahead keeps batches full (`stream`), but no token may be older than s
versions, so the longest answer (`longest`) must fit into s steps.

One H200 with Qwen3-0.6B, 64 tasks x 8 answers of exactly 512 tokens:

    rollout  512 steps x (28 layers x 25 us + 18.5 GB / 2.8 TB/s) + prompts, host   3.9 s
    learn    1.17e15 FLOPs / 476e12 + optimizer                                     2.5 s

Links, overlap and everything that needs two GPUs are assumed. `python -m benchmarks.scaling` derives the
rates and compares the model with measurements.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.fleet.hardware import GPUS, NODE, Gpu
from graft.engine.native.kv.pages import kv_bytes
from graft.models.parallel.sampler import slice_of
from graft.models.shape import ModelShape
from graft.planning.step_time import (
    LAUNCH,
    SHARES,
    Rates,
    attention_flops,
    decode_step_bytes,
    forward_flops,
    optimizer_bytes,
    policy_flops,
)
from graft.train.memory.footprint import (
    activation_bytes,
    decode_bytes,
    gradient_bytes,
    most_head_bytes,
    num_parameters,
    optimizer_state_bytes,
)
from graft.train.memory.plan import RUNTIME, MicroBatchSize
from graft.train.memory.workload import MAX_RUNNING, Workload

BF16 = torch.bfloat16

OVERLAP = 0.9
"""Share of the shorter of computing and gathering that hides behind the longer. Assumed."""
JOIN = 20e-6
"""Seconds per layer of a decoding step in which the parts of a split layer add up. Assumed."""
SPLIT = 16_400 / 35_100
"""Speed of a split learner relative to a whole one: its products do not add to sums of gradients in place.
Measured on one H200 (docs/scale.md)."""
PAGE = 64
"""Tokens of the last, half empty page and of the copied page that a row holds beside its own."""


@dataclass(frozen=True)
class TrainingJob:
    """The work of one step. `work.sampled` is the mean length of an answer."""

    shape: ModelShape
    work: Workload
    spread: float = 0.6
    """Standard deviation of the logarithm of an answer's length; 0: all have the same length."""
    longest: int = 0
    """Longest answer in tokens; 0: no limit."""
    tool_seconds: float = 0.0
    """Seconds that an attempt waits for tools in total."""
    staleness: int = 0
    updates: int = 1
    """Optimizer steps per step."""
    epochs: int = 1
    passes: int = 0
    """Forward passes beside training: of a reference, and of old log-probs before several updates."""

    @cached_property
    def lengths(self) -> NDArray[np.float64]:
        """Tokens of every answer of a step, shortest first."""
        return lengths(self.work.rows, self.work.sampled, self.spread, self.longest)

    @property
    def sampled(self) -> int:
        return self.work.rows * self.work.sampled


def lengths(rows: int, mean: float, spread: float, longest: int = 0) -> NDArray[np.float64]:
    """A log-normal batch without randomness: evenly spaced quantiles, scaled to have this mean.

    >>> lengths(4, 100, 0.6).round().tolist(), lengths(4, 100, 0.6, longest=150).round().tolist()
    ([44.0, 73.0, 107.0, 176.0], [49.0, 81.0, 119.0, 150.0])
    """
    normal = NormalDist()
    drawn = np.array([normal.inv_cdf((i + 0.5) / rows) for i in range(rows)])
    shape = np.exp(spread * drawn)
    limit = float(longest) if longest else math.inf
    if mean >= limit:
        return np.full(rows, limit)
    scale = 1.0
    for _ in range(64):  # the limit lowers the mean, so scale the rest up
        scale *= mean / np.minimum(scale * shape, limit).mean()
    return np.minimum(scale * shape, limit)


# measured on one H200; other GPUs are scaled by their roofs


DECODED = {576: 1654664595523.791, 1024: 2829661672069.0605, 2048: 2523666187407.199}
"""A model's width -> bytes per second of decoding."""
TRAINED = {
    576: 257545806348280.56, 1024: 476369684007369.25, 2048: 576138229254497.5, 2560: 576696927177895.9,
}  # fmt: skip
"""A model's width -> FLOPs per second of training."""
HOST = 5.583329634232959e-07
"""Seconds per sampled token of templates, environments and the loop."""


def rates_on(gpu: Gpu, shape: ModelShape) -> Rates:
    """Measured rates: interpolated between measured widths, constant beyond the widest."""
    known = GPUS["h200"]

    def at(measured: dict[int, float]) -> float:
        return float(np.interp(shape.width, list(measured), list(measured.values())))

    return Rates(
        decode=at(DECODED) * gpu.bandwidth / known.bandwidth,
        prefill=SHARES["prefill"] * gpu.flops,
        train=at(TRAINED) * gpu.flops / known.flops,
        optimizer=SHARES["optimizer"] * gpu.bandwidth,
        step=LAUNCH,
    )


# sampling


class Replica(NamedTuple):
    """One engine on `tp` GPUs, its share of a step, and how many rows it runs at once."""

    tp: int
    groups: int
    slots: int

    def rows(self, job: TrainingJob) -> NDArray[np.float64]:
        """Its answers, evenly spaced among all; the longest of all is one of them."""
        count, every = self.groups * job.work.samples, job.lengths
        if count >= len(every):
            return every
        return every[len(every) - 1 - (np.arange(count) * len(every) // count)]


def step_seconds(
    job: TrainingJob, rates: Rates, tp: int, batch: Any, groups: Any, private: Any
) -> NDArray[np.float64]:
    """One decoding step of `batch` rows with `private` tokens in total; arrays or numbers."""
    moved = decode_step_bytes(job.shape, BF16, batch, private + groups * job.work.prompt)
    return job.shape.layers * (rates.step + JOIN * (tp > 1)) + moved / (tp * rates.decode)


def prompt_seconds(job: TrainingJob, rates: Rates, replica: Replica) -> float:
    work = job.work
    flops = forward_flops(job.shape, replica.groups * work.prompt, work.prompt / 2)
    return flops / (replica.tp * rates.prefill)


def rollout_seconds(job: TrainingJob, rates: Rates, replica: Replica, host: float = HOST) -> float:
    """A replica's whole share, from the first prompt to the end of its longest answer.

    Rows beyond the slots begin when others end. All running rows advance by one token per step, so the
    schedule follows from the lengths alone, and the seconds of a step from the number of running rows.
    """
    rows = replica.rows(job)
    begins, ends = schedule(rows, replica.slots)
    times = np.unique(np.concatenate([begins, ends]))
    middle, spans = (times[:-1] + times[1:]) / 2, np.diff(times)
    running = np.searchsorted(np.sort(begins), middle) - np.searchsorted(np.sort(ends), middle)
    # tokens written so far by running rows: the sum of (now - begin)
    started = np.concatenate([[0.0], np.cumsum(np.sort(begins))])
    by_end = np.argsort(ends)
    stopped = np.concatenate([[0.0], np.cumsum(begins[by_end])])
    written = started[np.searchsorted(np.sort(begins), middle)]
    written = written - stopped[np.searchsorted(ends[by_end], middle)]
    private = running * middle - written
    groups = seen_groups(running, min(len(rows), replica.slots), job.work.samples)
    decode = float((spans * step_seconds(job, rates, replica.tp, running, groups, private)).sum())
    waves = math.ceil(len(rows) / replica.slots)
    tokens = float(rows.sum())
    return prompt_seconds(job, rates, replica) + decode + host * tokens + waves * job.tool_seconds


def schedule(rows: NDArray[np.float64], slots: int) -> tuple[NDArray[np.float64], ...]:
    """When each row begins and ends, in decoding steps; a free slot takes the next one."""
    if slots >= len(rows):
        return np.zeros(len(rows)), rows
    shuffled = np.random.default_rng(0).permutation(rows)  # lengths are unknown when rows begin
    free = [0.0] * slots
    begins = np.empty(len(rows))
    for index, length in enumerate(shuffled):
        begins[index] = free[0]
        heapq.heapreplace(free, free[0] + float(length))
    return begins, begins + shuffled


def seen_groups(running: Any, together: int, samples: int) -> Any:
    """Prompts read while `running` of `together` rows are left: groups that have a row left.

    >>> seen_groups(8, together=8, samples=2), seen_groups(4, together=8, samples=2)
    (4.0, 3.0)
    """
    return together / samples * (1 - (1 - running / together) ** samples)


class RolloutStream(NamedTuple):
    """Continuous sampling: seconds for a step's share, and of its longest answer."""

    share: float
    longest: float


def stream_seconds(
    job: TrainingJob, rates: Rates, replica: Replica, in_flight: float, host: float = HOST
) -> RolloutStream:
    """`in_flight` rows (at most the slots) are always active, some of them waiting for tools."""
    rows = replica.rows(job)
    mean, count = float(rows.mean()), len(rows)
    kept = min(in_flight, replica.slots)
    written = float((rows**2).sum() / (2 * rows.sum()))  # a running row is more often a long one
    running, step = kept, 0.0
    for _ in range(64):
        groups = min(kept, running) / job.work.samples
        step = float(step_seconds(job, rates, replica.tp, running, groups, running * written))
        if not job.tool_seconds:
            break
        decoding = mean * step / (mean * step + job.tool_seconds)
        running = (running + max(kept * decoding, 1e-3)) / 2
    share = count * (mean * step + job.tool_seconds) / kept
    share += prompt_seconds(job, rates, replica) + host * float(rows.sum())
    return RolloutStream(share, float(rows.max()) * step + job.tool_seconds)


# learning


class Learning(NamedTuple):
    """Seconds of a learner group on one step."""

    compute: float
    gather: float
    """Weights gathered and gradients scattered, whether hidden behind computing or not."""
    join: float
    """Sums of split layers, or of replicas' gradients; never hidden."""
    optimizer: float

    @property
    def seconds(self) -> float:
        longer, shorter = max(self[:2]), min(self[:2])
        return longer + (1 - OVERLAP) * shorter + self.join + self.optimizer


def slowest_share(job: TrainingJob, ranks: int) -> float:
    """Load of the busiest of `ranks` relative to the mean: a row is not divided.

    512 rows of 1,000 tokens on 128 ranks are 4,000 each; one answer of 6,000 makes it 1.5. Of several
    updates one has the longest row of all, and the median update a shorter one.
    """
    mean = job.work.unique / (job.updates * ranks)
    longest = float(job.lengths[-1 - min(job.updates // 2, job.work.rows - 1)])
    return max(1.0, (longest + job.work.prompt) / mean)


def learn_seconds(
    job: TrainingJob, gpu: Gpu, rates: Rates, gpus: int, tp: int, micro: MicroBatchSize
) -> Learning:
    """FSDP2 over gpus / tp ranks, each of them `tp` GPUs that split the layers."""
    shape, work, ranks = job.shape, job.work, gpus // tp
    flops = policy_flops(shape, work, micro.recompute, job.epochs, job.passes)
    # a token of a long answer attends to more than one of the mean length
    further = float((job.lengths**2).sum() / job.lengths.sum() - job.lengths.mean()) / 2
    times = job.epochs * (4.5 if micro.recompute else 3.5) + job.passes
    flops += times * attention_flops(shape, float(job.sampled), further)
    busiest = slowest_share(job, ranks)
    compute = flops / (gpus * rates.train) * busiest
    own = float(work.unique) / ranks * busiest
    micros = max(job.updates, math.ceil(own / micro.tokens))
    part = num_parameters(shape) / tp
    near = max(NODE // tp, 1)
    # weights in bf16 before the forward and again before the backward, gradients in fp32 after it
    gathers = micros * (2 * job.epochs + job.passes) * gpu.gather(2 * part, ranks, per_node=near)
    sums = micros * job.epochs * gpu.gather(4 * part, ranks, per_node=near)
    # attention and MLP each end in a sum of all parts, forward and backward, and when computed again
    joins = 2 * (job.epochs * (3 if micro.recompute else 2) + job.passes) * shape.layers
    join = joins * 2 * gpu.gather(own * shape.width * 2, tp)
    update = job.updates * job.epochs * optimizer_bytes(shape, BF16) / gpus / rates.optimizer
    return Learning(compute, gathers + sums, join, update)


def replica_seconds(
    job: TrainingJob, gpu: Gpu, rates: Rates, gpus: int, micro: MicroBatchSize
) -> Learning:
    """A whole learner on each GPU; gradients are summed once per update."""
    alone = learn_seconds(job, gpu, rates, 1, 1, micro)
    sums = 2 * gpu.gather(4.0 * num_parameters(job.shape), gpus)
    updates = job.updates * job.epochs
    compute = alone.compute / gpus * slowest_share(job, gpus)
    return Learning(compute, 0.0, updates * sums, alone.optimizer)


# memory of one GPU


def learner_bytes(job: TrainingJob, gpus: int, tp: int) -> dict[str, float]:
    """What a learner always holds: 1 / gpus of everything, and two whole layers at a time."""
    shape = job.shape
    part, ranks = num_parameters(slice_of(shape, tp)), gpus // tp
    held = {
        "weights": part * 2 / ranks,
        "masters and moments": optimizer_state_bytes(part, BF16) / ranks,
        "gradients": gradient_bytes(part, BF16, True) / ranks,
    }
    if ranks > 1:
        ends = slice_of(shape, tp).head_rows * shape.width * (1 if shape.tied else 2)
        block = (part - ends) / shape.layers
        held["gathered layers"] = 2 * block * (2 + 4) + ends * 2
    return {name: size for name, size in held.items() if size}


def learning_bytes(job: TrainingJob, gpu: Gpu, gpus: int, tp: int, micro: MicroBatchSize) -> float:
    """What a micro-batch adds; it holds at least the longest row."""
    work, part = job.work, slice_of(job.shape, tp)
    row = math.ceil(float(job.lengths[-1])) + work.prompt
    tokens = max(min(micro.tokens, math.ceil(work.unique * tp / gpus)), row)
    kept = activation_bytes(part, BF16, tokens, work, True, micro.recompute)
    return kept + most_head_bytes(part, BF16, tokens, gpu.device_memory)


def pool_tokens(job: TrainingJob, gpu: Gpu, tp: int, taken: float) -> int:
    """Tokens of a replica's KV pool where `taken` bytes of each GPU are in use."""
    part = slice_of(job.shape, tp)
    left = gpu.device_memory.usable - taken - RUNTIME["cuda"]
    return max(int(left / kv_bytes(part, BF16)), 0)


def slots_in(job: TrainingJob, tokens: int) -> int:
    """Rows that run together, at their mean length; 0 where the longest row alone does not fit."""
    work = job.work
    if tokens < float(job.lengths[-1]) + work.prompt + PAGE:
        return 0
    row = work.sampled + work.prompt / work.samples + 2 * PAGE
    return max(min(int(tokens / row), MAX_RUNNING), 1)


def engine_bytes(job: TrainingJob, gpu: Gpu, tp: int) -> dict[str, float]:
    """What a rollout GPU holds beside its KV pool."""
    part = slice_of(job.shape, tp)
    batch = min(job.work.rows, MAX_RUNNING)
    return {
        "weights": num_parameters(part) * 2.0,
        "a decoding step": float(decode_bytes(part, BF16, batch, 0, gpu.device_memory)),
    }

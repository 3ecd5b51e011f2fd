"""The probe: one micro-batch forward and backward and some decoding, timed for a few seconds.

The model has the recipe's shape and random weights, and rows are random tokens of likely lengths; everything
else is what a run uses: Forest, Decoder, loss, Optimizer and engine. On a CPU the work is reduced to a few
seconds, and the rates are scaled up.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graft.algos.presets import build, prepare_of
from graft.config import Config
from graft.engine.native.engine import NativeEngine
from graft.models.decoder import Decoder
from graft.models.lora.training import Lora, num_trained, target_sizes
from graft.models.shape import ModelShape
from graft.models.tree.forest import Forest
from graft.planning.step_time import (
    Rates,
    decode_step_bytes,
    forward_flops,
    optimizer_bytes,
    train_flops,
)
from graft.rollout.batching import to_batch, trajectories_of
from graft.train.algorithm import preset_of
from graft.train.memory.device_memory import DeviceMemory
from graft.train.memory.footprint import (
    activation_bytes,
    adapter_gradient_bytes,
    gradient_bytes,
    head_bytes,
    num_parameters,
    optimizer_state_bytes,
)
from graft.train.memory.plan import MemoryPlan
from graft.train.memory.workload import (
    SequenceLengths,
    Workload,
    largest_micro,
    page_size,
    workload_of,
)
from graft.train.optimizer import Optimizer, schedule
from graft.train.rollouts.truncation import truncation_of
from graft.types import Author, Episode, Leaf, Sampling, Span, Task, Trajectory

CPU_FLOPS = 2e10
"""FLOPs of each part of the probe on a CPU: a second or two."""
GPU_BATCH = 512
DECODE_STEPS = {"cpu": 8, "cuda": 32}
ROUNDS = 3
"""The quickest round counts: the first compiles kernels, creates the optimizer's state and captures graphs,
and others may be slowed down by other processes."""


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """Measured rates, and the memory of training beside its prediction."""

    rates: Rates
    tokens: int
    """Tokens of the micro-batch."""
    learn: float
    """Seconds of its forward and backward pass."""
    optimizer: float
    batch: int
    """Sequences decoded together."""
    decode_step: float
    """Seconds."""
    peak: int | None
    """Peak bytes of training; None where the system does not report them."""
    predicted_peak: int


def probe(
    config: Config,
    shape: ModelShape,
    dtype: torch.dtype,
    device_memory: DeviceMemory,
    memory: MemoryPlan,
    lengths: SequenceLengths | None = None,
) -> MeasuredRates:
    """Measure attempts of these lengths, or attempts that fill their budget."""
    work = workload_of(config)
    if lengths is not None:
        work = replace(work, prompt=lengths.prompt, sampled=lengths.sampled + lengths.observed)
    policy = random_policy(shape, dtype, device_memory.device, config.run.seed)
    policy.recompute = memory.recompute
    trained = training_work(config, shape, device_memory, memory.tokens_per_micro, work)
    learn, optimizer, peak = time_training(config, policy, trained, device_memory.device)
    predicted = training_peak(config, shape, dtype, trained, device_memory, memory.recompute)
    batch = decode_work(config, shape, device_memory, memory.kv_tokens, work)
    prefill, step = time_decoding(config, policy, batch, device_memory)
    prompts = forward_flops(shape, batch.groups * batch.prompt, batch.prompt / 2)
    private = batch.sampled + DECODE_STEPS[device_memory.device.type] / 2
    seen = batch.rows * private + batch.groups * batch.prompt
    moved = decode_step_bytes(shape, dtype, batch.rows, seen)
    rates = Rates(
        decode=moved / step,
        prefill=prompts / prefill,
        train=train_flops(shape, trained, memory.recompute) / learn,
        optimizer=optimizer_bytes(shape, dtype) / optimizer,
    )
    return MeasuredRates(rates, trained.unique, learn, optimizer, batch.rows, step, peak, predicted)


def training_peak(
    config: Config,
    shape: ModelShape,
    dtype: torch.dtype,
    work: Workload,
    device_memory: DeviceMemory,
    recompute: bool,
) -> int:
    """Predicted peak bytes of learning `work` at once, without engine and runtime."""
    params, lora = num_parameters(shape), config.lora
    state = params * dtype.itemsize
    if lora.rank:
        state += 12 * num_trained(shape, lora.rank, lora.targets)  # adapters and two moments
        state += adapter_gradient_bytes(shape, dtype, lora.rank, lora.targets)
        if device_memory.device.type == "cpu":
            sizes = target_sizes(shape, lora.targets)
            state += sum(out * into for out, into in sizes) * dtype.itemsize
    else:
        state += optimizer_state_bytes(params, dtype) + gradient_bytes(
            params, dtype, device_memory.fused
        )
    kept = activation_bytes(shape, dtype, work.unique, work, device_memory.fused, recompute)
    return state + kept + head_bytes(shape, dtype, work.rows * work.sampled, device_memory)


def training_work(
    config: Config, shape: ModelShape, device_memory: DeviceMemory, tokens: int, work: Workload
) -> Workload:
    """Whole groups of these lengths, about one micro-batch in total."""
    tokens = largest_micro(config, tokens)
    if device_memory.device.type == "cpu":
        tokens = min(tokens, max(int(CPU_FLOPS / (6 * num_parameters(shape))), 64))
    prompt, sampled = work.prompt, work.sampled
    if work.context > tokens:  # a CPU and a large model: shorter rows of the same kind
        prompt = max(tokens * work.prompt // work.context, 1)
        sampled = max(tokens - prompt, 1)
    samples = max(min(work.samples, (tokens - prompt) // sampled), 1)
    groups = max(min(work.groups, tokens // (prompt + samples * sampled)), 1)
    return Workload(groups, samples, prompt, sampled)


def decode_work(
    config: Config, shape: ModelShape, device_memory: DeviceMemory, kv_tokens: int, work: Workload
) -> Workload:
    """Sequences in the middle of their answers: `sampled` tokens are already written."""
    steps = DECODE_STEPS[device_memory.device.type]
    prompt, written = work.prompt, max(min(work.sampled // 2, 256), 1)
    rows = min(work.rows, GPU_BATCH)
    if device_memory.device.type == "cpu":
        prompt, written = min(prompt, 128), min(written, 32)
        tokens = CPU_FLOPS / (2 * num_parameters(shape))
        rows = min(rows, max(int(tokens / (written + prompt / work.samples + steps)), 1))
    page = page_size(config, device_memory)
    fitting = int(kv_tokens / (written + steps + 2 * page + (prompt + page) / work.samples))
    rows = max(min(rows, fitting), 1)
    samples = min(work.samples, rows)
    return Workload(max(rows // samples, 1), samples, prompt, written)


@torch.no_grad()
def random_policy(
    shape: ModelShape, dtype: torch.dtype, device: torch.device, seed: int
) -> Decoder:
    """Random weights, created on the device."""
    policy = Decoder.empty(shape, dtype, device)
    torch.manual_seed(seed)
    for weight in policy.parameters():
        if weight.ndim == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, 1 / math.sqrt(weight.shape[1]))
    return policy


def random_rows(work: Workload, vocab_size: int) -> list[Trajectory]:
    rng, count = random.Random(0), work.sampled
    episodes: list[Episode] = []
    for number in range(work.groups):
        episode = Episode(Task(str(number), "probe"))
        episode.append(Span(None, Author.TASK, _tokens(rng, work.prompt, vocab_size)))
        for _ in range(work.samples):
            drawn = _tokens(rng, count, vocab_size)
            per_token = [-1.0] * count, [1.0] * count, [0] * count, [True] * count
            span = Span(0, Author.POLICY, drawn, drawn, *per_token)
            episode.leaves.append(Leaf((episode.append(span),)))
        episodes.append(episode)
    return trajectories_of(episodes)


def _tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


def time_training(
    config: Config, policy: Decoder, work: Workload, device: torch.device
) -> tuple[float, float, int | None]:
    """Seconds of one micro-batch and of one optimizer step, and their peak memory."""
    preset = replace(preset_of(config), distill_coef=0.0)  # no teacher scores these rows
    _, _, loss, _ = build(preset)
    rows = random_rows(work, policy.shape.vocab_size)
    batch = to_batch(rows)
    ones = torch.ones_like(batch.logprobs)
    drawn = {"old_logprobs": batch.logprobs, "ref_logprobs": batch.logprobs}
    batch = batch.replace(advantages=ones, returns=ones, values=batch.zeros(), **drawn)
    batch = prepare_of(preset)(batch)
    section, lora = config.lora, None
    if section.rank:
        lora = Lora(policy, rank=section.rank, alpha=section.alpha, targets=section.targets)
    optimizer = Optimizer([lora or policy], lr=1e-6, schedule=schedule("constant", 0, 1, 0.0))
    held = sum(p.numel() * p.element_size() for p in policy.parameters())
    held += sum(m.numel() * 4 for m in optimizer.masters if lora or m.dtype != policy.dtype)
    if lora is not None and device.type == "cpu":
        held += sum(t.base.numel() * t.base.element_size() for t in lora.targets)

    def compute_gradients() -> None:
        forest = Forest(rows, batch.mask, device)
        how = config.rollout.temperature, None, truncation_of(config)
        logp, entropy = forest.logprobs(policy, *how)
        loss_NT, _ = loss(logp, entropy, batch.to(device))
        total: Tensor = loss_NT.sum() / max(batch.num_tokens, 1)
        total.backward()
        optimizer.collect()

    def update_weights() -> None:
        optimizer.step()
        if lora is not None:
            lora.merge()

    read_peak = watch_memory(device, held)
    rounds = [
        (_timed(device, compute_gradients), _timed(device, update_weights)) for _ in range(ROUNDS)
    ]
    learn, update = map(min, zip(*rounds, strict=True))
    return learn, update, read_peak()


def time_decoding(
    config: Config, policy: Decoder, work: Workload, device_memory: DeviceMemory
) -> tuple[float, float]:
    """Seconds of all prompts, and of one decoding step."""
    device, page = device_memory.device, page_size(config, device_memory)
    steps = DECODE_STEPS[device.type]
    per_row = work.sampled + steps + 3 * page
    engine = NativeEngine(
        policy,
        kv_tokens=work.groups * (work.prompt + 2 * page) + work.rows * per_row,
        page_size=page,
        seed=config.run.seed,
    )
    rounds: list[tuple[float, float]] = []
    for number in range(ROUNDS):
        rounds.append(asyncio.run(_decode(engine, work, steps, device, number)))
        engine.load(None, version=number + 1)  # clear the cache
    engine.close()
    prefill, decode = map(min, zip(*rounds, strict=True))
    return prefill, decode / steps


async def _decode(
    engine: NativeEngine, work: Workload, steps: int, device: torch.device, seed: int
) -> tuple[float, float]:
    rng = random.Random(seed)

    async def sample(contexts: Sequence[Any], count: int) -> float:
        started = _now(device)
        forced = Sampling(max_tokens=count)  # no stop tokens
        await asyncio.gather(*(context.sample(forced) for context in contexts))
        return _now(device) - started

    roots = [engine.open(_tokens(rng, work.prompt, engine.vocab_size)) for _ in range(work.groups)]
    prefill = await sample(roots, 1)
    rows = [root.fork() for root in roots for _ in range(work.samples)]
    for row in rows:
        row.append(_tokens(rng, work.sampled, engine.vocab_size))
    await sample(rows, 1)
    seconds = await sample(rows, steps)
    for context in (*rows, *roots):
        context.close()
    return prefill, seconds


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _timed(device: torch.device, work: Callable[[], object]) -> float:
    started = _now(device)
    work()
    return _now(device) - started


def watch_memory(device: torch.device, held: int) -> Callable[[], int | None]:
    """Start measuring; the returned function gives the peak, including the `held` bytes from before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return lambda: torch.cuda.max_memory_allocated(device)
    try:  # reset the kernel's high-water mark of this process
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = _resident("VmRSS")
    except OSError:
        return lambda: None
    return lambda: _resident("VmHWM") - before + held


def _resident(field: str) -> int:
    with suppress(StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024
    raise OSError(f"the kernel does not report {field}")

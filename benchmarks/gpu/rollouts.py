"""The engine alone: rates of forced-length groups, forks, and whether its log-probs are right.

Log-prob and entropy of every token are part of every completion, so they are always in the time.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.report import Row
from benchmarks.gpu.roofs import READ, UNMEASURED
from benchmarks.gpu.works import GOALS, KV8_GOALS, Work, random_tokens
from benchmarks.shapes import SHAPES, activation_bytes, asked_kernels, random_decoder
from graft.engine.native.engine import NativeEngine
from graft.engine.native.kv.pages import kv_bytes
from graft.models.decoder import Decoder
from graft.models.shape import ModelShape
from graft.types import Completion, Sampling

WARM_UP = 128
"""Response tokens of the round that is not counted: kernels are compiled and graphs captured then."""

TRAINING_BYTES = 20
"""Per weight: bf16 weight and gradient; fp32 master, two moments and the sum of the gradients."""
WORKSPACE_BYTES = 12e9
"""Logits of a chunk, graphs, what the allocator cannot join."""


def pool_tokens(bench: Bench, shape: ModelShape, work: Work, tokens_per_micro: int = 0) -> int:
    """Room for all sequences at once, or what the device has left beside a trainer."""
    held = shape.num_params * (TRAINING_BYTES if tokens_per_micro else 2) + WORKSPACE_BYTES
    held += tokens_per_micro * activation_bytes(shape)
    room = (bench.memory_bytes - held) / kv_bytes(shape, bench.dtype)
    return int(min(work.kv_tokens, room))


class Player:
    """A decoder with random weights and an engine that samples groups from it."""

    def __init__(self, bench: Bench, name: str, work: Work, kv: str = "model") -> None:
        self.bench, self.work = bench, work
        self.shape = SHAPES[name]
        self.decoder = random_decoder(self.shape, bench.device, bench.dtype, kv=kv)
        tokens = pool_tokens(bench, self.shape, work)
        kernels = asked_kernels(self.decoder)
        self.engine = NativeEngine(self.decoder, kv_tokens=tokens, kernels=kernels)
        self.rng = random.Random(0)

    def play(self, response: int | None = None) -> tuple[float, list[Completion]]:
        """Seconds of one round, from new prompts to the last token."""
        work, engine = self.work, self.engine
        response = response or work.response
        prompts = work.random_prompts(self.rng, self.shape.vocab_size)
        done: list[Completion] = []
        seconds = self.bench.time(
            lambda: done.extend(asyncio.run(sample_groups(engine, prompts, work.samples, response)))
        )
        for completion in done:
            numbers = [*completion.logprobs, *completion.entropies]
            if len(numbers) != 2 * response or not all(map(math.isfinite, numbers)):
                raise RuntimeError(f"a completion of {len(completion.tokens)} tokens: {numbers}")
        return seconds, done

    def rate(self) -> float:
        """Tokens a second of one round."""
        return self.work.sampled / self.play()[0]

    def close(self) -> None:
        self.engine.close()


async def sample_groups(
    engine: NativeEngine, prompts: Sequence[Sequence[int]], samples: int, response: int
) -> list[Completion]:
    """`samples` forks of every prompt, all at once, each exactly `response` tokens long."""
    sampling = Sampling(max_tokens=response, min_tokens=response)
    contexts = []
    for prompt in prompts:
        root = engine.open(prompt)
        contexts += [root, *(root.fork() for _ in range(samples - 1))]
    done = await asyncio.gather(*(context.sample(sampling) for context in contexts))
    for context in contexts:
        context.close()
    return done


def rollouts(bench: Bench, name: str, work: Work, kv: str = "model") -> list[Row]:
    player = Player(bench, name, work, kv)
    player.play(min(WARM_UP, work.response))
    rates = bench.repeat(player.rate)
    player.close()
    goals, suffix = (GOALS, "") if kv == "model" else (KV8_GOALS, f", kv {kv}")
    must, aim = goals.get((name, work), (None, None))
    note = _share_of_bounds(bench, player.shape, work, median(rates), kv == "fp8")
    title = f"{name} rollouts {work.title}{suffix}"
    return [Row(title, "tok/s", median(rates), must, aim, rounds=rates, note=note)]


def _share_of_bounds(
    bench: Bench, shape: ModelShape, work: Work, rate: float, rounds_kv: bool
) -> str:
    """The rate as a share of what reading alone would allow, a prompt read once or by every sample."""
    read = bench.roofs.get(READ, UNMEASURED[READ]) * 1e12
    shares = []
    for is_shared, how in ((True, "once"), (False, "by every sample")):
        how_much = {"is_shared": is_shared, "rounds_kv": rounds_kv}
        bound = work.sampled * read / work.decode_bytes(shape, bench.dtype, **how_much)
        shares.append(f"{100 * rate / bound:.0f}% of {bound / 1e3:.1f}k (prompts read {how})")
    return ", ".join(shares)


FORKS, FORK_LENGTH = 1000, 2000


def forks(bench: Bench, name: str) -> list[Row]:
    """A computed context forked many times, then one token from each fork."""
    is_small = name == "tiny"
    count, length = (20, 60) if is_small else (FORKS, FORK_LENGTH)
    work = Work(1, count, length, 1)
    player = Player(bench, name, work)
    engine, one = player.engine, Sampling(max_tokens=1, min_tokens=1)

    async def once() -> tuple[float, float, float, float]:
        root = engine.open(random_tokens(player.rng, length, player.shape.vocab_size))
        await root.sample(one)  # its pages are computed now; the fork below shares them
        free = engine.stats["pages_free"]
        contexts = []
        forking = bench.time(lambda: contexts.extend(root.fork() for _ in range(count)))
        taken = free - engine.stats["pages_free"]
        started = time.perf_counter()
        await asyncio.gather(*(context.sample(one) for context in contexts))
        first = time.perf_counter() - started
        grown = free - engine.stats["pages_free"]
        for context in (root, *contexts):
            context.close()
        return forking / count * 1e6, taken / count, grown / count, first * 1e3

    asyncio.run(once())
    several: list[tuple[float, float, float, float]] = []

    def round_() -> float:
        several.append(asyncio.run(once()))
        return several[-1][0]

    times = bench.repeat(round_)
    player.close()
    _, taken, grown, first = map(max, zip(*several, strict=True))
    title = f"{name} fork, {count:,} at length {length:,}"
    note = (
        f"pages taken per fork: {taken:.3g} when it forks, {grown:.3g} after its first token; "
        f"first tokens of all of them in {first:.0f} ms"
    )
    return [
        Row(title, "us", median(times), 40, 15, is_less_better=True, rounds=times, note=note),
        Row(f"{name} pages copied per fork", "pages", grown, 1, 1, is_less_better=True),
    ]


@dataclass(slots=True)
class Gap:
    """Absolute differences of log-probs."""

    mean: float
    p999: float
    max: float

    @classmethod
    def between(cls, ours: torch.Tensor, truth: torch.Tensor) -> Gap:
        gap = (ours - truth).abs().flatten().double().cpu()
        return cls(float(gap.mean()), float(gap.quantile(0.999)), float(gap.max()))

    def __str__(self) -> str:
        return f"mean {self.mean:.2e}, p99.9 {self.p999:.2e}, max {self.max:.2e}"


GUARDED = 4  # sequences


def guard(bench: Bench, name: str, work: Work) -> list[Row]:
    """Fast and right: sampled log-probs against transformers in float32, same weights.

    transformers in the engine's own precision shows what that precision costs.
    """
    from benchmarks.gpu.peers import peer_model

    player = Player(bench, name, work)
    prompts = work.random_prompts(player.rng, player.shape.vocab_size)
    groups = asyncio.run(sample_groups(player.engine, prompts, work.samples, work.response))
    picked = range(0, work.sequences, max(work.sequences // GUARDED, 1))[:GUARDED]
    sequences = [prompts[i // work.samples] + groups[i].tokens for i in picked]
    ours = torch.tensor([groups[i].logprobs for i in picked], device=bench.device)
    player.close()
    truth, peer = (
        _logprobs(peer_model(player.decoder, dtype), sequences, work.prompt, bench.device)
        for dtype in (torch.float32, bench.dtype)
    )
    gap = Gap.between(ours, truth)
    title = f"{name} log-probs against float32"
    note = f"{gap}; transformers in {str(bench.dtype)[6:]}: {Gap.between(peer, truth)}"
    return [Row(title, "mean gap", gap.mean, is_less_better=True, note=note)]


@torch.no_grad()
def _logprobs(
    model: torch.nn.Module, sequences: list[list[int]], prompt: int, device: torch.device
) -> torch.Tensor:
    """[N, response]; one sequence at a time, since float32 logits of a long one fill a gigabyte."""
    rows = []
    for sequence in sequences:
        ids = torch.tensor([sequence], device=device)
        logits = model(ids).logits[0, prompt - 1 : -1].float()
        chosen = logits.gather(1, ids[0, prompt:, None])[:, 0]
        rows.append(chosen - logits.logsumexp(-1))
    return torch.stack(rows)


def same_weights(decoder: Decoder, engine: NativeEngine) -> bool:
    """Whether the engine reads the trainer's own memory."""
    ours, theirs = decoder.parameters(), engine.decoder.parameters()
    return all(a.data_ptr() == b.data_ptr() for a, b in zip(ours, theirs, strict=True))

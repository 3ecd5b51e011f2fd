"""The learner, and the whole GRPO step: `collect`, credit, update, the engine's next version.

A word of the tokenizer is "w17 " for token 17, so prompts have exactly the length they should have,
and rollouts pass through the same code as in a run: template, tokenizer, environment, reward.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from functools import lru_cache
from statistics import median

import tokenizers
from tokenizers import models, pre_tokenizers

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.report import Row
from benchmarks.gpu.rollouts import pool_tokens, same_weights
from benchmarks.gpu.roofs import MULTIPLY, UNMEASURED
from benchmarks.gpu.works import Work, random_tokens
from benchmarks.shapes import SHAPES, asked_kernels, random_decoder
from graft.algos.presets import build
from graft.engine.native.engine import NativeEngine
from graft.engine.native.kv.pages import kv_bytes
from graft.envs.base import BaseEnv
from graft.rollout.batching import to_batch, trajectories_of
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.train.learner import Learner
from graft.train.optimizer import Optimizer, schedule
from graft.types import (
    Author,
    Completion,
    Episode,
    Finish,
    Leaf,
    Sampling,
    Span,
    Status,
    Task,
    Trajectory,
    Turn,
)

PEAK_TFLOPS = 989
"""The vendor's figure for bf16, by which others state their utilisation."""

GIGABYTE = 1e9


@lru_cache(maxsize=1)
def word_tokenizer(vocab_size: int) -> FastTokenizer:
    """One word per token and no token that ends a turn: lengths are forced."""
    vocabulary = {f"w{i}": i for i in range(vocab_size)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return FastTokenizer(backend, chat_templates={"default": template})


class RandomWords(BaseEnv):
    """A prompt of random words; the turn is over with the policy's answer."""

    def __init__(self, length: int, vocab_size: int) -> None:
        super().__init__()
        self.length, self.vocab_size = length, vocab_size

    def pose(self) -> str:
        return " ".join(f"w{self.rng.randrange(self.vocab_size)}" for _ in range(self.length))

    def respond(self, action: str) -> Turn:
        return Turn(terminated=True)


def reward(task: Task, trajectory: Trajectory) -> float:
    """Some function of the tokens, spread over [0, 1]."""
    return sum(trajectory.spans[-1].tokens) % 7 / 6


class Trainer:
    """Policy, engine and learner over one set of weights, and the steps they take together."""

    def __init__(
        self,
        bench: Bench,
        name: str,
        work: Work,
        *,
        kv_tokens: int | None = None,
        tokens_per_micro: int | None = None,
    ) -> None:
        self.bench, self.work, self.shape = bench, work, SHAPES[name]
        self.policy = random_decoder(self.shape, bench.device, bench.dtype)
        micro = tokens_per_micro or bench.tokens_per_micro
        while not kv_tokens and micro > work.unique // work.prompts:
            if pool_tokens(bench, self.shape, work, micro) >= work.kv_tokens // 2:
                break
            micro //= 2  # rather than samples in many waves
        self.kv_tokens = kv_tokens or pool_tokens(bench, self.shape, work, micro)
        kernels = asked_kernels(self.policy)
        self.engine = NativeEngine(self.policy, kv_tokens=self.kv_tokens, kernels=kernels)
        _, self.credit, loss, reduction = build("grpo")
        optimizer = Optimizer([self.policy], lr=1e-6, schedule=schedule("constant", 0, 1, 0.0))
        self.learner = Learner(self.policy, optimizer, loss, reduction, micro)
        self.version = 0
        self.metrics: dict[str, float] = {}

    def rollout(self) -> list[Episode]:
        work, vocab_size = self.work, self.shape.vocab_size
        setup = RolloutSetup(
            engine=self.engine,
            chat=Chat(word_tokenizer(vocab_size)),
            make_env=lambda task: RandomWords(work.prompt, vocab_size),
            sampling=Sampling(max_tokens=work.response, min_tokens=work.response),
            reward=reward,
            max_context=work.prompt + work.response,
            salt=self.version,
        )
        first = self.version * work.prompts
        tasks = [Task(f"words:{first + i}", "words", seed=first + i) for i in range(work.prompts)]
        episodes = collect(tasks, setup, independent(work.samples))
        bad = {leaf.status for e in episodes for leaf in e.leaves if not leaf.status.is_trainable}
        sampled = sum(len(s) for e in episodes for s in e.spans if s.author is Author.POLICY)
        if bad or sampled != work.sampled:
            error = next(
                (s.info["error"] for e in episodes for s in e.spans if "error" in s.info), ""
            )
            raise RuntimeError(f"{sampled} of {work.sampled} tokens sampled, {bad}: {error}")
        return episodes

    def learn(self, episodes: list[Episode]) -> None:
        """Everything between the last sampled token and the next rollout."""
        rows = trajectories_of(episodes)
        batch = to_batch(rows)
        batch = batch.replace(advantages=self.credit(batch.zeros(), batch))
        self.metrics = self.learner.update(batch)
        self.version += 1
        self.engine.load(None, self.version)

    def close(self) -> None:
        self.engine.close()


def invented(work: Work, vocab_size: int, seed: int = 0) -> list[Episode]:
    """Episodes that were not sampled: the learner is measured whether the engine works or not."""
    rng = random.Random(seed)
    uniform = -math.log(vocab_size)
    episodes: list[Episode] = []
    for number in range(work.prompts):
        episode = Episode(Task(str(number), "words"))
        episode.append(Span(None, Author.TASK, random_tokens(rng, work.prompt, vocab_size)))
        for _ in range(work.samples):
            tokens = random_tokens(rng, work.response, vocab_size)
            n = len(tokens)
            completion = Completion(
                tokens, tokens, [uniform] * n, [-uniform] * n, [0] * n, Finish.LENGTH, 0
            )
            tip = episode.append(Span.sampled(0, completion))
            episode.leaves.append(Leaf((tip,), rng.random(), Status.TRUNCATED))
        episodes.append(episode)
    return episodes


def training(bench: Bench, name: str, work: Work) -> list[Row]:
    """The update alone, on invented episodes; a small pool, since nothing is sampled."""
    trainer = Trainer(bench, name, work, kv_tokens=4096)
    episodes = invented(work, trainer.shape.vocab_size)
    trainer.learn(episodes)  # compiles what is to be compiled
    times = bench.repeat(lambda: bench.time(lambda: trainer.learn(episodes)))
    trainer.close()
    must, aim = (2.5, 1.8) if name == "0.6B" else (None, None)
    title = f"{name} training step {work.title}"
    note = _utilisation(bench, name, work, median(times))
    note += f", peak {bench.peak_bytes / GIGABYTE:.1f} GB"
    return [Row(title, "s", median(times), must, aim, True, rounds=times, note=note)]


def _utilisation(bench: Bench, name: str, work: Work, seconds: float) -> str:
    flops = work.training_flops(SHAPES[name]) / seconds / 1e12
    roof = bench.roofs.get(MULTIPLY, UNMEASURED[MULTIPLY])
    return (
        f"{work.unique / seconds / 1e3:.1f}k unique tok/s, {flops:.0f} TFLOP/s: "
        f"{100 * flops / PEAK_TFLOPS:.0f}% MFU, {100 * flops / roof:.0f}% of the measured product"
    )


def step(bench: Bench, name: str, work: Work) -> list[Row]:
    """The full GRPO step with its parts, its peak of memory, and the gap engine to learner."""
    trainer = Trainer(bench, name, work)
    parts: list[tuple[float, float]] = []

    def once() -> float:
        episodes: list[Episode] = []
        rolling = bench.time(lambda: episodes.extend(trainer.rollout()))
        learning = bench.time(lambda: trainer.learn(episodes))
        parts.append((rolling, learning))
        return rolling + learning

    first = once()
    parts.clear()
    times = bench.repeat(once)
    trainer.close()
    must, aim = (5.6, 4.6) if name == "0.6B" else (None, None)
    rolling, learning = (median(values) for values in zip(*parts, strict=True))
    note = (
        f"rollout {rolling:.2f} s ({work.sampled / rolling / 1e3:.1f}k tok/s), learn "
        f"{learning:.2f} s ({work.unique / learning / 1e3:.1f}k unique tok/s); first step {first:.1f} s"
    )
    rows = [
        Row(f"{name} full step {work.title}", "s", median(times), must, aim, True, times, note),
        _memory_row(bench, f"{name} memory beside the pool, all sequences at once", trainer),
    ]
    gaps = {
        metric.rpartition("/")[2]: value
        for metric, value in trainer.metrics.items()
        if metric.startswith("sampling/sampling_logp_difference/")
    }
    note = ", ".join(f"{kind} {value:.2e}" for kind, value in gaps.items())
    rows.append(
        Row(f"{name} log-prob gap engine/learner", "mean", gaps["mean"], 0.0, 0.0, True, note=note)
    )
    return rows


def _memory_row(bench: Bench, title: str, trainer: Trainer) -> Row:
    """What is held beside the pool that was set: 35 GB at most, better 25."""
    peak = bench.peak_bytes / GIGABYTE
    pool = trainer.kv_tokens * kv_bytes(trainer.shape, bench.dtype) / GIGABYTE
    note = f"{peak:.1f} GB in all, {pool:.1f} GB of it the pool of {trainer.kv_tokens:,} tokens"
    goals = (35, 25) if trainer.shape is SHAPES["0.6B"] and peak > 0 else (None, None)
    return Row(title, "GB", max(peak - pool, 0.0), *goals, is_less_better=True, note=note)


LEAN_MICRO = 12_288
"""Tokens per micro-batch where memory is short: two trees of the 64x8 load."""


def memory(bench: Bench, name: str, work: Work) -> list[Row]:
    """The same step with little memory: samples in waves, small micro-batches."""
    trainer = Trainer(
        bench,
        name,
        work,
        kv_tokens=max(work.kv_tokens * 3 // 10, 2 * (work.prompt + work.response) + 256),
        tokens_per_micro=min(LEAN_MICRO, bench.tokens_per_micro),
    )
    trainer.learn(trainer.rollout())
    seconds = bench.time(lambda: trainer.learn(trainer.rollout()))
    trainer.close()
    return [
        _memory_row(bench, f"{name} memory beside the pool, in waves", trainer),
        Row(f"{name} full step {work.title}, in waves", "s", seconds, is_less_better=True),
    ]


def sync(bench: Bench, name: str) -> list[Row]:
    """From the end of an update to the first token that the new weights draw."""
    work = Work(2, 4, 32, 32)
    trainer = Trainer(bench, name, work, kv_tokens=65_536)
    episodes = invented(work, trainer.shape.vocab_size)
    rng, one = random.Random(0), Sampling(max_tokens=1, min_tokens=1)

    async def first_token(length: int) -> float:
        trainer.learn(episodes)
        prompt = random_tokens(rng, length, trainer.shape.vocab_size)
        bench.wait()
        started = time.perf_counter()
        trainer.engine.load(None, trainer.version)
        context = trainer.engine.open(prompt)
        await context.sample(one)
        seconds = time.perf_counter() - started
        context.close()
        return seconds * 1e3

    async def several(length: int) -> list[float]:
        for _ in range(2):
            await first_token(length)
        return [await first_token(length) for _ in range(max(bench.rounds, 5))]

    table: list[Row] = []
    for length in (16, 256):
        times = asyncio.run(several(length))
        title = f"{name} first token of {length} after an update"
        table.append(Row(title, "ms", median(times), 5, 5, is_less_better=True, rounds=times))
    weights = sum(p.nbytes for p in trainer.policy.parameters())
    copied = 0 if same_weights(trainer.policy, trainer.engine) else weights
    trainer.close()
    title = f"{name} weights copied to the engine"
    return [*table, Row(title, "bytes", copied, 0, 0, is_less_better=True)]

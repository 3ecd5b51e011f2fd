"""A step of adapters on trees, and on as many rows that each have a prompt of their own.

Both sides are the learner's own step: what differs is whether samples share the tokens of a prompt.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.report import Row
from benchmarks.gpu.training import invented
from benchmarks.gpu.works import TINY, Work
from benchmarks.shapes import SHAPES, random_decoder
from graft.algos.presets import build
from graft.models.lora.training import Lora
from graft.rollout.batching import to_batch, trajectories_of
from graft.train.learner import Learner
from graft.train.optimizer import Optimizer, schedule
from graft.types import Episode

LONG_PROMPTS = Work(16, 8, 2048, 256)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MAX_GIGABYTES = 20
"""The blocks of a model with more weights are computed twice instead of kept."""


def packing(bench: Bench, name: str) -> list[Row]:
    work = TINY if name.startswith("tiny") else LONG_PROMPTS
    policy = random_decoder(SHAPES[name], bench.device, bench.dtype)
    policy.recompute = policy.shape.num_params * bench.dtype.itemsize > MAX_GIGABYTES * 1e9
    lora = Lora(policy, rank=16, alpha=32, targets=TARGETS)
    _, credit, loss, reduction = build("grpo")
    optimizer = Optimizer([lora], lr=1e-6, schedule=schedule("constant", 0, 1, 0.0))
    learner = Learner(policy, optimizer, loss, reduction, bench.tokens_per_micro, lora=lora)
    apart = replace(work, prompts=work.sequences, samples=1)
    both = [invented(each, policy.shape.vocab_size) for each in (work, apart)]

    def seconds(episodes: list[Episode]) -> float:
        batch = to_batch(trajectories_of(episodes))
        batch = batch.replace(advantages=credit(batch.zeros(), batch))
        return bench.time(lambda: learner.update(batch))

    for episodes in both:  # compiles what is to be compiled
        seconds(episodes)
    pairs = [tuple(map(seconds, both)) for _ in range(bench.rounds)]
    packed, rows = (median(times) for times in zip(*pairs, strict=True))
    ratios = [in_rows / in_trees for in_trees, in_rows in pairs]
    note = f"{packed:.2f} s for {work.unique:,} tokens, {rows:.2f} s in rows of their own"
    title = f"{name} step of adapters {work.title}, trees against rows"
    return [Row(title, "x as fast", median(ratios), 3, 4, rounds=ratios, note=note)]

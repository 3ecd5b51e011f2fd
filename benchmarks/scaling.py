"""The planner beside numbers that others measured: `python -m benchmarks.scaling`.

One H200   our own rows of docs/performance.md
verl       Qwen2.5-Math-7B on H20s with vLLM and FSDP2, 512 prompts x 16 answers, 16 updates a step:
           in turns on all GPUs, and apart with half of them learning (fully async) or 12 : 4 (one step
           off). Three unknowns of that software and workload (mean length, bytes per second of decoding,
           seconds lost per update) are fitted to the rows of 32 and 128 GPUs; the row of 64 is then a
           prediction. So is one step off, after its mean length was fitted to its own row in turns.
AReaL      up to 2.77 times as fast as in turns; more GPUs stop helping

Published: verl's docs/advance/one_step_off.md and fully_async.md; arXiv 2505.24298.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from benchmarks.fleet.hardware import GPUS, SHAPES
from benchmarks.fleet.planner import Planner
from benchmarks.fleet.scaling import (
    BF16,
    HOST,
    Replica,
    TrainingJob,
    learn_seconds,
    rates_on,
    rollout_seconds,
    slots_in,
    stream_seconds,
)
from graft.models.shape import ModelShape
from graft.planning.step_time import (
    SHARES,
    Rates,
    decode_step_bytes,
    forward_flops,
    mean_seen,
    optimizer_bytes,
    train_flops,
)
from graft.train.memory.plan import MicroBatchSize
from graft.train.memory.workload import MAX_RUNNING, Workload

QWEN_7B = ModelShape(
    family="qwen2",
    vocab_size=152_064,
    width=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    ff=18_944,
    tied=False,
    qk_norm=False,
    qkv_bias=True,
)

ANCHOR = Workload(64, 8, 256, 512)
SINGLE = Workload(1, 1, 256, 512)
SAMPLED = {"135M": 168_000, "0.6B": 70_400, "1.7B": 56_400}
"""Tokens per second of ANCHOR's rollouts on one H200: with the default `model.exact`, 135M without."""
SINGLE_SAMPLED = 870
"""Tokens per second of SINGLE's rollouts with 0.6B."""
TRAINED = {"135M": 1.05, "0.6B": 2.47, "1.7B": 5.44, "4B": 12.5}
"""Seconds of training on ANCHOR, measured on one H200: as above, 135M and 4B without it."""
STEP_ROLLOUT = 3.87
"""Seconds of the rollout of a whole step of ANCHOR with 0.6B."""

FIRST_HUNDRED = {32: (494.4, 286.8), 64: (373.2, 178.2), 128: (309.6, 115.8)}
"""GPUs -> seconds per step over the first 100 steps (total time / 100), in turns and fully async:
later the answers of the two runs have grown apart."""
ALL_STEPS = {32: (790.10, 294.77), 64: (365.28, 189.26), 128: (356.30, 150.63)}
"""The same over all 400 steps, as the specification quotes them."""
ONE_STEP_OFF = (749.0, 520.0)
"""16 GPUs, in turns; 12 that learn and 4 that sample one step ahead."""

LAUNCH = 53e-6
"""Seconds per layer of a decoding step of vLLM with log-probs: from 2.25 ms alone and 20.4 ms with 512
rows, both measured with Qwen3-0.6B on an H200."""
TRAIN = 74e12
"""Half of an H20's 148 TFLOP/s. Assumed."""
OTHER, OTHER_ASYNC = 11.0, 4.0
"""Seconds of a step that are in none of its published phases."""
SLOTS = 256
"""Rows that an engine runs together: vLLM's default."""


@dataclass(frozen=True)
class Verl:
    """A step of that software; the three numbers are fitted."""

    mean: float
    """Tokens of an answer."""
    decode: float
    """Bytes per second."""
    lost: float
    """Seconds per update that more GPUs do not shorten."""
    longest: int = 28_672

    @property
    def job(self) -> TrainingJob:
        work = Workload(512, 16, 150, round(self.mean))
        return TrainingJob(QWEN_7B, work, longest=self.longest, updates=16)

    @property
    def rates(self) -> Rates:
        prefill = 0.6 * GPUS["h20"].flops
        return Rates(self.decode, prefill, TRAIN, optimizer=1e12, step=LAUNCH)

    def replica(self, gpus: int) -> Replica:
        return Replica(1, math.ceil(512 / gpus), SLOTS)

    def generate(self, gpus: int) -> float:
        return rollout_seconds(self.job, self.rates, self.replica(gpus), 0.0)

    def old(self, gpus: int) -> float:
        """The forward pass over all answers that precedes several updates."""
        work = self.job.work
        flops = forward_flops(QWEN_7B, float(work.unique), mean_seen(work), float(self.job.sampled))
        return flops / (gpus * TRAIN)

    def update(self, gpus: int) -> float:
        micro = MicroBatchSize(32_768, True)
        found = learn_seconds(self.job, GPUS["h20"], self.rates, gpus, 1, micro)
        return found.seconds + self.job.updates * self.lost

    def in_turns(self, gpus: int) -> float:
        return self.generate(gpus) + self.old(gpus) + self.update(gpus) + OTHER

    def one_step_off(self, learners: int, samplers: int) -> float:
        learn = self.old(learners) + self.update(learners)
        return max(self.generate(samplers), learn) + OTHER

    def fully_async(self, learners: int, samplers: int) -> float:
        """Half a step may be sampled ahead, and answers go on under new weights: no longest one."""
        replica = self.replica(samplers)
        rows = 1.5 * replica.groups * self.job.work.samples
        stream = stream_seconds(self.job, self.rates, replica, rows, 0.0)
        return max(stream.share, self.update(learners)) + OTHER_ASYNC


def derived_rates() -> tuple[float, dict[int, float], dict[int, float], float]:
    """LAUNCH, DECODED, TRAINED and HOST of `benchmarks.fleet.scaling`, from the measurements above.

    A decoding step takes layers x a + bytes / r. With 0.6B two rollouts are known, so a and r follow. The
    host's share is what the rollout of a whole step took beyond the engine alone.
    """
    gpu = GPUS["h200"]

    def step(shape: ModelShape, work: Workload, tokens_per_second: float) -> float:
        prompts = forward_flops(shape, work.groups * work.prompt, work.prompt / 2)
        whole = work.rows * work.sampled / tokens_per_second
        return (whole - prompts / (SHARES["prefill"] * gpu.flops)) / work.sampled

    def moved(shape: ModelShape, work: Workload) -> float:
        tokens = work.rows * work.sampled / 2 + work.groups * work.prompt
        return decode_step_bytes(shape, BF16, work.rows, tokens)

    small = SHAPES["0.6B"]
    many, one = step(small, ANCHOR, SAMPLED["0.6B"]), step(small, SINGLE, SINGLE_SAMPLED)
    rate = (moved(small, ANCHOR) - moved(small, SINGLE)) / (many - one)
    launch = (one - moved(small, SINGLE) / rate) / small.layers
    decode, train = {}, {}
    for name, speed in SAMPLED.items():
        shape = SHAPES[name]
        seconds = step(shape, ANCHOR, speed) - shape.layers * launch
        decode[shape.width] = moved(shape, ANCHOR) / seconds
    for name, seconds in TRAINED.items():
        shape = SHAPES[name]
        update = optimizer_bytes(shape, BF16) / (SHARES["optimizer"] * gpu.bandwidth)
        train[shape.width] = train_flops(shape, ANCHOR, False) / (seconds - update)
    sampled = ANCHOR.rows * ANCHOR.sampled
    return launch, decode, train, (STEP_ROLLOUT - sampled / SAMPLED["0.6B"]) / sampled


class FitCheck(NamedTuple):
    """A measurement on one H200 beside the computed value; `fixed`: it set a rate."""

    what: str
    unit: str
    measured: float
    computed: float
    fixed: bool = False

    @property
    def error(self) -> float:
        return self.computed / self.measured - 1


@cache
def single_device_checks() -> tuple[FitCheck, ...]:
    """Rollouts, training and whole steps of docs/performance.md, all answers of the same length."""

    def rollout(name: str, work: Workload, *, pool: int = 0, host: float = 0.0) -> float:
        job = TrainingJob(SHAPES[name], work, spread=0.0)
        slots = slots_in(job, pool) if pool else MAX_RUNNING
        return rollout_seconds(job, rates(name), Replica(1, work.groups, slots), host)

    def learn(name: str) -> float:
        job = TrainingJob(SHAPES[name], ANCHOR, spread=0.0)
        micro = MicroBatchSize(32_768, False)
        return learn_seconds(job, GPUS["h200"], rates(name), 1, 1, micro).seconds

    def rates(name: str) -> Rates:
        return rates_on(GPUS["h200"], SHAPES[name])

    found: list[FitCheck] = []
    rollouts = [
        ("0.6B", ANCHOR, SAMPLED["0.6B"], True),
        ("0.6B", SINGLE, SINGLE_SAMPLED, True),
        ("0.6B", Workload(16, 16, 4096, 1024), 27_700, False),
        ("0.6B", Workload(32, 16, 1024, 1024), 39_500, False),
        ("0.6B", Workload(8, 8, 256, 512), 30_700, False),
        ("1.7B", ANCHOR, SAMPLED["1.7B"], True),
        ("135M", ANCHOR, SAMPLED["135M"], True),
        ("135M", Workload(32, 16, 1024, 1024), 120_700, False),
    ]
    for name, work, measured, fixed in rollouts:
        title = f"{name} rollouts {work.groups}x{work.samples} {work.prompt}->{work.sampled}"
        speed = work.rows * work.sampled / rollout(name, work)
        found.append(FitCheck(title, "tok/s", measured, speed, fixed))
    for name, seconds in TRAINED.items():
        found.append(
            FitCheck(f"{name} training step 64x8 256->512", "s", seconds, learn(name), True)
        )
    # the tokens of the pool limit how many rows run together; 0: it has room for all
    for name, pool, seconds in (
        ("0.6B", 352_256, 6.36),
        ("1.7B", 0, 10.3),
        ("4B", 271_254, 25.8),
    ):
        whole = rollout(name, ANCHOR, pool=pool, host=HOST) + learn(name)
        found.append(
            FitCheck(f"{name} full step 64x8 256->512", "s", seconds, whole, name == "0.6B")
        )
    return tuple(found)


def fit(rows: tuple[int, ...] = (32, 128), tries: int = 700) -> Verl:
    """Mean length, decoding and lost seconds by a seeded search: least squares of logarithms."""
    low, high = np.array([200.0, 0.3e12, 0.0]), np.array([3000.0, 3.4e12, 8.0])
    rng = np.random.default_rng(0)

    def loss(point: np.ndarray) -> float:
        verl = Verl(*map(float, point))
        pairs = [
            (computed, published)
            for gpus in rows
            for computed, published in zip(
                (verl.in_turns(gpus), verl.fully_async(gpus // 2, gpus // 2)),
                FIRST_HUNDRED[gpus],
                strict=True,
            )
        ]
        return sum(math.log(computed / published) ** 2 for computed, published in pairs)

    best, least = low, math.inf
    for index in range(tries):
        if index < tries // 3:
            point = low + (high - low) * rng.random(3)
        else:
            point = np.clip(best * (1 + 0.06 * rng.standard_normal(3)), low, high)
        if (found := loss(point)) < least:
            best, least = point, found
    return Verl(*map(float, best))


def fitted_mean(verl: Verl, seconds: float) -> Verl:
    """The same software with answers so long that 16 GPUs take `seconds` in turns."""
    low, high = 50.0, 20_000.0
    for _ in range(40):
        middle = (low + high) / 2
        too_long = replace(verl, mean=middle, longest=20_480).in_turns(16) > seconds
        low, high = (low, middle) if too_long else (middle, high)
    return replace(verl, mean=low, longest=20_480)


FITTED = Verl(mean=616.0, decode=3.448e11, lost=3.0)
"""What `fit()` finds; `--fit` finds it again."""


def ratio_rows(verl: Verl) -> list[tuple[str, float, float]]:
    """What, its published ratio, the computed one."""
    found: list[tuple[str, float, float]] = []
    for gpus in FIRST_HUNDRED:
        computed = verl.in_turns(gpus) / verl.fully_async(gpus // 2, gpus // 2)
        how = "predicted" if gpus == 64 else "fitted"
        for title, table in (("first 100 steps", FIRST_HUNDRED), ("all 400 steps", ALL_STEPS)):
            in_turns, apart = table[gpus]
            name = f"fully async, {gpus} GPUs, {title}, {how}"
            found.append((name, in_turns / apart, computed))
    off = fitted_mean(verl, ONE_STEP_OFF[0])
    computed = off.in_turns(16) / off.one_step_off(12, 4)
    name = "one step off, 12 : 4 GPUs, length fitted in turns"
    found.append((name, ONE_STEP_OFF[0] / ONE_STEP_OFF[1], computed))
    return found


def growth(staleness: int, counts: tuple[int, ...] = (8, 32, 128, 512, 1024, 2048)):
    """GPUs -> tokens per second in turns and ahead: 8B on H100s, 512 x 16 answers of 8k up to 32k."""
    work = Workload(512, 16, 1024, 8192)
    job = TrainingJob(SHAPES["8B"], work, longest=32_768, staleness=staleness)
    for gpus in counts:
        planner = Planner(job, GPUS["h100"], gpus)
        by_bound = [
            max(
                (e.tokens_per_second for e in planner.per_kind if e.layout.staleness <= bound),
                default=0.0,
            )
            for bound in (0, staleness)
        ]
        yield gpus, *by_bound


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fit", action="store_true", help="search for verl's numbers again")
    verl = fit() if parser.parse_args().fit else FITTED

    print(f"rates of one H200: {derived_rates()}\n")
    print("| one H200 | measured | computed | error | |\n|---|---|---|---|---|")
    for check in single_device_checks():
        digits = 0 if check.measured > 100 else 2
        numbers = f"{check.measured:,.{digits}f} {check.unit} | {check.computed:,.{digits}f}"
        print(f"| {check.what} | {numbers} | {check.error:+.1%} | {'set' * check.fixed} |")
    print(f"\nverl: {verl}")
    print("\n| in turns / apart | published | computed | error |\n|---|---|---|---|")
    for name, published, computed in ratio_rows(verl):
        print(f"| {name} | {published:.2f} | {computed:.2f} | {computed / published - 1:+.0%} |")
    print("\n| GPUs | in turns, tok/s | staleness 4, tok/s | ratio |\n|---|---|---|---|")
    for gpus, in_turns, ahead in growth(4):
        print(f"| {gpus} | {in_turns:,.0f} | {ahead:,.0f} | {ahead / max(in_turns, 1e-9):.2f} |")


if __name__ == "__main__":
    main()

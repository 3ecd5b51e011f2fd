"""Who learns and who samples: every layout of a job on a number of GPUs, and the best of them.

64 H200s could all do both in turns (colocated), or 16 could learn while 48 sample. Each side may also
split layers over 2, 4 or 8 GPUs of a node. What fits is timed by `scaling`, the quickest is taken. All
of it is computed; nothing here has been measured on more than one GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from graft.train.fleet import GPUS, NODE, Gpu, slice_of, splits_of
from graft.train.footprint import kv_bytes, num_parameters
from graft.train.pace import Rates, decode_step_bytes
from graft.train.plan import GPU_MICROS, RUNTIME, Micro
from graft.train.scaling import (
    BF16,
    JOIN,
    OVERLAP,
    PAGE,
    Check,
    Job,
    Learning,
    Replica,
    engine_bytes,
    learn_seconds,
    learner_bytes,
    learning_bytes,
    pool_tokens,
    rates_on,
    rollout_seconds,
    room_of,
    single_device_checks,
    slots_in,
    slowest_share,
    stream_seconds,
)


class Layout(NamedTuple):
    """Who does what. Colocated GPUs learn and sample in turns, and `learners` counts them."""

    learners: int
    learner_tp: int
    samplers: int
    """0: colocated."""
    sampler_tp: int
    staleness: int = 0

    @property
    def name(self) -> str:
        if not self.samplers:
            return "colocated"
        return f"apart, stale {self.staleness}" if self.staleness else "apart"


@dataclass(frozen=True, slots=True)
class Estimate:
    """One layout of a job: where its seconds and bytes go. Computed, never measured."""

    layout: Layout
    replica: Replica
    micro: Micro
    learning: Learning
    rollout: float
    """Of the slowest replica until all is sampled; with a staleness above 1, of a step's share."""
    longest: float
    """Of the longest answer, where it must fit into several steps; else 0."""
    sync: float
    learner_memory: dict[str, float]
    sampler_memory: dict[str, float]
    """Of one GPU each; colocated, both are in the first."""
    sampled: int
    """Tokens per step."""

    @property
    def step(self) -> float:
        learn, bound = self.learning.seconds, self.layout.staleness
        if not bound:
            return self.rollout + learn + self.sync
        return max(self.rollout, learn, self.longest / bound) + self.sync

    @property
    def tokens_per_second(self) -> float:
        return self.sampled / self.step

    @property
    def decided_by(self) -> str:
        """What a step waits for."""
        learn, bound = self.learning.seconds, self.layout.staleness
        names = {"sampling": self.rollout, "learning": learn}
        if bound:
            names["the longest answer"] = self.longest / bound
        return max(names, key=lambda name: names[name])

    def to_json(self) -> dict[str, Any]:
        learning = self.learning
        return {
            **self.layout._asdict(),
            "layout": self.layout.name,
            "replicas": (self.layout.samplers or self.layout.learners) // self.layout.sampler_tp,
            "rows_together": self.replica.slots,
            "tokens_per_micro": self.micro.tokens,
            "recompute": self.micro.recompute,
            "seconds": {
                "step": self.step,
                "rollout": self.rollout,
                "longest": self.longest,
                "learn": learning.seconds,
                **learning._asdict(),
                "sync": self.sync,
            },
            "decided_by": self.decided_by,
            "tokens_per_second": self.tokens_per_second,
            "learner_bytes": self.learner_memory,
            "sampler_bytes": self.sampler_memory,
        }


@dataclass(frozen=True)
class Planner:
    """All layouts of one job on so many GPUs of a kind; what they share is computed once."""

    job: Job
    gpu: Gpu
    gpus: int
    rates: Rates

    @classmethod
    def of(cls, job: Job, gpu: Gpu, gpus: int) -> Planner:
        return cls(job, gpu, gpus, rates_on(gpu, job.shape))

    @cached_property
    def best(self) -> Estimate | None:
        """The quickest layout within the staleness bound; None: nothing fits."""
        found = [one for one in self.per_kind if one.layout.staleness <= self.job.staleness]
        return min(found, key=lambda one: one.step, default=None)

    @cached_property
    def per_kind(self) -> list[Estimate]:
        """The best colocated layout, and apart for each staleness up to 2 or the bound asked for."""
        kinds: dict[str, list[Estimate]] = {}
        for one in [*self.colocated(), *self.apart(max(self.job.staleness, 2))]:
            kinds.setdefault(one.layout.name, []).append(one)
        return [min(kind, key=lambda one: one.step) for kind in kinds.values()]

    def counts(self) -> list[int]:
        """Learners to try: every number in a few nodes, whole nodes in many, some of them in more."""
        every = 1 if self.gpus <= 64 else NODE * math.ceil(self.gpus / 512)
        return [*range(every, self.gpus, every)]

    def apart(self, most_stale: int) -> Iterator[Estimate]:
        for learners in self.counts():
            for staleness in range(most_stale + 1):
                found = self.split(learners, staleness)
                if found is not None:
                    yield found

    def split(self, learners: int, staleness: int) -> Estimate | None:
        """So many learners, all others sample: each side split within layers as suits it best."""
        learner, samplers = self._learner(learners), self.gpus - learners
        options = [
            found
            for tp in splits_of(self.job.shape)
            if samplers % tp == 0
            and (found := self._sampler(samplers // tp, tp, staleness)) is not None
        ]
        if learner is None or not options:
            return None
        learner_tp, micro, learning, held = learner
        replica, rollout, longest, memory = min(
            options, key=lambda one: max(one[1], one[2] / max(staleness, 1))
        )
        return Estimate(
            Layout(learners, learner_tp, samplers, replica.tp, staleness),
            replica,
            micro,
            learning,
            rollout,
            longest,
            self._sync(learners, replica.tp, is_apart=True),
            held,
            memory,
            self.job.sampled,
        )

    def _sync(self, learners: int, tp: int, *, is_apart: bool) -> float:
        """Learners gather the new weights; GPUs elsewhere are sent their part."""
        size = 2.0 * num_parameters(self.job.shape)
        gathered = self.gpu.gather(size / tp, learners) if learners > 1 else 0.0
        sent = self.gpu.send(size / tp, is_near=self.gpus <= NODE) if is_apart else 0.0
        return gathered + sent

    @cached_property
    def _learners(self) -> dict[int, Any]:
        return {}

    def _learner(self, gpus: int) -> tuple[int, Micro, Learning, dict[str, float]] | None:
        """The quickest group of so many learners that has room; found once for every staleness."""
        if gpus not in self._learners:
            found = [
                (tp, micro, learn_seconds(self.job, self.gpu, self.rates, gpus, tp, micro), held)
                for tp, micro, held in self._learner_choices(gpus)
                if sum(held.values()) <= room_of(self.gpu).usable
            ]
            self._learners[gpus] = min(found, key=lambda one: one[2].seconds, default=None)
        return self._learners[gpus]

    def _learner_choices(self, gpus: int) -> Iterator[tuple[int, Micro, dict[str, float]]]:
        for tp in splits_of(self.job.shape):
            if gpus % tp == 0 and gpus // tp <= self.job.work.rows:
                always = {**learner_bytes(self.job, gpus, tp), "runtime": float(RUNTIME["cuda"])}
                for again in (False, True):
                    for tokens in GPU_MICROS:
                        micro = Micro(tokens, again)
                        kept = learning_bytes(self.job, self.gpu, gpus, tp, micro)
                        yield tp, micro, {**always, "a micro-batch": kept}

    @cached_property
    def _samplers(self) -> dict[tuple[int, int, int], Any]:
        return {}

    def _sampler(
        self, replicas: int, tp: int, staleness: int
    ) -> tuple[Replica, float, float, dict[str, float]] | None:
        """Seconds of a step's share on so many replicas with GPUs of their own, and of the longest."""
        key = replicas, tp, staleness
        if key not in self._samplers:
            held = engine_bytes(self.job, self.gpu, tp)
            tokens = pool_tokens(self.job, self.gpu, tp, sum(held.values()))
            self._samplers[key] = None
            if slots := slots_in(self.job, tokens):
                memory = {
                    **held,
                    **self._pool(replicas, tp, tokens, staleness),
                    "runtime": float(RUNTIME["cuda"]),
                }
                timed = self._sampling(replicas, tp, slots, staleness)
                self._samplers[key] = (*timed, memory)
        return self._samplers[key]

    def _pool(self, replicas: int, tp: int, tokens: int, staleness: int = 1) -> dict[str, float]:
        """Of the room for keys and values, what a replica's rows can fill at their mean length."""
        job, work = self.job, self.job.work
        groups = math.ceil(work.groups / replicas) * max(staleness, 1)
        wanted = groups * (work.prompt + work.samples * (work.sampled + 2 * PAGE))
        wanted = max(wanted, int(job.lengths[-1]) + work.prompt + PAGE)
        return {"KV pool": float(min(tokens, wanted) * kv_bytes(slice_of(job.shape, tp), BF16))}

    def _sampling(
        self, replicas: int, tp: int, slots: int, staleness: int
    ) -> tuple[Replica, float, float]:
        job = self.job
        replica = Replica(tp, math.ceil(job.work.groups / replicas), slots)
        drained = rollout_seconds(job, self.rates, replica)
        if staleness < 2:
            return replica, drained, 0.0
        rows = replica.groups * job.work.samples
        # at most what is halfway between all begun when a version comes out, and what is left when
        # the next one does; fewer rows make a thinner stream, but the longest answer ends sooner
        shares = [*(quarter / 4 for quarter in range(1, 5)), *np.arange(1.5, staleness)]
        streams = [stream_seconds(job, self.rates, replica, share * rows) for share in shares]
        best = min(streams, key=lambda one: max(one.share, one.longest / staleness))
        if max(best.share, best.longest / staleness) < drained:
            return replica, best.share, best.longest
        return replica, drained, 0.0  # a bound need not be used up

    def colocated(self) -> Iterator[Estimate]:
        """Every GPU learns, then samples. One alone shares its weights between both."""
        job, gpu, gpus = self.job, self.gpu, self.gpus
        usable = room_of(gpu).usable
        for sampler_tp in splits_of(job.shape):
            if gpus % sampler_tp:
                continue
            engine = engine_bytes(job, gpu, sampler_tp)
            own = 0.0 if gpus == 1 else engine["weights"]
            for learner_tp, micro, held in self._learner_choices(gpus):
                always = sum(held.values()) - held["a micro-batch"] + own
                turn = max(held["a micro-batch"], engine["a decoding step"])
                tokens = pool_tokens(job, gpu, sampler_tp, always + turn - RUNTIME["cuda"])
                slots = slots_in(job, tokens)
                if not slots or always + turn > usable:
                    continue
                replicas = gpus // sampler_tp
                key = (replicas, sampler_tp, -slots)  # of these alone its seconds depend on
                if key not in self._samplers:
                    self._samplers[key] = self._sampling(replicas, sampler_tp, slots, 0)
                replica, rollout, longest = self._samplers[key]
                learning = learn_seconds(job, gpu, self.rates, gpus, learner_tp, micro)
                memory = {
                    **held,
                    "engine's weights": own,
                    **self._pool(replicas, sampler_tp, tokens),
                }
                yield Estimate(
                    Layout(gpus, learner_tp, 0, sampler_tp),
                    replica,
                    micro,
                    learning,
                    rollout,
                    longest,
                    self._sync(gpus, sampler_tp, is_apart=False),
                    {name: size for name, size in memory.items() if size},
                    {},
                    job.sampled,
                )

    def calibration(self) -> tuple[Check, ...]:
        return single_device_checks()

    def formula(self, one: Estimate) -> list[str]:
        """The sums behind an estimate, with its numbers put in."""
        job, rates, layout, learning = self.job, self.rates, one.layout, one.learning
        work, shape, bound = job.work, job.shape, layout.staleness
        learn, sampling = learning.seconds, layout.samplers or layout.learners
        if not bound:
            step = f"rollout {one.rollout:.2f} + learn {learn:.2f}"
        else:
            longest = f", longest {one.longest:.2f} / {bound}" if one.longest else ""
            step = f"max(rollout {one.rollout:.2f}, learn {learn:.2f}{longest})"
        launch, join = rates.step * 1e6, JOIN * 1e6 * (layout.sampler_tp > 1)
        weights = decode_step_bytes(shape, BF16, 0, 0, 0, 0)
        logits = decode_step_bytes(shape, BF16, 1, 0, 0, 0) - weights
        ranks = layout.learners // layout.learner_tp
        busiest = slowest_share(job, ranks)
        flops = learning.compute * layout.learners * rates.train / busiest
        hidden = OVERLAP * min(learning.compute, learning.gather)
        far = "NVLink" if self.gpus <= NODE else "network"
        return [
            f"step     = {step} + sync {one.sync:.3f} = {one.step:.2f} s, decided by {one.decided_by}",
            f"rollout  = {sampling // layout.sampler_tp} replicas x {one.replica.groups} tasks x "
            f"{work.samples}, {one.replica.slots} rows at once at most; a decoding step of B rows = "
            f"{shape.layers} layers x ({launch:.0f} + {join:.0f} us) + ({weights / 1e9:.2f} GB + "
            f"B x {logits / 1e6:.2f} MB + {kv_bytes(shape, BF16) / 1e3:.0f} kB x tokens seen) / "
            f"({layout.sampler_tp} x {rates.decode / 1e12:.2f} TB/s)",
            f"learn    = {flops:.3g} FLOPs / ({layout.learners} x {rates.train / 1e12:.0f}e12) x "
            f"{busiest:.2f} (busiest rank) = {learning.compute:.2f} s + gathering "
            f"{learning.gather:.2f} s - hidden {hidden:.2f} s + split layers {learning.join:.2f} s "
            f"+ optimizer {learning.optimizer:.3f} s; micro-batches of {one.micro.tokens:,} tokens, "
            f"activations {'computed twice' if one.micro.recompute else 'kept'}",
            f"sync     = {2 * num_parameters(shape) / 1e9:.1f} GB / {layout.sampler_tp}, gathered by "
            f"{layout.learners}" + (f" and sent over {far}" if layout.samplers else ""),
        ]

    def what_fits(self) -> str:
        """Changes of one thing that would do, the cheapest of each kind."""
        ways: list[str] = []
        for count in (self.gpus * 2**power for power in range(1, 7)):
            if replace(self, gpus=count).best is not None:
                ways.append(f"{count} of these GPUs")
                break
        for name, gpu in GPUS.items():
            if gpu.memory > self.gpu.memory and Planner.of(self.job, gpu, self.gpus).best:
                ways.append(f"--gpu {name}")
                break
        longest, least = int(self.job.lengths[-1]) // 2, self.job.work.sampled
        while longest > least:
            shorter = replace(self.job, longest=longest)
            if replace(self, job=shorter).best is not None:
                ways.append(f"answers of at most {longest:,} tokens")
                break
            longest //= 2
        if ways:
            return f"What would do: {', or '.join(ways)}"
        return "No single change does: take more GPUs with more memory, or a smaller model"

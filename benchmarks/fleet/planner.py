"""The search for the best layout of a job on a number of GPUs: which of them learn and which sample.

    colocated  torchrun: all GPUs learn, with the learner split over them, then each samples from a whole
               copy that is refilled after every step; where no GPU can hold one, as few GPUs as possible
               hold a copy together (engine.tp)
    replicas   torchrun: a whole learner on each GPU; its engine samples from the learner's tensors
    workers    Ray: some GPUs learn, each of the others samples from a whole copy
    servers    torchrun for the GPUs that learn; vLLM or SGLang, which can split layers, on the others

Only layouts that graft accepts are tried: learners that torchrun can start and `models.parallel` can split,
Ray workers with a whole copy of the model, servers only for jobs that they can sample. Each one that fits
is timed by `scaling`, and the quickest is taken. Nothing here was measured on more than one GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from benchmarks.fleet.hardware import NODE, Gpu, can_shard, runs_under_torchrun, tp_sizes
from benchmarks.fleet.scaling import (
    BF16,
    PAGE,
    SPLIT,
    Learning,
    Replica,
    TrainingJob,
    engine_bytes,
    learn_seconds,
    learner_bytes,
    learning_bytes,
    pool_tokens,
    rates_on,
    replica_seconds,
    rollout_seconds,
    slots_in,
    stream_seconds,
)
from graft.engine.native.kv.pages import kv_bytes
from graft.models.parallel.sampler import slice_of
from graft.planning.step_time import Rates
from graft.train.memory.footprint import num_parameters
from graft.train.memory.plan import GPU_MICROS, RUNTIME, MicroBatchSize

COLOCATED, REPLICAS, WORKERS, SERVERS = "colocated", "replicas", "workers", "servers"
"""How graft uses many GPUs: all learn and sample, from a split learner or whole ones; some sample as Ray
workers; some as vLLM or SGLang."""
DISK = 2e9
"""Bytes per second of the folder through which servers get weights, written and read. Assumed."""
SHOWN_STALENESS = 2
"""Layouts up to this staleness are listed, even where the job allows less."""


class GpuLayout(NamedTuple):
    """Numbers of GPUs. Without samplers the learners sample too, in turns."""

    kind: str
    learners: int
    learner_tp: int
    samplers: int
    sampler_tp: int
    staleness: int = 0

    @property
    def name(self) -> str:
        if self.learners + self.samplers == 1:
            return "one GPU"
        return f"{self.kind}, stale {self.staleness}" if self.staleness else self.kind

    def commands(self, recipe: str) -> list[str]:
        """The commands that start it."""
        start, served, keys = "graft", [], []
        if self.kind == WORKERS:
            keys = ["cluster.address=auto", f"cluster.learners={self.learners}"]
            keys += [f"cluster.workers={self.samplers}", "cluster.gpus=1", "cluster.sync=broadcast"]
        elif self.learners > 1:
            least = math.ceil(self.learners / NODE)
            nodes = next(n for n in range(least, self.learners + 1) if self.learners % n == 0)
            many = f" --nnodes {nodes}" * (nodes > 1)
            start = f"torchrun{many} --nproc-per-node {self.learners // nodes} -m graft"
        if self.kind == SERVERS:
            split = f" --tensor-parallel-size {self.sampler_tp}" * (self.sampler_tp > 1)
            count = self.samplers // self.sampler_tp
            served = [f"vllm serve MODEL{split} ...   # {count} of them: docs/scale.md"]
            keys = ["engine.name=vllm", "'engine.url=[http://HOST:8000, ...]'"]
        keys += [f"parallel.tp={self.learner_tp}"] * (self.learner_tp > 1)
        keys += ["parallel.shard=false"] * (self.kind == REPLICAS and self.learners > 1)
        keys += [f"engine.tp={self.sampler_tp}"] * (self.kind == COLOCATED and self.sampler_tp > 1)
        keys += [f"rollout.staleness={self.staleness}"] * bool(self.staleness)
        return [*served, " ".join([start, "train", recipe, *keys])]


@dataclass(frozen=True, slots=True)
class LayoutEstimate:
    """Seconds and bytes of one layout of a job. Computed, never measured."""

    layout: GpuLayout
    replica: Replica
    micro: MicroBatchSize
    learning: Learning
    rollout: float
    """Seconds of the slowest replica; with a staleness above 1, of a step's share of its stream."""
    longest: float
    """Seconds of the longest answer, where it must fit into several steps; else 0."""
    sync: float
    learner_memory: dict[str, float]
    sampler_memory: dict[str, float]
    """Bytes of one GPU each; empty where the learner samples too."""
    sampled: int
    """Tokens per step."""

    @property
    def phases(self) -> dict[str, float]:
        """What a step waits for: one after the other, or with a staleness at the same time."""
        found = {"sampling": self.rollout, "learning": self.learning.seconds}
        if self.layout.staleness:
            found["the longest answer"] = self.longest / self.layout.staleness
        return found

    @property
    def step(self) -> float:
        if self.layout.staleness:
            return max(self.phases.values()) + self.sync
        return self.rollout + self.learning.seconds + self.sync

    @property
    def tokens_per_second(self) -> float:
        return self.sampled / self.step

    @property
    def decided_by(self) -> str:
        phases = self.phases
        return max(phases, key=lambda name: phases[name])


@dataclass(frozen=True)
class Planner:
    """All layouts of one job on `gpus` GPUs of a kind; what they share is computed once."""

    job: TrainingJob
    gpu: Gpu
    gpus: int
    _learners: dict[int, Any] = field(default_factory=dict[int, Any], init=False)
    _samplers: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False)

    @cached_property
    def rates(self) -> Rates:
        return rates_on(self.gpu, self.job.shape)

    @cached_property
    def best(self) -> LayoutEstimate | None:
        """The quickest layout within the staleness bound; None if nothing fits."""
        found = [one for one in self.per_kind if one.layout.staleness <= self.job.staleness]
        return min(found, key=lambda one: one.step, default=None)

    @cached_property
    def per_kind(self) -> list[LayoutEstimate]:
        """The best layout of each kind and staleness."""
        kinds: dict[str, list[LayoutEstimate]] = {}
        for one in [*self._together(), *self._apart()]:
            kinds.setdefault(one.layout.name, []).append(one)
        return [min(kind, key=lambda one: one.step) for kind in kinds.values()]

    def _apart(self) -> Iterator[LayoutEstimate]:
        """Some GPUs learn, the others sample. All numbers of learners are tried on up to 64 GPUs, else
        whole nodes or several."""
        every = 1 if self.gpus <= 64 else NODE * math.ceil(self.gpus / 512)
        most_stale = max(self.job.staleness, SHOWN_STALENESS)
        for kind in (WORKERS, SERVERS):
            for learners in range(every, self.gpus, every):
                if kind == WORKERS or runs_under_torchrun(learners):
                    tried = (self.split(kind, learners, n) for n in range(most_stale + 1))
                    yield from filter(None, tried)

    def split(self, kind: str, learners: int, staleness: int) -> LayoutEstimate | None:
        """`learners` GPUs learn, all others sample: each side with its best tensor parallelism."""
        learner, samplers = self._learner(learners), self.gpus - learners
        options = [
            found
            for tp in (tp_sizes(self.job.shape) if kind == SERVERS else [1])
            if samplers % tp == 0
            and (found := self._sampler(samplers // tp, tp, staleness)) is not None
        ]
        if learner is None or not options:
            return None
        learner_tp, micro, learning, held = learner
        (replica, rollout, longest), memory = min(
            options, key=lambda one: max(one[0][1], one[0][2] / max(staleness, 1))
        )
        layout = GpuLayout(kind, learners, learner_tp, samplers, replica.tp, staleness)
        sync, sampled = self._sync(kind, learners), self.job.sampled
        return LayoutEstimate(
            layout, replica, micro, learning, rollout, longest, sync, held, memory, sampled
        )

    def _sync(self, kind: str, learners: int) -> float:
        """Learners gather the whole weights; workers get a broadcast, servers read files."""
        size = 2.0 * num_parameters(self.job.shape)
        gathered = self.gpu.gather(size, learners)
        if kind == WORKERS:  # a broadcast from the first learner
            return gathered + size / (self.gpu.nvlink if self.gpus <= NODE else self.gpu.network)
        return gathered + (2 * size / DISK if kind == SERVERS else 0.0)

    def _learner(self, gpus: int) -> tuple[int, MicroBatchSize, Learning, dict[str, float]] | None:
        """The quickest group of `gpus` learners that fits."""
        if gpus not in self._learners:
            found = [
                (tp, micro, self._learning(gpus, tp, micro), held)
                for tp, micro, held in self._learner_choices(gpus)
                if sum(held.values()) <= self.gpu.device_memory.usable
            ]
            self._learners[gpus] = min(found, key=lambda one: one[2].seconds, default=None)
        return self._learners[gpus]

    def _learning(self, gpus: int, tp: int, micro: MicroBatchSize) -> Learning:
        share = SPLIT if gpus > 1 else 1.0
        rates = replace(self.rates, train=share * self.rates.train)
        return learn_seconds(self.job, self.gpu, rates, gpus, tp, micro)

    def _learner_choices(self, gpus: int) -> Iterator[tuple[int, MicroBatchSize, dict[str, float]]]:
        for tp in tp_sizes(self.job.shape):
            if can_shard(self.job.shape, gpus, tp) and gpus // tp <= self.job.work.rows:
                always = {**learner_bytes(self.job, gpus, tp), "runtime": float(RUNTIME["cuda"])}
                for again in (False, True):
                    for tokens in GPU_MICROS:
                        micro = MicroBatchSize(tokens, again)
                        kept = learning_bytes(self.job, self.gpu, gpus, tp, micro)
                        yield tp, micro, {**always, "a micro-batch": kept}

    def _sampler(
        self, replicas: int, tp: int, staleness: int
    ) -> tuple[tuple[Replica, float, float], dict[str, float]] | None:
        """Seconds and memory of separate replicas; None where the longest answer does not fit."""
        held = engine_bytes(self.job, self.gpu, tp)
        tokens = pool_tokens(self.job, self.gpu, tp, sum(held.values()))
        slots = slots_in(self.job, tokens)
        if not slots:
            return None
        pool = self._pool(replicas, tp, tokens, staleness)
        memory = {**held, "KV pool": pool, "runtime": float(RUNTIME["cuda"])}
        return self._sampling(replicas, tp, slots, staleness), memory

    def _pool(self, replicas: int, tp: int, tokens: int, staleness: int = 1) -> float:
        """The part of the KV memory that a replica's rows fill at their mean length."""
        job, work = self.job, self.job.work
        groups = math.ceil(work.groups / replicas) * max(staleness, 1)
        wanted = groups * (work.prompt + work.samples * (work.sampled + 2 * PAGE))
        wanted = max(wanted, int(job.lengths[-1]) + work.prompt + PAGE)
        return float(min(tokens, wanted) * kv_bytes(slice_of(job.shape, tp), BF16))

    def _sampling(
        self, replicas: int, tp: int, slots: int, staleness: int
    ) -> tuple[Replica, float, float]:
        """Seconds of a step's share on one of the replicas, and of the longest answer."""
        key = replicas, tp, slots, staleness
        if key not in self._samplers:
            self._samplers[key] = self._timed(
                Replica(tp, math.ceil(self.job.work.groups / replicas), slots), staleness
            )
        return self._samplers[key]

    def _timed(self, replica: Replica, staleness: int) -> tuple[Replica, float, float]:
        job, rates = self.job, self.rates
        drained = rollout_seconds(job, rates, replica)
        if staleness < 2:
            return replica, drained, 0.0
        rows = replica.groups * job.work.samples
        # fewer rows in flight make a thinner stream, but the longest answer ends sooner; the most is
        # halfway between all rows of a version and those left when the next version comes
        shares = [*(quarter / 4 for quarter in range(1, 5)), *np.arange(1.5, staleness)]
        streams = [stream_seconds(job, rates, replica, share * rows) for share in shares]
        share, longest = min(streams, key=lambda one: max(one.share, one.longest / staleness))
        if max(share, longest / staleness) < drained:
            return replica, share, longest
        return replica, drained, 0.0  # a lower staleness than the bound is allowed

    def _together(self) -> Iterator[LayoutEstimate]:
        """Every GPU learns and samples in turns: the learner is split, or each holds a whole one."""
        gpus, job = self.gpus, self.job
        if not runs_under_torchrun(gpus):
            return
        for sampler_tp in tp_sizes(job.shape) if gpus > 1 else ():
            if found := list(self._colocated(sampler_tp)):
                yield from found
                break  # engines of more GPUs each are not needed
        for _, micro, held in self._learner_choices(1):
            learning = replica_seconds(job, self.gpu, self.rates, gpus, micro)
            yield from self._in_turns(GpuLayout(REPLICAS, gpus, 1, 0, 1), micro, held, learning)

    def _colocated(self, sampler_tp: int) -> Iterator[LayoutEstimate]:
        """A split learner, whose GPUs then sample, `sampler_tp` of them from a copy together."""
        gpus, copy = self.gpus, engine_bytes(self.job, self.gpu, sampler_tp)["weights"]
        for tp, micro, held in self._learner_choices(gpus) if gpus % sampler_tp == 0 else ():
            held = {**held, "engine's weights": copy}
            layout = GpuLayout(COLOCATED, gpus, tp, 0, sampler_tp)
            yield from self._in_turns(layout, micro, held, self._learning(gpus, tp, micro))

    def _in_turns(
        self, layout: GpuLayout, micro: MicroBatchSize, held: dict[str, float], learning: Learning
    ) -> Iterator[LayoutEstimate]:
        job, gpu, tp = self.job, self.gpu, layout.sampler_tp
        replicas = self.gpus // tp
        always = sum(held.values()) - held["a micro-batch"]
        turn = max(held["a micro-batch"], engine_bytes(job, gpu, tp)["a decoding step"])
        tokens = pool_tokens(job, gpu, tp, always + turn - RUNTIME["cuda"])
        slots = slots_in(job, tokens)
        if not slots or always + turn > gpu.device_memory.usable:
            return
        replica, rollout, longest = self._sampling(replicas, tp, slots, 0)
        sync = self._sync(COLOCATED, self.gpus) if layout.kind == COLOCATED else 0.0
        memory = {**held, "KV pool": self._pool(replicas, tp, tokens)}
        yield LayoutEstimate(
            layout, replica, micro, learning, rollout, longest, sync, memory, {}, job.sampled
        )

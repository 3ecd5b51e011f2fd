"""The search for the best layout of a job on a number of GPUs.

Only layouts that graft accepts are tried: learners that torchrun can start and `models.parallel` can split,
native engines with a whole copy of the model, servers only for jobs that they can sample. Each one that fits
is timed by `scaling`, and the quickest is taken. Nothing here was measured on more than one GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from graft.planning.hardware import NODE, Gpu, can_shard, runs_under_torchrun, slice_of, tp_sizes
from graft.planning.layouts import (
    COLOCATED,
    REPLICAS,
    SERVERS,
    TOGETHER,
    WORKERS,
    GpuLayout,
    LayoutEstimate,
)
from graft.planning.scaling import (
    BF16,
    PAGE,
    SPLIT,
    Learning,
    Replica,
    TrainingJob,
    engine_bytes,
    gpu_memory,
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
from graft.planning.step_time import Rates
from graft.train.memory.footprint import kv_bytes, num_parameters
from graft.train.memory.plan import GPU_MICROS, RUNTIME, MicroBatchSize

DISK = 2e9
"""Bytes per second of the folder through which servers get weights, written and read. Assumed."""
SHOWN_STALENESS = 2
"""Layouts up to this staleness are listed, even where the job allows less."""


@dataclass(frozen=True)
class Planner:
    """All layouts of one job on `gpus` GPUs of a kind; what they share is computed once."""

    job: TrainingJob
    gpu: Gpu
    gpus: int
    rates: Rates

    @classmethod
    def of(cls, job: TrainingJob, gpu: Gpu, gpus: int) -> Planner:
        return cls(job, gpu, gpus, rates_on(gpu, job.shape))

    @cached_property
    def best(self) -> LayoutEstimate | None:
        """The quickest layout within the staleness bound; None if nothing fits."""
        found = [one for one in self.per_kind if one.layout.staleness <= self.job.staleness]
        return min(found, key=lambda one: one.step, default=None)

    @cached_property
    def per_kind(self) -> list[LayoutEstimate]:
        """The best layout of each kind and staleness."""
        kinds: dict[str, list[LayoutEstimate]] = {}
        together = [*self.colocated(), *self.replicas()] if TOGETHER in self.job.kinds else []
        for one in [*together, *self.apart()]:
            kinds.setdefault(one.layout.name, []).append(one)
        return [min(kind, key=lambda one: one.step) for kind in kinds.values()]

    def counts(self) -> list[int]:
        """Numbers of learners to try: all on up to 64 GPUs, else whole nodes or several."""
        every = 1 if self.gpus <= 64 else NODE * math.ceil(self.gpus / 512)
        return [*range(every, self.gpus, every)]

    def apart(self) -> Iterator[LayoutEstimate]:
        """Some GPUs learn, the others sample."""
        job = self.job
        most_stale = max(job.staleness, SHOWN_STALENESS) if job.can_run_ahead else 0
        for kind in (WORKERS, SERVERS):
            for learners in self.counts() if kind in job.kinds else ():
                if kind == SERVERS and not runs_under_torchrun(learners):
                    continue
                for staleness in range(most_stale + 1):
                    found = self.split(kind, learners, staleness)
                    if found is not None:
                        yield found

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
        replica, rollout, longest, memory = min(
            options, key=lambda one: max(one[1], one[2] / max(staleness, 1))
        )
        return LayoutEstimate(
            GpuLayout(kind, learners, learner_tp, samplers, replica.tp, staleness),
            replica,
            micro,
            learning,
            rollout,
            longest,
            self._sync(kind, learners),
            held,
            memory,
            self.job.sampled,
        )

    def _sync(self, kind: str, learners: int) -> float:
        """Learners gather the whole weights; workers get a broadcast, servers read files."""
        size = 2.0 * num_parameters(self.job.shape)
        gathered = self.gpu.gather(size, learners)
        if kind == WORKERS:  # a broadcast from the first learner
            return gathered + self.gpu.send(size, is_near=self.gpus <= NODE)
        return gathered + (2 * size / DISK if kind == SERVERS else 0.0)

    @cached_property
    def _learners(self) -> dict[int, Any]:
        return {}

    def _learner(self, gpus: int) -> tuple[int, MicroBatchSize, Learning, dict[str, float]] | None:
        """The quickest group of `gpus` learners that fits."""
        if gpus not in self._learners:
            found = [
                (tp, micro, self._learning(gpus, tp, micro), held)
                for tp, micro, held in self._learner_choices(gpus)
                if sum(held.values()) <= gpu_memory(self.gpu).usable
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

    @cached_property
    def _samplers(self) -> dict[tuple[int, int, int], Any]:
        return {}

    def _sampler(
        self, replicas: int, tp: int, staleness: int
    ) -> tuple[Replica, float, float, dict[str, float]] | None:
        """Seconds of a step's share on separate replicas, of the longest answer, and the memory."""
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
        """The part of the KV memory that a replica's rows fill at their mean length."""
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
        # fewer rows in flight make a thinner stream, but the longest answer ends sooner; the most is
        # halfway between all rows of a version and those left when the next version comes
        shares = [*(quarter / 4 for quarter in range(1, 5)), *np.arange(1.5, staleness)]
        streams = [stream_seconds(job, self.rates, replica, share * rows) for share in shares]
        best = min(streams, key=lambda one: max(one.share, one.longest / staleness))
        if max(best.share, best.longest / staleness) < drained:
            return replica, best.share, best.longest
        return replica, drained, 0.0  # a lower staleness than the bound is allowed

    def colocated(self) -> Iterator[LayoutEstimate]:
        """Every GPU learns with its part of the learner, then samples from a whole copy."""
        if self.gpus > 1 and runs_under_torchrun(self.gpus):
            copy = engine_bytes(self.job, self.gpu, 1)["weights"]
            for learner_tp, micro, held in self._learner_choices(self.gpus):
                learning = self._learning(self.gpus, learner_tp, micro)
                layout = GpuLayout(COLOCATED, self.gpus, learner_tp, 0, 1)
                held = {**held, "engine's weights": copy}
                yield from self._in_turns(layout, micro, held, learning)

    def replicas(self) -> Iterator[LayoutEstimate]:
        """Every GPU holds a whole learner, and its engine samples from the learner's tensors."""
        if not runs_under_torchrun(self.gpus):
            return
        for _, micro, held in self._learner_choices(1):
            learning = replica_seconds(self.job, self.gpu, self.rates, self.gpus, micro)
            yield from self._in_turns(
                GpuLayout(REPLICAS, self.gpus, 1, 0, 1), micro, held, learning
            )

    def _in_turns(
        self, layout: GpuLayout, micro: MicroBatchSize, held: dict[str, float], learning: Learning
    ) -> Iterator[LayoutEstimate]:
        job, gpu, gpus = self.job, self.gpu, self.gpus
        always = sum(held.values()) - held["a micro-batch"]
        turn = max(held["a micro-batch"], engine_bytes(job, gpu, 1)["a decoding step"])
        tokens = pool_tokens(job, gpu, 1, always + turn - RUNTIME["cuda"])
        slots = slots_in(job, tokens)
        if not slots or always + turn > gpu_memory(gpu).usable:
            return
        key = (gpus, 1, -slots)  # its seconds depend on these alone
        if key not in self._samplers:
            self._samplers[key] = self._sampling(gpus, 1, slots, 0)
        replica, rollout, longest = self._samplers[key]
        sync = self._sync(COLOCATED, gpus) if layout.kind == COLOCATED else 0.0
        memory = {**held, **self._pool(gpus, 1, tokens)}
        yield LayoutEstimate(
            layout, replica, micro, learning, rollout, longest, sync, memory, {}, job.sampled
        )

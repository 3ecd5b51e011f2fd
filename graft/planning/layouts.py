"""Who learns and who samples: every layout that graft runs, on a number of GPUs, and the best of them.

    colocated  torchrun: all GPUs learn, split between them, then each samples from a whole copy that is
               filled anew after every step
    replicas   the same with a whole learner on each; the engine samples from its tensors
    workers    Ray: some GPUs learn, each of the others samples from a whole copy that it is sent
    servers    torchrun for those that learn; vLLM or SGLang on the others, which may split layers, and
               read weights from files

Our own engine samples from a whole model in one process: only servers split one. Learners may split layers
over 2, 4 or 8 GPUs of a node. What fits is timed by `scaling`, the quickest is taken. All of it is computed;
nothing here has been measured on more than one GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from graft.planning.hardware import GPUS, NODE, Gpu, slice_of, splits_of
from graft.planning.scaling import (
    BF16,
    JOIN,
    KINDS,
    PAGE,
    SPLIT,
    FitCheck,
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
    room_of,
    single_device_checks,
    slots_in,
    slowest_share,
    stream_seconds,
)
from graft.planning.step_time import Rates, decode_step_bytes
from graft.train.memory.footprint import gigabytes, kv_bytes, num_parameters
from graft.train.memory.plan import GPU_MICROS, RUNTIME, MicroBatchSize

TOGETHER, WORKERS, SERVERS = KINDS
COLOCATED, REPLICAS = "colocated", "replicas"
DISK = 2e9
"""Bytes per second of the folder that servers read weights from, written and read. Assumed."""


class GpuLayout(NamedTuple):
    """Who does what. Where there are no samplers, learners sample too, in turns."""

    kind: str
    """colocated, replicas, workers or servers."""
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

    def commands(self, recipe: str = "RECIPE") -> list[str]:
        """What starts it."""
        keys = [f"parallel.tp={self.learner_tp}"] * (self.learner_tp > 1)
        keys += ["parallel.shard=false"] * (self.kind == REPLICAS and self.learners > 1)
        keys += [f"rollout.staleness={self.staleness}"] * bool(self.staleness)
        if self.kind == WORKERS:
            keys = [
                "cluster.address=auto",
                f"cluster.learners={self.learners}",
                f"cluster.workers={self.samplers}",
                "cluster.gpus=1",
                "cluster.sync=broadcast",
                *keys,
            ]
        start, served = "graft", []
        if self.kind == SERVERS:
            split = f" --tensor-parallel-size {self.sampler_tp}" * (self.sampler_tp > 1)
            count = self.samplers // self.sampler_tp
            served = [f"vllm serve MODEL{split} ...   # {count} of them: docs/engines.md"]
            keys = ["engine.name=vllm", "'engine.url=[http://HOST:8000, ...]'", *keys]
        if self.learners > 1 and self.kind != WORKERS:
            least = math.ceil(self.learners / NODE)
            nodes = next(n for n in range(least, self.learners + 1) if self.learners % n == 0)
            many = f" --nnodes {nodes}" * (nodes > 1)
            start = f"torchrun{many} --nproc-per-node {self.learners // nodes} -m graft"
        return [*served, " ".join([start, "train", recipe, *keys])]


@dataclass(frozen=True, slots=True)
class LayoutEstimate:
    """One layout of a job: where its seconds and bytes go. Computed, never measured."""

    layout: GpuLayout
    replica: Replica
    micro: MicroBatchSize
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

    job: TrainingJob
    gpu: Gpu
    gpus: int
    rates: Rates

    @classmethod
    def of(cls, job: TrainingJob, gpu: Gpu, gpus: int) -> Planner:
        return cls(job, gpu, gpus, rates_on(gpu, job.shape))

    @cached_property
    def best(self) -> LayoutEstimate | None:
        """The quickest layout within the staleness bound; None: nothing fits."""
        found = [one for one in self.per_kind if one.layout.staleness <= self.job.staleness]
        return min(found, key=lambda one: one.step, default=None)

    @cached_property
    def per_kind(self) -> list[LayoutEstimate]:
        """The best of each kind, apart for each staleness up to 2 or the bound asked for."""
        kinds: dict[str, list[LayoutEstimate]] = {}
        together = [*self.colocated(), *self.replicas()] if TOGETHER in self.job.kinds else []
        for one in [*together, *self.apart(max(self.job.staleness, 2))]:
            kinds.setdefault(one.layout.name, []).append(one)
        return [min(kind, key=lambda one: one.step) for kind in kinds.values()]

    def counts(self) -> list[int]:
        """Learners to try: every number in a few nodes, whole nodes in many, some of them in more."""
        every = 1 if self.gpus <= 64 else NODE * math.ceil(self.gpus / 512)
        return [*range(every, self.gpus, every)]

    def apart(self, most_stale: int) -> Iterator[LayoutEstimate]:
        for kind in (WORKERS, SERVERS):
            for learners in self.counts() if kind in self.job.kinds else ():
                if kind == SERVERS and learners > NODE and learners % NODE:
                    continue  # torchrun starts as many processes on every node
                for staleness in range(most_stale + 1):
                    found = self.split(kind, learners, staleness)
                    if found is not None:
                        yield found

    def split(self, kind: str, learners: int, staleness: int) -> LayoutEstimate | None:
        """So many learners, all others sample: each side split within layers as suits it best."""
        learner, samplers = self._learner(learners), self.gpus - learners
        options = [
            found
            for tp in (splits_of(self.job.shape) if kind == SERVERS else [1])
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
        """Learners gather the whole weights; workers are sent them, servers read them from files."""
        size = 2.0 * num_parameters(self.job.shape)
        gathered = self.gpu.gather(size, learners)
        if kind == WORKERS:  # a broadcast from the first learner
            return gathered + self.gpu.send(size, is_near=self.gpus <= NODE)
        return gathered + (2 * size / DISK if kind == SERVERS else 0.0)

    @cached_property
    def _learners(self) -> dict[int, Any]:
        return {}

    def _learner(self, gpus: int) -> tuple[int, MicroBatchSize, Learning, dict[str, float]] | None:
        """The quickest group of so many learners that has room; found once for every staleness."""
        if gpus not in self._learners:
            found = [
                (tp, micro, self._learning(gpus, tp, micro), held)
                for tp, micro, held in self._learner_choices(gpus)
                if sum(held.values()) <= room_of(self.gpu).usable
            ]
            self._learners[gpus] = min(found, key=lambda one: one[2].seconds, default=None)
        return self._learners[gpus]

    def _learning(self, gpus: int, tp: int, micro: MicroBatchSize) -> Learning:
        share = SPLIT if gpus > 1 else 1.0
        rates = replace(self.rates, train=share * self.rates.train)
        return learn_seconds(self.job, self.gpu, rates, gpus, tp, micro)

    def _learner_choices(self, gpus: int) -> Iterator[tuple[int, MicroBatchSize, dict[str, float]]]:
        for tp in splits_of(self.job.shape):
            if gpus % tp == 0 and gpus // tp <= self.job.work.rows:
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

    def colocated(self) -> Iterator[LayoutEstimate]:
        """Every GPU learns its part, then samples from a copy of the whole."""
        if self.gpus > 1:
            copy = engine_bytes(self.job, self.gpu, 1)["weights"]
            for learner_tp, micro, held in self._learner_choices(self.gpus):
                learning = self._learning(self.gpus, learner_tp, micro)
                layout = GpuLayout(COLOCATED, self.gpus, learner_tp, 0, 1)
                held = {**held, "engine's weights": copy}
                yield from self._in_turns(layout, micro, held, learning)

    def replicas(self) -> Iterator[LayoutEstimate]:
        """Every GPU holds all of the learner, and its engine samples from the learner's tensors."""
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
        if not slots or always + turn > room_of(gpu).usable:
            return
        key = (gpus, 1, -slots)  # of these alone its seconds depend on
        if key not in self._samplers:
            self._samplers[key] = self._sampling(gpus, 1, slots, 0)
        replica, rollout, longest = self._samplers[key]
        sync = self._sync(COLOCATED, gpus) if layout.kind == COLOCATED else 0.0
        memory = {**held, **self._pool(gpus, 1, tokens)}
        yield LayoutEstimate(
            layout, replica, micro, learning, rollout, longest, sync, memory, {}, job.sampled
        )

    def calibration(self) -> tuple[FitCheck, ...]:
        return single_device_checks()

    def formula(self, one: LayoutEstimate) -> list[str]:
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
        rate = rates.train * (1.0 if layout.learners == 1 or layout.kind == REPLICAS else SPLIT)
        flops = learning.compute * layout.learners * rate / busiest
        hidden = learning.compute + learning.gather + learning.join + learning.optimizer - learn
        far = "NVLink" if self.gpus <= NODE else "network"
        size = f"{2 * num_parameters(shape) / 1e9:.1f} GB"
        synced = {
            COLOCATED: f"{size} gathered by each of {layout.learners} for its engine",
            REPLICAS: "none: engines sample from the learners' own tensors",
            WORKERS: f"{size} gathered by {layout.learners} and broadcast over {far}",
            SERVERS: f"{size} gathered by {layout.learners}, written to files and read again at "
            f"{DISK / 1e9:.0f} GB/s",
        }[layout.kind]
        return [
            f"step     = {step} + sync {one.sync:.3f} = {one.step:.2f} s, decided by {one.decided_by}",
            f"rollout  = {sampling // layout.sampler_tp} engines x {one.replica.groups} tasks x "
            f"{work.samples}, {one.replica.slots} rows at once at most; a decoding step of B rows = "
            f"{shape.layers} layers x ({launch:.0f} + {join:.0f} us) + ({weights / 1e9:.2f} GB + "
            f"B x {logits / 1e6:.2f} MB + {kv_bytes(shape, BF16) / 1e3:.0f} kB x tokens seen) / "
            f"({layout.sampler_tp} x {rates.decode / 1e12:.2f} TB/s)",
            f"learn    = {flops:.3g} FLOPs / ({layout.learners} x {rate / 1e12:.0f}e12) x "
            f"{busiest:.2f} (busiest rank) = {learning.compute:.2f} s + gathering "
            f"{learning.gather:.2f} s - hidden {hidden:.2f} s + adding up {learning.join:.2f} s "
            f"+ optimizer {learning.optimizer:.3f} s; micro-batches of {one.micro.tokens:,} tokens, "
            f"activations {'computed twice' if one.micro.recompute else 'kept'}",
            f"sync     = {synced}",
        ]

    def why_not(self) -> str:
        """What stands in the way where nothing fits."""
        whole, usable = 2.0 * num_parameters(self.job.shape), room_of(self.gpu).usable
        held = [
            learner_bytes(self.job, self.gpus, tp)
            for tp in splits_of(self.job.shape)
            if self.gpus % tp == 0
        ]
        least = min(sum(one.values()) for one in held)
        if least > usable:
            return (
                f"A learner split over all {self.gpus} holds {gigabytes(least)} on each GPU, and "
                f"{gigabytes(usable)} are usable"
            )
        if whole > usable:
            return (
                f"Our own engine samples from a whole copy, {gigabytes(whole)} of {gigabytes(usable)} "
                "usable, so the model must be split over servers of vLLM or SGLang on GPUs of their "
                "own, and too few are left to learn"
            )
        return "The learner, a copy to sample from and the longest answer do not fit together"

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

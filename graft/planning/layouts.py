"""A layout says which GPUs learn and which sample; an estimate has its seconds and bytes.

    colocated  torchrun: all GPUs learn, with the learner split over them, then each samples from a whole
               copy that is refilled after every step
    replicas   torchrun: a whole learner on each GPU; its engine samples from the learner's tensors
    workers    Ray: some GPUs learn, each of the others samples from a whole copy
    servers    torchrun for the GPUs that learn; vLLM or SGLang, which can split layers, on the others

The native engine samples from a whole model in one process, so only servers have a sampler tp above 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from graft.planning.hardware import NODE
from graft.planning.scaling import KINDS, Learning, Replica
from graft.train.memory.plan import MicroBatchSize

TOGETHER, WORKERS, SERVERS = KINDS
COLOCATED, REPLICAS = "colocated", "replicas"


class GpuLayout(NamedTuple):
    """Numbers of GPUs. Without samplers the learners sample too, in turns."""

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
        """The commands that start it."""
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
        """The part that a step waits for."""
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

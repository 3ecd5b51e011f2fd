"""The numbers behind an estimate in words, and what to change where no layout fits."""

from __future__ import annotations

from dataclasses import replace

from graft.planning.hardware import GPUS, NODE, can_shard, runs_under_torchrun, tp_sizes
from graft.planning.planner import (
    COLOCATED,
    DISK,
    REPLICAS,
    SERVERS,
    WORKERS,
    LayoutEstimate,
    Planner,
)
from graft.planning.scaling import BF16, JOIN, SPLIT, learner_bytes, slowest_share
from graft.planning.step_time import decode_step_bytes
from graft.train.memory.footprint import gigabytes, kv_bytes, num_parameters


def formula(planner: Planner, one: LayoutEstimate) -> list[str]:
    """The formulas of an estimate with its numbers."""
    job, rates, layout, learning = planner.job, planner.rates, one.layout, one.learning
    work, shape, bound = job.work, job.shape, layout.staleness
    learn, sampling = learning.seconds, layout.samplers or layout.learners
    if not bound:
        step = f"rollout {one.rollout:.2f} + learn {learn:.2f}"
    else:
        longest = f", longest {one.longest:.2f} / {bound}" if one.longest else ""
        step = f"max(rollout {one.rollout:.2f}, learn {learn:.2f}{longest})"
    launch, join = rates.step * 1e6, JOIN * 1e6 * (layout.sampler_tp > 1)
    weights = decode_step_bytes(shape, BF16, 0, 0)
    logits = decode_step_bytes(shape, BF16, 1, 0) - weights
    ranks = layout.learners // layout.learner_tp
    busiest = slowest_share(job, ranks)
    rate = rates.train * (1.0 if layout.learners == 1 or layout.kind == REPLICAS else SPLIT)
    flops = learning.compute * layout.learners * rate / busiest
    hidden = learning.compute + learning.gather + learning.join + learning.optimizer - learn
    far = "NVLink" if planner.gpus <= NODE else "network"
    size = f"{2 * num_parameters(shape) / 1e9:.1f} GB"
    synced = {
        COLOCATED: f"{size} gathered by each of {layout.learners} for its engine",
        REPLICAS: "none: engines sample from the learners' tensors",
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
        f"{learning.gather:.2f} s - hidden {hidden:.2f} s + sums {learning.join:.2f} s "
        f"+ optimizer {learning.optimizer:.3f} s; micro-batches of {one.micro.tokens:,} tokens, "
        f"activations {'computed twice' if one.micro.recompute else 'kept'}",
        f"sync     = {synced}",
    ]


def why_not(planner: Planner) -> str:
    """What does not fit, where no layout does."""
    whole, usable = 2.0 * num_parameters(planner.job.shape), planner.gpu.device_memory.usable
    if not runs_under_torchrun(planner.gpus):
        return (
            f"{planner.gpus} GPUs are not whole nodes of {NODE}, which torchrun needs, and layouts "
            "with Ray do not fit"
        )
    held = [
        learner_bytes(planner.job, planner.gpus, tp)
        for tp in tp_sizes(planner.job.shape)
        if can_shard(planner.job.shape, planner.gpus, tp)
    ]
    least = min(sum(one.values()) for one in held)
    if least > usable:
        return (
            f"A learner split over all {planner.gpus} holds {gigabytes(least)} on each GPU, and "
            f"{gigabytes(usable)} are usable"
        )
    if whole > usable:
        return (
            f"The native engine samples from a whole copy, {gigabytes(whole)} of {gigabytes(usable)} "
            "usable, so the model must be split over servers of vLLM or SGLang on separate GPUs, and "
            "too few are left to learn"
        )
    return "The learner, a copy to sample from and the longest answer do not fit together"


def what_fits(planner: Planner) -> str:
    """Single changes with which a layout fits, the cheapest of each kind."""
    ways: list[str] = []
    for count in (planner.gpus * 2**power for power in range(1, 7)):
        if replace(planner, gpus=count).best is not None:
            ways.append(f"{count} of these GPUs")
            break
    for name, gpu in GPUS.items():
        if gpu.memory > planner.gpu.memory and Planner(planner.job, gpu, planner.gpus).best:
            ways.append(f"--gpu {name}")
            break
    longest, least = int(planner.job.lengths[-1]) // 2, planner.job.work.sampled
    while longest > least:
        shorter = replace(planner.job, longest=longest)
        if replace(planner, job=shorter).best is not None:
            ways.append(f"answers of at most {longest:,} tokens")
            break
        longest //= 2
    if ways:
        return f"What fits: {', or '.join(ways)}"
    return "No single change fits: use more GPUs with more memory, or a smaller model"

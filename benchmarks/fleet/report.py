"""What `python -m benchmarks.fleet` prints: layouts of many GPUs and their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.table import Table

from benchmarks.fleet.hardware import GPUS, NODE, can_shard, runs_under_torchrun, tp_sizes
from benchmarks.fleet.planner import (
    COLOCATED,
    DISK,
    REPLICAS,
    SERVERS,
    WORKERS,
    LayoutEstimate,
    Planner,
)
from benchmarks.fleet.scaling import BF16, JOIN, SPLIT, learner_bytes, slowest_share
from graft.engine.native.kv.pages import kv_bytes
from graft.planning.report import number_table, plain_console
from graft.planning.step_time import decode_step_bytes
from graft.train.memory.footprint import gigabytes, num_parameters


def show_layouts(planner: Planner, best: LayoutEstimate, name: str) -> None:
    console = plain_console()
    console.width = max(console.width, 100)
    job, work, layout = planner.job, planner.job.work, best.layout
    console.print(
        f"{name}: {num_parameters(job.shape):,} parameters in bfloat16 on {planner.gpus} x "
        f"{planner.gpu.name}: computed, not measured"
    )
    console.print(
        f"a step: {work.groups} tasks x {work.samples} answers, {work.prompt:,} -> {work.sampled:,} "
        f"tokens on average, {int(job.lengths[-1]):,} at the longest; tools {job.tool_seconds:g} s"
    )
    console.print(_layout_table(planner, best))
    is_stale = any(one.layout.staleness > job.staleness for one in planner.per_kind)
    is_shown = layout.samplers or layout.sampler_tp > 1
    samplers = _gpus(layout.samplers or layout.learners, layout.sampler_tp)
    sampling = f", {samplers} sample" * bool(is_shown)
    bracketed = "; layouts in brackets need a larger --staleness" * is_stale
    learning = f"{_gpus(layout.learners, layout.learner_tp)} learn"
    console.print(f"best: {layout.name}, {learning}{sampling}{bracketed}")
    for command in layout.commands("RECIPE"):
        console.print(f"  {command}", markup=False)
    if layout.kind == SERVERS:
        console.print(
            "servers were tested on a CPU only; they are assumed to decode as fast as the native engine"
        )
    console.print(_memory_of_layout(best, planner.gpu.device_memory.usable))
    for line in formula(planner, best):
        console.print(line)
    console.print(
        "Rates were measured on one H200, where rows that set no rate are off by up to 17%. Links, "
        "overlap and other GPUs are assumed: benchmarks/PLANNER.md",
        style="dim",
    )


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
    usable = planner.gpu.device_memory.usable
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
    return "The learner, the engine's weights and the longest answer do not fit together"


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


def _layout_table(planner: Planner, best: LayoutEstimate) -> Table:
    numbers = ["rollout s", "learn s", "sync s", "step s", "tokens/s"]
    table = number_table(["layout", "learn", "sample"], numbers)
    for one in sorted(planner.per_kind, key=lambda one: -one.step):
        layout = one.layout
        is_allowed = layout.staleness <= planner.job.staleness
        seconds = (one.rollout, one.learning.seconds, one.sync, one.step)
        table.add_row(
            layout.name if is_allowed else f"({layout.name})",
            _gpus(layout.learners, layout.learner_tp),
            _gpus(layout.samplers or layout.learners, layout.sampler_tp),
            *(f"{x:,.3g}" if x < 100 else f"{x:,.0f}" for x in seconds),
            f"{one.tokens_per_second:,.0f}",
            style="bold" if one is best else None,
        )
    return table


def _memory_of_layout(best: LayoutEstimate, usable: int) -> Table:
    sides = (best.learner_memory, best.sampler_memory)
    learner = "learner" if best.sampler_memory else "learns and samples"
    table = number_table(["memory of one GPU"], [learner, "sampler"])

    def row(name: str, sizes: Sequence[float]) -> None:
        table.add_row(name, *(gigabytes(size) if size else "" for size in sizes))

    for item in {**best.learner_memory, **best.sampler_memory}:
        row(item, [side.get(item, 0.0) for side in sides])
    table.add_section()
    row("total", [sum(side.values()) for side in sides])
    row("usable", [usable if side else 0 for side in sides])
    return table


def _gpus(count: int, tp: int) -> str:
    """
    >>> _gpus(48, 8), _gpus(16, 1)
    ('48 (tp 8)', '16')
    """
    return f"{count}" if tp == 1 else f"{count} (tp {tp})"

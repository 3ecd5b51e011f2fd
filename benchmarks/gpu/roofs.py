"""What the device can do at best, measured first: every later number is read against it."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.report import Row

READ = "read"  # TB/s
MULTIPLY = "multiply"  # TFLOP/s of a large bf16 matrix product

UNMEASURED = {READ: 4.58, MULTIPLY: 801.0}
"""An H200's, for runs that leave this job out."""


def roofs(bench: Bench) -> list[Row]:
    is_gpu = bench.device.type == "cuda"
    size, side = (4_000_000_000, 8192) if is_gpu else (20_000_000, 512)
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    integers = source.view(torch.int64)
    a = torch.randn(side, side, device=bench.device, dtype=bench.dtype)
    b = torch.randn_like(a)
    copying = _seconds(bench, lambda: target.copy_(source))
    reading = _seconds(bench, lambda: integers.sum())
    multiplying = _seconds(bench, lambda: a @ b)
    bench.roofs[READ] = size / reading / 1e12
    bench.roofs[MULTIPLY] = 2 * side**3 / multiplying / 1e12
    rows = [
        Row("copy, read and write", "TB/s", 2 * size / copying / 1e12),
        Row("read", "TB/s", bench.roofs[READ]),
        Row(f"matrix product {side}^3", "TFLOP/s", bench.roofs[MULTIPLY]),
    ]
    one = torch.zeros(1, device=bench.device)

    def eager() -> None:
        for _ in range(2000):
            one.add_(1)

    rows.append(Row("eager operation", "us", _seconds(bench, eager, 1) / 2000 * 1e6))
    if is_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(1000):
                one.add_(1)
        rows.append(Row("graph node", "us", _seconds(bench, graph.replay) / 1000 * 1e6))
    return rows


def _seconds(bench: Bench, work: Callable[[], object], repeats: int = 10) -> float:
    """Of one call: the median of five runs of `repeats`."""

    def several() -> None:
        for _ in range(repeats):
            work()

    bench.time(several)
    return median(bench.time(several) for _ in range(5)) / repeats

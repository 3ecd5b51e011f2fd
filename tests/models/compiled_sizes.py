"""Compiles the large kernels for one GPU generation, which needs none, as their callers launch them.

    python compiled_sizes.py 120

Run by `test_compiled_sizes` without Triton's interpreter: {kernel: the most bytes of shared memory}.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from graft.engine.native.cuda.kernels import decode, extend, segments
from graft.models.device import has_large_shared_memory
from graft.models.kernels import chunks, fixed_product, interval, path_attention
from graft.models.kernels.experts import mix_experts
from graft.models.kernels.gate import Clamp
from graft.models.kernels.routing import group_rows
from graft.models.layers.chunks import ScanInputs, empty_rows
from graft.models.recurrence import Recurrence
from graft.models.tree.block_lists import BlockLists
from graft.models.tree.packing import TokenRun

CPU = torch.device("cpu")
GROUPS = {(16, 8, 128): (0,), (4, 1, 256): (0, 512)}
"""Query heads, key/value heads, head size and windows: of Qwen3-0.6B, of Gemma 3 270M."""


class Driver:
    """Of a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def engine(heads: int, kv_heads: int, size: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Launch attention of the engine."""
    q, pool = zeros(640, heads, size, dtype=dtype), zeros(16, kv_heads, 64, size, dtype=dtype)
    table, tiles = (zeros(*shape, dtype=torch.int32) for shape in ((4, 8), (10, 4)))
    numbers = zeros(4, dtype=torch.long)
    space = decode.scratch(4, 3, heads, size, CPU)
    for window in GROUPS[heads, kv_heads, size]:
        extend.extend(q, pool, pool, table, tiles, window)
        for tile_rows in (16, 32):
            decode.decode(
                q[:4], pool, pool, table, numbers, numbers, zeros(2, 5, dtype=torch.int32), numbers,
                splits=2, slots=3, tile_rows=tile_rows, space=space, window=window,
            )  # fmt: skip


def learner(heads: int, kv_heads: int, size: int) -> None:
    """Launch attention of the learner, and its gradient."""
    q, kv = zeros(640, heads, size), zeros(640, kv_heads, size)
    for window in GROUPS[heads, kv_heads, size]:
        ends, run = torch.full((640,), 640, dtype=torch.int32), TokenRun(0, 640, [])
        blocks = BlockLists.of(ends, CPU, window, [run])
        out, lse = interval.attend(q, kv, kv, blocks)
        interval.differentiate(q, kv, kv, out, lse, out, blocks)


def exact(heads: int, kv_heads: int, size: int) -> None:
    """Launch attention and products of a fixed order."""
    q, kv, pool = zeros(640, heads, size), zeros(640, kv_heads, size), zeros(16, kv_heads, 64, size)
    table, tiles = (zeros(*shape, dtype=torch.int32) for shape in ((4, 8), (10, 4)))
    index = zeros(640, dtype=torch.long)
    path: Any = SimpleNamespace(index=index, tiles=tiles, table=zeros(10, dtype=torch.int32))
    numbers, space = zeros(4, dtype=torch.long), decode.scratch(4, 9, heads, size, CPU)
    codes, scales = zeros(*pool.shape, dtype=torch.uint8), zeros(*pool.shape[:-1])
    for window in GROUPS[heads, kv_heads, size]:
        path_attention.attend_pages(q, pool, pool, table, tiles, window)
        path_attention.attend_pages(q, codes, codes, table, tiles, window, scales=(scales, scales))
        path_attention.attend(q, kv, kv, path, window)
        for tile_rows in (16, 32):
            for pages, of_codes in ((pool, (None, None)), (codes, (scales, scales))):
                segments.decode_segments(
                    q[:4], pages, pages, table, numbers, numbers, zeros(2, 5, dtype=torch.int32),
                    splits=2, slots=9, tile_rows=tile_rows, tail_rows=2, space=space, window=window,
                    scales=of_codes,
                )  # fmt: skip
    for outputs, inputs in ((6144, 1024), (24576, 4096)):
        for rows in (1, 64, 512, 700):
            x, weight = zeros(rows, inputs), zeros(outputs, inputs)
            fixed_product.fixed_linear(x, weight)
            if rows <= 512:
                fixed_product.fixed_linear(x, weight, gate="silu")


def experts(
    width: int,
    ff: int,
    clamp: Clamp,
    has_bias: bool,
    dtype: torch.dtype = torch.bfloat16,
    each: tuple[int, ...] = (8, 40, 100),
) -> None:
    """Launch each tile of the MLPs of experts, with the gate inside and apart, and the gradients."""
    for tokens in each:
        groups = group_rows(zeros(tokens, 4, dtype=torch.int64), 4)
        sizes = (tokens, width), (8 * ff, width), (4 * width, ff)
        given = [zeros(*size, dtype=dtype).requires_grad_() for size in sizes]
        weights = zeros(tokens, 4, dtype=torch.float32).requires_grad_()
        biases = [
            zeros(n, dtype=dtype).requires_grad_() if has_bias else None
            for n in (8 * ff, 4 * width)
        ]
        with torch.no_grad():
            mix_experts(*given, weights, groups, *biases, clamp)
        mix_experts(*given, weights, groups, *biases, clamp).sum().backward()


def recurrence(sizes: Recurrence) -> None:
    """Launch rows of chunks: of the learner, of prompts, of decoding."""
    heads, key_heads, value = sizes.value_heads, sizes.key_heads, sizes.value_dim
    wide = {"dtype": torch.float32}
    q, v = zeros(4, key_heads, sizes.key_dim, **wide), zeros(4, heads, value, **wide)
    beta = zeros(4, heads, **wide) if sizes.kind == "delta" else None
    new = ScanInputs(q, q, v, zeros(4, heads, **wide), beta)
    state, parts = zeros(3, heads, value, sizes.key_dim, **wide), zeros(4, 7, dtype=torch.long)
    for rows in (None, empty_rows(3, new)):
        chunks.advance(new, parts, state, state, rows)
    chunks.advance(new, parts, state, state, empty_rows(3, new), is_single=True)


def main(capability: int) -> dict[str, int]:
    driver.set_active(Driver(capability))
    compile_only, found = JITFunction.run, dict[str, int]()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        made = compile_only(kernel, *args, grid=grid, warmup=True, **constants)
        if made is None:
            raise RuntimeError(f"{kernel.__name__} was not compiled")
        name = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"
        found[name] = max(found.get(name, 0), made.metadata.shared)

    JITFunction.run = run
    torch.cuda.get_device_capability = lambda device: divmod(capability, 10)
    is_large = has_large_shared_memory(torch.device("cuda"))
    decode.has_large_shared_memory = interval.has_large_shared_memory = lambda device: is_large
    for group in GROUPS:
        engine(*group)
        if capability >= 90:
            learner(*group)
        if capability == 90:
            exact(*group)
    if capability == 90:
        experts(2048, 768, Clamp(), has_bias=False)  # of Qwen3-30B-A3B
        experts(2880, 2880, Clamp(7.0, 1.702), has_bias=True)  # of gpt-oss
        experts(512, 512, Clamp(7.0, 1.702), has_bias=True, dtype=torch.float32, each=(100,))
        recurrence(Recurrence("delta", 4, 16, 128, 32, 128))  # of Qwen3-Next
        recurrence(Recurrence("mamba", 4, 8, 128, 128, 64))  # of Nemotron-H
    if capability == 86:  # the least of all
        engine(16, 8, 128, torch.float32)
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))

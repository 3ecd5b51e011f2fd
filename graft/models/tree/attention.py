"""Attention over a packed forest: with our kernel on a GPU, run by run elsewhere.

L tokens, H query heads, K key/value heads, d head size; a bucket holds S runs of m queries, n keys
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from graft.models.angles import HeadRotation
from graft.models.decoder import Attend
from graft.models.device import HOPPER, has_kernels
from graft.models.ops import gather_rows, qk_rotate
from graft.models.tile_attention import attend_rows, padded_length
from graft.models.tree.block_lists import MAX_HEAD, BlockLists
from graft.models.tree.packing import TokenRun
from graft.models.tree.path_blocks import PathBlocks


def attention_over(
    runs: list[TokenRun],
    ends: Tensor,
    heads: int,
    kv_heads: int,
    device: torch.device,
    in_order: bool = False,
    windows: tuple[int, ...] = (),
) -> Attend:
    """`attend` for the forest of these runs; `ends` [L] of its tokens, on the CPU.

    in_order   kernels add keys in the order of `kernels.path_attention`, as the engine does
    windows    how many positions the tokens of each layer see, 0 for all; empty: all, in every layer
    """
    if has_kernels(device) and len(ends):
        return KernelAttention(runs, ends, heads, kv_heads, device, in_order, windows)
    return TreeAttention(runs, heads, kv_heads, device, windows)


class KernelAttention:
    """`attend` with the interval kernel; run by run for head sizes and GPUs that it does not support."""

    def __init__(
        self,
        runs: list[TokenRun],
        ends: Tensor,
        heads: int,
        kv_heads: int,
        device: torch.device,
        in_order: bool = False,
        windows: tuple[int, ...] = (),
    ) -> None:
        self.windows, self.runs = windows, runs
        self.blocks = {
            window: BlockLists.of(ends, device, window, runs) for window in set(windows or (0,))
        }
        self.path = PathBlocks.of(runs, device) if in_order else None
        self._forest = (runs, heads, kv_heads, device, windows)
        self._plain: TreeAttention | None = None

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        from graft.models.kernels.interval import interval_attention

        if not why_no_kernel(q.shape[-1], q.dtype, q.device):
            if self.path is not None:
                from graft.models.kernels.path_attention import path_attention

                return path_attention(q, k, v, self.path, self._blocks_of(layer), sinks)
            return interval_attention(q, k, v, self._blocks_of(layer), sinks)
        if self._plain is None:
            self._plain = TreeAttention(*self._forest)
        return self._plain(layer, q, k, v, *(() if sinks is None else (sinks,)))

    def of_qkv(
        self, layer: int, qkv: Tensor, how: HeadRotation, sinks: Tensor | None = None
    ) -> Tensor:
        """The same of q|k|v before head norms and rotation, which is all that is kept of it.

        A rotation alone needs no q|k|v for its gradient: its result is kept instead.
        """
        size = qkv.shape[1] // (how.heads + 2 * how.kv_heads)
        if how.q_weight is None or why_no_kernel(size, qkv.dtype, qkv.device):
            return self(layer, *qk_rotate(qkv, how), sinks)
        from graft.models.kernels.rotated_attention import rotated_attention

        return rotated_attention(qkv, how, self._blocks_of(layer), self.path, sinks)

    def _blocks_of(self, layer: int) -> BlockLists:
        return self.blocks[self.windows[layer] if self.windows else 0]


@cache
def why_no_kernel(size: int, dtype: torch.dtype, device: torch.device) -> str:
    """Why the interval kernel cannot be used; empty if it can."""
    if size > MAX_HEAD or size * dtype.itemsize % 16:
        return f"head size {size} is not a multiple of 8 up to {MAX_HEAD}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < HOPPER:
        return "this GPU is older than the Hopper generation"
    return ""


class TreeAttention:
    """`attend` for a packed forest: each run attends to the tokens of its path and its own.

    Runs of similar size are computed together, padded. Compared with one dense L x L mask this skips
    other trees and other branches: nearly everything for many samples of one prompt.
    """

    def __init__(
        self,
        runs: list[TokenRun],
        heads: int,
        kv_heads: int,
        device: torch.device,
        windows: tuple[int, ...] = (),
    ) -> None:
        self.groups, self.windows, self.runs = heads // kv_heads, windows, runs
        total = sum(run.stop - run.start for run in runs)
        self.buckets: list[tuple[Tensor, Tensor, dict[int, Tensor]]] = []
        order: list[Tensor] = []
        offset = 0
        for bucket in _similar(runs):
            queries = _padded([[(run.start, run.stop)] for run in bucket]).to(device)  # [S, m]
            paths = [[*run.path, (run.start, run.stop)] for run in bucket]
            keys = _padded(paths, padded_length).to(device)  # in the order of their positions
            key, query = keys[:, None, :], queries[:, :, None]
            # a path holds ancestors only: of the interval rule, key <= query is left to check
            seen = (key >= 0) & (key <= query)
            depth = torch.tensor([run.depth for run in bucket], device=device)[:, None, None]
            position = depth + torch.arange(queries.shape[1], device=device)[:, None]  # [S, m, 1]
            back = position - torch.arange(keys.shape[1], device=device)  # a path begins at 0
            biases: dict[int, Tensor] = {}
            for window in set(windows or (0,)):
                near = seen & (back < window) if window else seen.clone()
                near[..., 0] |= query[..., 0] < 0  # a padding query sees one key: no empty softmax
                bias = torch.zeros(seen.shape, device=device).masked_fill_(~near, -torch.inf)
                biases[window] = bias.repeat(1, self.groups, 1)[:, None]  # [S, 1, G*m, n]
            self.buckets.append((queries.clamp(min=0), keys.clamp(min=0), biases))
            flat = queries.flatten()
            rows = torch.full((total,), -1, dtype=torch.long, device=device)
            at = torch.arange(len(flat), device=device)[flat >= 0]
            rows[flat[flat >= 0]] = at + offset
            order.append(rows)
            offset += len(flat)
        self.inverse = torch.stack(order).amax(0) if order else torch.zeros(0, dtype=torch.long)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        _, heads, size = q.shape
        kv_heads = k.shape[1]
        outputs: list[Tensor] = []
        window = self.windows[layer] if self.windows else 0
        for queries, keys, biases in self.buckets:
            count, m = queries.shape
            # [S, m, K*G, d] -> [S, K, G*m, d]: the G heads of a group are more rows of one product
            q_rows = gather_rows(q, queries.flatten()).view(count, m, kv_heads, self.groups, size)
            q_rows = q_rows.permute(0, 2, 3, 1, 4).reshape(count, kv_heads, self.groups * m, size)
            k_rows, v_rows = (
                gather_rows(x, keys.flatten()).view(count, -1, kv_heads, size).transpose(1, 2)
                for x in (k, v)
            )
            found = attend_rows(q_rows, k_rows, v_rows, biases[window], window > 0, sinks)
            found = found.unflatten(2, (self.groups, m)).permute(0, 3, 1, 2, 4)
            outputs.append(found.reshape(count * m, heads, size))
        return gather_rows(torch.cat(outputs), self.inverse) if outputs else q


def _similar(runs: list[TokenRun]) -> list[list[TokenRun]]:
    """Buckets in which padding about doubles queries and keys at most."""
    buckets: list[list[TokenRun]] = []
    smallest = (0, 0)
    for run in sorted(runs, key=_magnitude):
        queries, keys = run.stop - run.start, run.depth + run.stop - run.start
        fits = buckets and queries <= 2 * smallest[0] and keys <= 2 * smallest[1] + 16
        if not fits:
            buckets.append([])
            smallest = (queries, keys)
        smallest = (min(smallest[0], queries), min(smallest[1], keys))
        buckets[-1].append(run)
    return buckets


def _magnitude(run: TokenRun) -> tuple[int, int]:
    queries = run.stop - run.start
    return queries.bit_length(), (run.depth + queries).bit_length()


def _padded(
    rows: list[list[tuple[int, int]]], width: Callable[[int], int] = lambda longest: longest
) -> Tensor:
    """[S, n] indices of each row's intervals, -1 after the end; n is `width` of the longest row."""
    lists = [np.concatenate([np.arange(a, b) for a, b in row]) for row in rows]
    padded = np.full((len(lists), width(max(len(x) for x in lists))), -1, dtype=np.int64)
    for i, values in enumerate(lists):
        padded[i, : len(values)] = values
    return torch.from_numpy(padded)

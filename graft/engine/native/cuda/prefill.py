"""Prompts and tool results on a GPU: tokens without a draw, of many sequences at a time.

    T tokens in one list, P pages of a sequence

Where the products of a layer take longer than the host needs to launch its kernels, chunks are launched
kernel by kernel. Shorter ones would wait for the host: they are padded to a size of `SIZES` and computed by
a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graft.engine.native.cuda.graphs import Graphs
from graft.engine.native.cuda.kernels.extend import BLOCK, BLOCK_FIELDS, extend
from graft.engine.native.cuda.recurrence import PromptPaths
from graft.engine.native.kv.sequences import SequenceTree
from graft.engine.native.scheduler import PlannedWork
from graft.models.decoder import Decoder
from graft.models.kernels.path_attention import attend_pages
from graft.models.kv_slots import KVSlots
from graft.transfer import transfer

SIZES = (16, 64, 256, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Tokens that graphs are captured for."""
MAX_ROWS = 256
"""Sequences of a graph: it has a block at least for each, and empty blocks take time too."""
LAUNCH_FLOPS = 4e11
"""What the products of a GPU compute while the host launches the kernels of a layer, 0.65 ms on an H200."""


class PrefillChunk(NamedTuple):
    """The tokens of a step as arrays, on the host or on the device."""

    tokens: Any  # [T]
    rows: Any  # [T] row of the table
    positions: Any  # [T]
    blocks: Any  # [n, 4], see `kernels.extend`
    table: Any  # [rows, P]
    alive: Any  # [rows] 1, or 0 in rows that pad


class Prefill:
    """Computes keys and values of tokens that are not drawn."""

    def __init__(self, decoder: Decoder, tree: SequenceTree, graphs: Graphs | None) -> None:
        self.decoder, self.tree, self.graphs = decoder, tree, graphs
        self.device, self.in_order = decoder.device, decoder.order is not None
        self.widest = -(-decoder.shape.max_positions // tree.pages.size)
        weights = sum(p.numel() for p in decoder.blocks[0].parameters() if p.ndim == 2)
        self.sizes = [size for size in SIZES if 2 * size * weights <= LAUNCH_FLOPS]
        if tree.states is not None:
            self.sizes = []  # the chunks of a prompt make another number of launches in every step
        self._captured: dict[int, tuple[PrefillChunk, Callable[[], None]]] = {}

    def compute(self, works: list[PlannedWork]) -> None:
        """The next `count` tokens of every work's sequence."""
        chunk = self._lay_out(works)
        size = self._graph_size(len(chunk.tokens), len(works))
        if size is None or self.graphs is None:
            self._forward(self._move(chunk), self._paths(works))
        else:
            buffers, replay = self._captured.get(size) or self._capture(size, self.graphs)
            for buffer, part in zip(buffers, self._move(_pad(chunk, size)), strict=True):
                (buffer[:, : part.shape[1]] if part.ndim == 2 else buffer).copy_(part)
            replay()
        for work in works:
            work.sequence.cached += work.count

    def _paths(self, works: list[PlannedWork]) -> PromptPaths | None:
        """What recurrent layers read and write, whose slots advance by these tokens."""
        if (states := self.tree.states) is None:
            return None
        return PromptPaths(states, [w.sequence for w in works], [w.count for w in works])

    def _graph_size(self, num_tokens: int, num_rows: int) -> int | None:
        """The smallest graph for so many tokens; padding takes a row that no sequence has."""
        for size in self.sizes:
            if num_tokens <= size:
                return size if num_rows + (num_tokens < size) <= max_rows(size) else None
        return None

    def _lay_out(self, works: list[PlannedWork]) -> PrefillChunk:
        sequences = [work.sequence for work in works]
        count = np.array([work.count for work in works])
        start = np.array([sequence.cached for sequence in sequences])
        first = count.cumsum() - count  # of each sequence's tokens in the list
        per = -(-count // BLOCK)  # blocks of each sequence
        of = np.arange(len(works)).repeat(per)
        begin = (np.arange(len(of)) - (per.cumsum() - per).repeat(per)) * BLOCK
        blocks = [first[of] + begin, np.minimum(count[of] - begin, BLOCK), start[of] + begin, of]
        width = max(len(sequence.pages) for sequence in sequences)
        tokens = [t for w in works for t in w.sequence.tokens[w.sequence.cached :][: w.count]]
        return PrefillChunk(
            tokens=np.array(tokens),
            rows=np.arange(len(works)).repeat(count),
            positions=np.arange(len(tokens)) + (start - first).repeat(count),
            blocks=np.stack(blocks, axis=1).astype(np.int32),
            table=self.tree.table[[s.row for s in sequences], :width].astype(np.int32),
            alive=np.ones(len(works), dtype=np.int32),
        )

    def _move(self, chunk: PrefillChunk) -> PrefillChunk:
        arrays = {name: torch.from_numpy(array) for name, array in chunk._asdict().items()}
        return PrefillChunk(**transfer(arrays, self.device))

    def _capture(self, size: int, graphs: Graphs) -> tuple[PrefillChunk, Callable[[], None]]:
        """Buffers for `size` tokens of up to as many sequences, and the graph that computes them."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        buffers = PrefillChunk(
            tokens=zeros(size, dtype=torch.int64),
            rows=zeros(size, dtype=torch.int64),
            positions=zeros(size, dtype=torch.int64),
            blocks=zeros(max_blocks(size), BLOCK_FIELDS),
            table=zeros(max_rows(size), self.widest),
            alive=zeros(max_rows(size)),  # no row: the capture writes nothing
        )
        self._captured[size] = buffers, graphs.record(lambda: self._forward(buffers))
        return self._captured[size]

    def _forward(self, chunk: PrefillChunk, paths: PromptPaths | None = None) -> None:
        pages = self.tree.pages
        pool = pages.pool

        def attend(layer: int, q: Tensor, k: None, v: None, sinks: Tensor | None = None) -> Tensor:
            how = chunk.table, chunk.blocks, self.decoder.shape.window_of(layer), sinks
            if self.in_order:
                scales = pages.scales_of(layer)
                return attend_pages(q, pool[layer, 0], pool[layer, 1], *how, scales=scales)
            return extend(q, pool[layer, 0], pool[layer, 1], *how)

        attend.paths = paths  # type: ignore[attr-defined]
        places = chunk.table, chunk.rows, chunk.positions, chunk.alive
        kv_slots = KVSlots(pool, *places, pages.scales)
        self.decoder(chunk.tokens, chunk.positions, attend, kv_slots)


def max_rows(size: int) -> int:
    """Sequences of a graph of `size` tokens."""
    return min(size, MAX_ROWS)


def max_blocks(size: int) -> int:
    """Blocks of `size` tokens at most, for as many sequences."""
    return max_rows(size) + size // BLOCK


def _pad(chunk: PrefillChunk, size: int) -> PrefillChunk:
    """Padding tokens belong to an unused row of the table, padding blocks are empty."""

    def longer(array: np.ndarray, rows: int, fill: int = 0) -> np.ndarray:
        padding = np.full((rows - len(array), *array.shape[1:]), fill, dtype=array.dtype)
        return np.concatenate([array, padding])

    return PrefillChunk(
        tokens=longer(chunk.tokens, size),
        rows=longer(chunk.rows, size, fill=max_rows(size) - 1),
        positions=longer(chunk.positions, size),
        blocks=longer(chunk.blocks, max_blocks(size)),
        table=longer(chunk.table, max_rows(size)),
        alive=longer(chunk.alive, max_rows(size)),
    )

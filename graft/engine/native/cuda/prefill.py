"""Prompts and tool results on a GPU: tokens without a draw, of many sequences at a time.

    T tokens in one list, P pages of a sequence

Long chunks are launched kernel by kernel: a kernel takes longer than the host needs to launch the next.
Short ones would wait for the host, so they are padded to a size of `SIZES` and computed by a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graft.engine.native.cuda.graphs import Graphs
from graft.engine.native.cuda.kernels.extend import BLOCK, BLOCK_FIELDS, extend
from graft.engine.native.kv.sequences import SequenceTree
from graft.engine.native.scheduler import PlannedWork
from graft.models.decoder import Decoder
from graft.models.kernels.path_attention import attend_pages
from graft.models.kv_slots import KVSlots
from graft.transfer import transfer

SIZES = (16, 64, 256, 1024)
"""Tokens that graphs are captured for."""


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
        self._captured: dict[int, tuple[PrefillChunk, Callable[[], None]]] = {}

    def compute(self, works: list[PlannedWork]) -> None:
        """The next `count` tokens of every work's sequence."""
        chunk = self._lay_out(works)
        size = next((size for size in SIZES if size >= len(chunk.tokens)), None)
        if size is None or self.graphs is None:
            self._forward(self._move(chunk))
        else:
            buffers, replay = self._captured.get(size) or self._capture(size, self.graphs)
            for buffer, part in zip(buffers, self._move(_pad(chunk, size)), strict=True):
                (buffer[:, : part.shape[1]] if part.ndim == 2 else buffer).copy_(part)
            replay()
        for work in works:
            work.sequence.cached += work.count

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
            table=zeros(size, self.widest),
            alive=zeros(size),  # no row: the capture writes nothing
        )
        self._captured[size] = buffers, graphs.record(lambda: self._forward(buffers))
        return self._captured[size]

    def _forward(self, chunk: PrefillChunk) -> None:
        pool = self.tree.pages.pool

        attention = attend_pages if self.in_order else extend

        def attend(layer: int, q: Tensor, *_: None) -> Tensor:
            return attention(q, pool[layer, 0], pool[layer, 1], chunk.table, chunk.blocks)

        kv_slots = KVSlots(pool, chunk.table, chunk.rows, chunk.positions, chunk.alive)
        self.decoder(chunk.tokens, chunk.positions, attend, kv_slots)


def max_blocks(size: int) -> int:
    """Blocks of `size` tokens at most, for any number of sequences."""
    return size + size // BLOCK


def _pad(chunk: PrefillChunk, size: int) -> PrefillChunk:
    """Padding tokens belong to an unused row of the table, padding blocks are empty."""

    def longer(array: np.ndarray, rows: int, fill: int = 0) -> np.ndarray:
        padding = np.full((rows - len(array), *array.shape[1:]), fill, dtype=array.dtype)
        return np.concatenate([array, padding])

    return PrefillChunk(
        tokens=longer(chunk.tokens, size),
        rows=longer(chunk.rows, size, fill=size - 1),  # unused, unless there is nothing to pad
        positions=longer(chunk.positions, size),
        blocks=longer(chunk.blocks, max_blocks(size)),
        table=longer(chunk.table, size),
        alive=longer(chunk.alive, size),
    )

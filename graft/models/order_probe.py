"""Finds on this machine how rows must be computed so that none depends on the rows beside it.

One block of each kind, the head and the log-softmax of the decoder run on some rows at once, and on parts
of them: 1 row, 2, ..., 255, from several places. Attention runs as in the engine, over keys that
were computed before. If all bits agree, the `RowOrder` holds. What is tried, cheapest first: rows padded
to 2, 4, 8, 16 or 64, products in blocks of 64 or 256 rows. Libraries choose by shapes and threads, so
the answer is for this shape and this number of threads.

No probe tries every number of rows. `sampling/sampling_logp_difference` compares all trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from graft.models.decoder import Decoder
from graft.models.layers.chunks import ChunkRows, ScanInputs, empty_rows, next_state, write_rows
from graft.models.product_probe import find_kernel_order
from graft.models.recurrence import CHUNK
from graft.models.row_order import RowOrder
from graft.models.tile_attention import attend_rows, padded_length

CANDIDATES = (
    *(RowOrder(least=least) for least in (2, 4, 8, 16, 64)),
    RowOrder(least=64, block=64),
    RowOrder(least=256, block=256),
)
COUNTS = (*range(1, 18), 23, 24, 31, 32, 33, 48, 64, 100, 129, 255)
"""Numbers of rows that are compared with all of them at once."""

STREAM_SCALE = 2.0**-10
"""The size of rows that go into a block, less than embeddings: what a block adds to larger ones is rounded
in the sum, and other bits of it with it."""

MAX_ROWS, MAX_FLOPS = 397, 1e9
"""Of one pass over all rows; there are fewer of large models. No number of threads divides so many evenly."""

_found: dict[tuple[str, int, bool], RowOrder | None] = {}


def find_order(decoder: Decoder) -> RowOrder | None:
    """The cheapest order that holds on this machine; None: none does, or it is neither float32 on a CPU nor
    bfloat16 on a GPU (`product_probe`)."""
    if decoder.device.type == "cuda":
        return find_kernel_order(decoder)[0]
    if decoder.device.type != "cpu" or decoder.dtype != torch.float32 or not decoder.is_whole:
        return None
    key = decoder.shape.layer_key, torch.get_num_threads(), bool(torch.backends.mkldnn.enabled)
    if key not in _found:
        _found[key] = next((found for order in CANDIDATES if (found := _try(decoder, order))), None)
    return _found[key]


@torch.no_grad()
def _try(decoder: Decoder, order: RowOrder) -> RowOrder | None:
    """The order if it holds, with what is known about columns."""
    kept = decoder.order
    decoder.use_order(order)
    try:
        for layer in decoder.shape.kinds:
            if not _holds(_block_rows(decoder, layer), _num_rows(decoder, layer)):
                return None
        head = _head_rows(decoder)
        if not _holds(head, _num_rows_of(decoder.head_weight.numel())):
            return None
        return replace(order, any_columns=_has_any_columns(decoder))
    finally:
        decoder.use_order(kept)


def _num_rows_of(parameters: int) -> int:
    return max(24, min(MAX_ROWS, int(MAX_FLOPS / (2 * parameters))))


def _num_rows(decoder: Decoder, layer: int) -> int:
    return _num_rows_of(sum(parameter.numel() for parameter in decoder.blocks[layer].parameters()))


def _holds(compute: Callable[[int, int], Tensor], total: int) -> bool:
    """Whether rows `start` to `stop` of `compute` are those of all rows."""
    whole = compute(0, total)
    for number, count in enumerate(count for count in COUNTS if count < total):
        start = (number + 1) * 37 % (total - count + 1)
        if not torch.equal(compute(start, start + count), whole[start : start + count]):
            return False
    return True


def _noise(rows: int, width: int, seed: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def _block_rows(decoder: Decoder, layer: int) -> Callable[[int, int], Tensor]:
    """One block on rows of one sequence; its keys are those of the first call."""
    shape, order = decoder.shape, decoder.order
    assert order is not None
    block, kv_heads = decoder.blocks[layer], shape.kv_heads
    stream = _noise(_num_rows(decoder, layer), shape.width, 0) * STREAM_SCALE
    cached: list[Tensor] = []
    window = shape.window_of(layer)

    def compute(start: int, stop: int) -> Tensor:
        positions = torch.arange(start, stop)
        length = padded_length(stop)
        back = positions[:, None] - torch.arange(length)
        seen = (back >= 0) & (back < window) if window else back >= 0
        bias = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
            if not cached:
                cached.extend(torch.cat([x, x.new_zeros(16, *x.shape[1:])]) for x in (k, v))
            keys, values = (x[:length].transpose(0, 1)[None] for x in cached)
            rows = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [K, G, T, d]
            group = rows.shape[1]
            by_head = bias.repeat(group, 1)[None, None]
            how = by_head, window > 0, *sinks
            found = attend_rows(rows.flatten(1, 2)[None], keys, values, *how)
            return found[0].unflatten(1, (group, -1)).permute(2, 0, 1, 3).flatten(1, 2)

        if shape.is_recurrent(layer):
            attend.paths = _ProbePaths(start, stop)  # type: ignore[attr-defined]
        x = order.padded(stream[start:stop])
        cos, sin = decoder.rope(order.padded(positions), layer)
        x, delta = block(x, None, cos, sin, order.padded_attend(attend, stop - start))
        added = () if delta is None else (delta,)
        return torch.cat([*added, *decoder.norm(x, delta)], dim=1)[: stop - start]

    return compute


class _ProbePaths:
    """`layers.paths.Paths` of rows that each are in a chunk of their own, after rows of noise."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop, self.count = start, stop, stop - start

    def before(self, layer: int, x: Tensor, count: int) -> Tensor:
        del layer
        return self._noise(count, x.shape[1], seed=4)

    def scan(self, layer: int, new: ScanInputs, in_order: bool) -> Tensor:
        del layer, in_order
        heads, value_dim = new.v.shape[1:]
        rows = ChunkRows(*(self._noise(*x.shape[1:], seed=5) for x in empty_rows(1, new)))
        rows.log.abs_().neg_()
        state = self._noise(heads, value_dim, new.k.shape[2], seed=6)
        read = write_rows(state, rows, torch.arange(self.start, self.stop) % CHUNK, new)
        falling = rows.log.sort(-1, descending=True).values  # as decays are: else it overflows
        return read + next_state(state, rows._replace(log=falling)).amax(-1)

    def _noise(self, *size: int, seed: int) -> Tensor:
        """Rows `start` to `stop` of noise."""
        rows = _noise(MAX_ROWS, math.prod(size), seed)[self.start : self.stop]
        return rows.view(-1, *size).clone()


def _head_rows(decoder: Decoder) -> Callable[[int, int], Tensor]:
    hidden = _noise(_num_rows_of(decoder.head_weight.numel()), decoder.shape.width, 1)

    def compute(start: int, stop: int) -> Tensor:
        logits = decoder.logits(hidden[start:stop])
        return torch.cat([logits, logits.log_softmax(-1)], dim=1)  # the second rounds

    return compute


def _has_any_columns(decoder: Decoder) -> bool:
    """Whether some columns of the logits have the bits of all columns."""
    hidden = _noise(24, decoder.shape.width, 2)
    whole = decoder.logits(hidden)
    generator = torch.Generator().manual_seed(3)
    for count in (1, 2, 3, 5, 8, 16, 31, 64, 200):
        columns = torch.randperm(whole.shape[1], generator=generator)[:count].sort().values
        for rows in (1, 2, 7, 24):
            if not torch.equal(decoder.logits(hidden[:rows], columns), whole[:rows, columns]):
                return False
    return True

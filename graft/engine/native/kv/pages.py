"""The KV pool: keys and values in pages of a few tokens, with reference counts.

    pool    [layers, 2, pages, K, page, d]   2: keys, values; K key/value heads of size d
    scales  [layers, 2, pages, K, page]      of a pool whose rows are rounded to eight bits (`kv_slots`)

One page of one head is a contiguous tile, so a gather moves whole tiles. Page 0 is never allocated:
it pads tables, and it stays zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graft.engine.native.kv.slots import Slots
from graft.models.device import has_kernels
from graft.models.kv_slots import SCALE_DTYPE, dequantise, quantise
from graft.models.shape import ModelShape

PAD_PAGE = 0
"""The page that pads tables."""

CPU_TOKENS = 65_536
CPU_BYTES = 2 << 30
GPU_SHARE = 0.4  # of the memory free when the engine starts: the trainer needs the rest


class Pages(Slots):
    """Slots of a page each, and the tensor behind them."""

    def __init__(
        self,
        shape: ModelShape,
        num_pages: int,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
        rounds: bool = False,
    ) -> None:
        super().__init__(num_pages)
        self.size, self.dtype = page_size, dtype
        self.kv_heads, self.head_dim = shape.kv_heads, shape.head_dim
        self.windows = shape.windows
        self.horizon = max(shape.windows) if shape.windows and all(shape.windows) else 0
        """How many positions a token sees in the layer that sees most; 0: all."""
        # zeros, not empty: a masked key has weight 0, and 0 * NaN would still be NaN
        self.pool = torch.zeros(
            (shape.attention_layers, 2, num_pages + 1, shape.kv_heads, page_size, shape.head_dim),
            device=device,
            dtype=torch.uint8 if rounds else dtype,
        )
        self.scales = None
        if rounds:
            self.scales = self.pool.new_zeros(self.pool.shape[:-1], dtype=SCALE_DTYPE)
        self._rows = self.pool.view(shape.attention_layers, 2, -1, shape.head_dim)
        self._tiles = self.pool.view(shape.attention_layers, 2, -1, page_size * shape.head_dim)
        self._copies: list[tuple[int, int]] = []

    def window(self, layer: int) -> int:
        """How many positions the tokens of a layer see; 0: all."""
        return self.windows[layer] if self.windows else 0

    def copy_later(self, source: int, target: int) -> None:
        """Copy a page before the next write; `flush_copies` does all copies of a step in one call."""
        if any(target == other for other, _ in self._copies):
            self.flush_copies()  # a kernel makes them in any order: the page is read before it is written
        self._copies.append((source, target))

    def flush_copies(self) -> None:
        if not self._copies:
            return
        pairs = torch.tensor(self._copies, device=self.pool.device)
        self._copies.clear()
        if has_kernels(self.pool.device):
            from graft.engine.native.cuda.kernels.copy import copy

            for tensor in self._tensors:
                copy(tensor, pairs)
        else:
            source, target = pairs.unbind(1)
            for tensor in self._tensors:
                tensor[:, :, target] = tensor[:, :, source]

    def wipe(self) -> None:
        """Zero every value (not the reference counts): after a NaN no stored value can be trusted."""
        self._copies.clear()
        for tensor in self._tensors:
            tensor.zero_()

    def discard(self) -> None:
        """Free the memory; pages can still be released."""
        self.pool = self._rows = self._tiles = self.pool.new_empty(0)
        self.scales = None

    @property
    def _tensors(self) -> list[Tensor]:
        return [self.pool] if self.scales is None else [self.pool, self.scales]

    def scales_of(self, layer: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Those of a layer's keys and of its values."""
        return (None, None) if self.scales is None else self.scales[layer].unbind(0)  # type: ignore[return-value]

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [T,K,d] at `rows` [T*K] of the pool seen as [pages*K*page, d]."""
        for which, new in enumerate((k, v)):
            stored = new.reshape(-1, self.head_dim)
            if self.scales is not None:
                stored, scales = quantise(stored)
                self.scales[layer, which].view(-1).index_copy_(0, rows, scales)
            self._rows[layer, which].index_copy_(0, rows, stored)

    def gather(self, layer: int, which: int, tiles: Tensor) -> Tensor:
        """Keys (which=0) or values (1), [n*K, P*page, d], of `tiles` [n*K, P].

        A tile is a row of the pool seen as [pages*K, page*d]: number `page * K + head`.
        """
        flat = tiles.reshape(-1)
        rows = self._tiles[layer, which].index_select(0, flat).view(len(tiles), -1, self.head_dim)
        if self.scales is None:
            return rows
        scales = self.scales[layer, which].flatten(0, 1).index_select(0, flat)
        return dequantise(rows, scales.view(rows.shape[:2]), self.dtype)


def kv_bytes(shape: ModelShape, dtype: torch.dtype, rounds: bool = False) -> int:
    """Bytes of one token's keys and values in all layers; rounded: a byte for each number, two for a row."""
    row = shape.head_dim + SCALE_DTYPE.itemsize if rounds else shape.head_dim * dtype.itemsize
    return 2 * shape.attention_layers * shape.kv_heads * row


def pool_tokens(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, rounds: bool = False
) -> int:
    """The default size of the pool in tokens, from the memory of the device."""
    per_token = kv_bytes(shape, dtype, rounds)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE) // per_token
    return min(CPU_TOKENS, CPU_BYTES // per_token)

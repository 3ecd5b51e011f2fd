"""Decoding, one token per sequence, in float32: matrix products around a softmax.

    S slots, K key/value heads, G query heads to each of them, d head size, L positions

Gathering pages costs as much as attending to them, so a lane keeps what it gathered: as long as the
same sequences go on, a step only writes their one new key and value beside the old ones. A sequence
that ends leaves an idle slot behind; when many are idle, or a new sequence comes, lanes are built
anew from the pages.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graft.engine.native.cpu.attention import Padding
from graft.engine.native.kv.pages import Pages

Ints = NDArray[np.int64]
Dense = tuple[Tensor, Tensor]
"""Keys and values side by side, [rows*K, L, d] each."""

Partial = tuple[Tensor, ...]
"""Attention over a part of the past: largest score, sum of weights, weighted values."""


class SharedPrefix:
    """The past that siblings share, read once for all of them.

    g groups of R siblings (padded by repeating one), each with its shared pages; the slots of a
    lane are the siblings of the first group, then those of the second, and so on.
    """

    def __init__(self, siblings: Padding, tiles: Tensor, bias: Tensor | None) -> None:
        self.siblings = siblings
        """[S] <-> [g, R]"""
        self.tiles = tiles
        """[g*K, P], see `Pages.gather`."""
        self.bias = bias
        """[g*K, 1, L], 0 or -inf; None if all groups share equally much."""
        self.kept: dict[int, Dense] = {}

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, heads: int) -> Partial:
        """Of q [S, H, d], scaled, over keys and values [g*K, L, d]."""
        scores = torch.bmm(self._to_groups(q, heads), keys.transpose(1, 2))
        if self.bias is not None:
            scores += self.bias
        return tuple(self._to_slots(x, heads) for x in partial_attention(scores, values))

    def _to_groups(self, x: Tensor, heads: int) -> Tensor:
        """[S, H, n] -> [g*K, R*G, n]"""
        padded = self.siblings.pad(x).unflatten(2, (heads, -1)).transpose(1, 2)
        return padded.reshape(-1, padded.shape[2] * padded.shape[3], x.shape[-1])

    def _to_slots(self, x: Tensor, heads: int) -> Tensor:
        """[g*K, R*G, n] -> [S, H, n]"""
        grouped = x.view(self.siblings.rows, heads, self.siblings.m, -1, x.shape[-1])
        return self.siblings.unpad(grouped.transpose(1, 2)).flatten(1, 2)


class DecodeBatch:
    """Sequences that decode side by side; a bucket that lives for many steps.

    `starts` [S] is the first position in the slot's own part (what comes before is common).
    """

    def __init__(
        self, starts: Ints, tiles: Tensor, bias: Tensor, common: SharedPrefix | None, keep: bool
    ) -> None:
        self.starts, self.common = starts, common
        self.tokens = len(starts)  # slots in use: as many rows of the step are ours
        self.tiles = tiles
        """[S*K, P], see `Pages.gather`."""
        self.bias = bias
        """[S*K, G, L], 0 or -inf."""
        self._keep = keep
        self._kept: dict[int, Dense] = {}
        self._used: Tensor | None = None  # [tokens] slots in use, None: all
        self._rows: Tensor | None = None  # [tokens*K] where in [S*K*L] the new keys go
        self._asks: Tensor | None = None  # [S] a row of the step for every slot

    @property
    def length(self) -> int:
        """Positions there is space for."""
        return self.bias.shape[-1]

    @property
    def can_advance(self) -> bool:
        return self._keep

    def advance(self, slots: Ints, positions: Ints, heads: int) -> None:
        """Get ready for the next step: `slots` go on, each with a token at its position."""
        device = self.bias.device
        own = positions - self.starts[slots]
        rows = (slots[:, None] * heads + np.arange(heads)) * self.length + own[:, None]
        self._rows = torch.from_numpy(rows.ravel()).to(device)
        used, at = torch.from_numpy(slots).to(device), torch.from_numpy(own).to(device)
        self.bias.view(len(self.starts), -1, self.length)[used, :, at] = 0
        self.tokens = len(slots)
        self._used = self._asks = None
        if len(slots) < len(self.starts):
            asks = np.zeros(len(self.starts), dtype=np.int64)  # idle slots repeat row 0
            asks[slots] = np.arange(len(slots))
            self._used, self._asks = used, torch.from_numpy(asks).to(device)

    def attend(self, pages: Pages, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[tokens, H, d]"""
        if self._asks is not None:
            q = q.index_select(0, self._asks)
        keys, values = self._dense(pages, layer, k, v)
        q_scaled = q * pages.head_dim**-0.5
        asked = q_scaled.reshape(len(self.bias), -1, pages.head_dim)
        scores = torch.baddbmm(self.bias, asked, keys.transpose(1, 2))
        if self.common is None:
            seen = torch.bmm(scores.softmax(-1), values).view(q.shape)
        else:
            own = partial_attention(scores, values)
            past_kv = self._past(pages, layer, self.common)
            past = self.common.attend(q_scaled, *past_kv, pages.kv_heads)
            seen = merge(past, tuple(x.view(*q.shape[:2], -1) for x in own))
        return seen if self._used is None else seen.index_select(0, self._used)

    def _past(self, pages: Pages, layer: int, common: SharedPrefix) -> Dense:
        dense = common.kept.get(layer) or _gather(pages, layer, common.tiles)
        if self._keep:
            common.kept[layer] = dense
        return dense

    def _dense(self, pages: Pages, layer: int, k: Tensor, v: Tensor) -> Dense:
        if layer in self._kept and self._rows is not None:
            keys, values = self._kept[layer]
            keys.view(-1, pages.head_dim).index_copy_(0, self._rows, k.reshape(-1, pages.head_dim))
            values.view(-1, pages.head_dim).index_copy_(
                0, self._rows, v.reshape(-1, pages.head_dim)
            )
            return keys, values
        dense = _gather(pages, layer, self.tiles)
        if self._keep:
            self._kept[layer] = dense
        return dense


def _gather(pages: Pages, layer: int, tiles: Tensor) -> Dense:
    """Keys and values of `tiles` [n*K, P]: [n*K, L, d] each."""
    return pages.gather(layer, 0, tiles), pages.gather(layer, 1, tiles)


def partial_attention(scores: Tensor, values: Tensor) -> Partial:
    """Of scores [n, q, L] (overwritten) and values [n, L, d]: [n, q, 1], [n, q, 1], [n, q, d].

    Weights are exp(score - largest), not yet divided by their sum.
    """
    largest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    return largest, weights.sum(-1, keepdim=True), torch.bmm(weights, values)


def merge(one: Partial, other: Partial) -> Tensor:
    """Attention over both parts, as if one softmax had run over all scores."""
    largest = torch.maximum(one[0], other[0])
    scale, scale_other = (one[0] - largest).exp_(), (other[0] - largest).exp_()
    blended = one[2] * scale + other[2] * scale_other
    return blended / (one[1] * scale + other[1] * scale_other)

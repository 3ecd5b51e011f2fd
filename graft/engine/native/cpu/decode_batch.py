"""Decoding, one token per sequence, in float32: matrix products around a softmax.

    S slots, K key/value heads, G query heads to each of them, d head size, L positions

Gathering pages costs as much as attending to them, so a decode batch keeps what it gathered: as long
as the same sequences continue, a step only writes one new key and value for each. A sequence that ends
leaves an idle slot; when many are idle, or a new sequence comes, decode batches are built anew from
the pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from graft.engine.native.cpu.attention import Ints, Padding, PageLayout
from graft.engine.native.kv.pages import Pages
from graft.engine.native.kv.sequences import Sequence
from graft.engine.native.kv.siblings import (
    SiblingGroup,
    find_sibling_groups,
    split_by_pages,
    split_by_size,
    split_by_total,
)

MAX_KEPT = 1 << 26
"""Elements that decode batches may keep beside the pages, all layers together: 256 MB of float32."""

MIN_USED = 0.75  # a batch with a smaller share of its slots in use is built anew

Dense = tuple[Tensor, Tensor]
"""Keys and values side by side, [rows*K, L, d] each."""

Partial = tuple[Tensor, ...]
"""Attention over some of the positions: largest score, sum of weights, weighted values."""

Arranged = list[tuple[list[Sequence], "DecodeBatch"]]


@dataclass(slots=True)
class SharedPrefix:
    """The prefix that siblings share, read once for all of them.

    g groups of R siblings (padded by repeating one), each with its shared pages; the slots of a
    decode batch are the siblings of the first group, then those of the second, and so on.
    """

    siblings: Padding
    """[S] <-> [g, R]"""
    tiles: Tensor
    """[g*K, P], see `Pages.gather`."""
    bias: Tensor | None
    """[g*K, 1, L], 0 or -inf; None if all prefixes are equally long."""
    dense: dict[int, Dense] = field(default_factory=dict[int, Dense])

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
    """Sequences that decode together; a bucket that is kept for many steps.

    `starts` [S] is the first position in the slot's own part; those before are in `prefix`.
    """

    def __init__(
        self, starts: Ints, tiles: Tensor, bias: Tensor, prefix: SharedPrefix | None, keep: bool
    ) -> None:
        self.starts, self.prefix = starts, prefix
        self.tokens = len(starts)  # slots in use, each one row of the step
        self.tiles = tiles
        """[S*K, P], see `Pages.gather`."""
        self.bias = bias
        """[S*K, G, L], 0 or -inf."""
        self.keep = keep
        self._kept: dict[int, Dense] = {}
        self._used: Tensor | None = None  # [tokens] slots in use, None: all
        self._rows: Tensor | None = None  # [tokens*K] rows of [S*K*L] for the new keys
        self._row_of_slot: Tensor | None = None  # [S]; None: slot and row are the same

    @property
    def length(self) -> int:
        """Positions that fit."""
        return self.bias.shape[-1]

    def advance(self, slots: Ints, positions: Ints, heads: int) -> None:
        """Prepare the next step: `slots` continue, each with a token at its position."""
        device = self.bias.device
        own = positions - self.starts[slots]
        rows = (slots[:, None] * heads + np.arange(heads)) * self.length + own[:, None]
        self._rows = torch.from_numpy(rows.ravel()).to(device)
        used, at = torch.from_numpy(slots).to(device), torch.from_numpy(own).to(device)
        self.bias.view(len(self.starts), -1, self.length)[used, :, at] = 0
        self.tokens = len(slots)
        self._used = self._row_of_slot = None
        if len(slots) < len(self.starts):
            row_of_slot = np.zeros(len(self.starts), dtype=np.int64)  # idle slots repeat row 0
            row_of_slot[slots] = np.arange(len(slots))
            self._used, self._row_of_slot = used, torch.from_numpy(row_of_slot).to(device)

    def attend(self, pages: Pages, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[tokens, H, d]"""
        if self._row_of_slot is not None:
            q = q.index_select(0, self._row_of_slot)
        keys, values = self._dense(pages, layer, k, v)
        q_scaled = q * pages.head_dim**-0.5
        queries = q_scaled.reshape(len(self.bias), -1, pages.head_dim)
        scores = torch.baddbmm(self.bias, queries, keys.transpose(1, 2))
        if self.prefix is None:
            seen = torch.bmm(scores.softmax(-1), values).view(q.shape)
        else:
            own = partial_attention(scores, values)
            prefix_kv = self._prefix(pages, layer, self.prefix)
            shared = self.prefix.attend(q_scaled, *prefix_kv, pages.kv_heads)
            seen = merge(shared, tuple(x.view(*q.shape[:2], -1) for x in own))
        return seen if self._used is None else seen.index_select(0, self._used)

    def _prefix(self, pages: Pages, layer: int, prefix: SharedPrefix) -> Dense:
        dense = prefix.dense.get(layer) or _gather(pages, layer, prefix.tiles)
        if self.keep:
            prefix.dense[layer] = dense
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
        if self.keep:
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


class DecodeCache:
    """The decode batches in use. `arrange` may be given the same sequences step after step."""

    def __init__(self, layout: PageLayout, max_pages: int) -> None:
        self.layout, self.max_pages = layout, max_pages
        self._batches: list[DecodeBatch] = []
        self._slots: dict[Sequence, tuple[int, int, int]] = {}  # batch, slot, next position

    def arrange(self, sequences: list[Sequence]) -> Arranged:
        """Every sequence in a batch; the sequences of a batch in the order of its slots."""
        arranged = self._advance(sequences) or self._build(sequences)
        self._batches = [batch for _, batch in arranged]
        return arranged

    def clear(self) -> None:
        """Free what the batches keep."""
        self._batches, self._slots = [], {}

    def _advance(self, sequences: list[Sequence]) -> Arranged | None:
        """The batches of the last step with the remaining sequences; None if they have to be rebuilt."""
        left: list[list[tuple[int, Sequence]]] = [[] for _ in self._batches]
        for sequence in sequences:
            known = self._slots.get(sequence)
            if known is None or known[2] != sequence.cached:
                return None  # a new sequence, or one that lost its pages in between
            left[known[0]].append((known[1], sequence))
        heads = self.layout.tree.pages.kv_heads
        ready: list[tuple[DecodeBatch, list[Sequence], np.ndarray, np.ndarray]] = []
        for batch, found in zip(self._batches, left, strict=True):
            if not found:
                continue
            found.sort(key=lambda pair: pair[0])
            slots = np.array([slot for slot, _ in found])
            positions = np.array([sequence.cached for _, sequence in found])
            has_space = int((positions - batch.starts[slots]).max()) < batch.length
            if not batch.keep or not has_space or len(found) < MIN_USED * len(batch.starts):
                return None
            ready.append((batch, [sequence for _, sequence in found], slots, positions))
        self._slots = {}
        for number, (batch, members, slots, positions) in enumerate(ready):
            batch.advance(slots, positions, heads)
            for sequence, slot in zip(members, slots.tolist(), strict=True):
                self._slots[sequence] = (number, slot, sequence.cached + 1)
        return [(members, batch) for batch, members, _, _ in ready]

    def _build(self, sequences: list[Sequence]) -> Arranged:
        groups, alone = find_sibling_groups(sequences, self.layout.tree.pages.size)
        parts: list[tuple[list[Sequence], list[SiblingGroup]]] = [
            (part, []) for part in split_by_pages(alone, self.max_pages)
        ]
        num_pages = sum(len(part) * len(part[0].pages) for part, _ in parts)
        num_pages += sum(group.num_pages() for group in groups)
        for like in split_by_size(groups, key=lambda group: group.pages):
            for alike in split_by_size(like, key=lambda group: len(group.members)):
                for few in split_by_total(alike, self.max_pages, key=SiblingGroup.num_pages):
                    parts.append(([member for group in few for member in group.members], few))
        keep = self.layout.tree.pages.pool[:, :, 0].numel() * num_pages <= MAX_KEPT
        self._slots = {
            sequence: (number, slot, sequence.cached + 1)
            for number, (members, _) in enumerate(parts)
            for slot, sequence in enumerate(members)
        }
        return [(members, self._batch(members, few, keep)) for members, few in parts]

    def _batch(
        self, members: list[Sequence], groups: list[SiblingGroup], keep: bool
    ) -> DecodeBatch:
        """Own pages in the batch; those that the siblings of `groups` (none: no siblings) share, in its
        `prefix`."""
        layout, size = self.layout, self.layout.tree.pages.size
        skip, prefix = np.zeros(len(members), dtype=np.int64), None
        if groups:
            sizes = np.array([len(group.members) for group in groups])
            pages = np.array([group.pages for group in groups])
            table = layout.table([group.members[0] for group in groups])[:, : pages.max()]
            bias = None
            if pages.min() < pages.max():
                seen = np.arange(table.shape[1] * size) < pages[:, None] * size
                bias = layout.bias(seen).repeat_interleave(layout.tree.pages.kv_heads, 0)[:, None]
            prefix = SharedPrefix(layout.padding(sizes), layout.tiles(table), bias)
            skip = pages.repeat(sizes)
        return DecodeBatch(skip * size, *self._own(members, skip), prefix, keep)

    def _own(self, sequences: list[Sequence], skip: Ints) -> tuple[Tensor, Tensor]:
        """Tiles [S*K, P] and bias [S*K, G, L] of the pages after the first `skip` [S] of each."""
        layout, pages = self.layout, self.layout.tree.pages
        table = layout.table(sequences)
        if skip.any():
            held = np.array([len(sequence.pages) for sequence in sequences])
            columns = skip[:, None] + np.arange((held - skip).max())
            inside = columns < held[:, None]
            table = np.where(inside, np.take_along_axis(table, columns * inside, axis=1), 0)
        lengths = np.array([sequence.cached + 1 for sequence in sequences]) - skip * pages.size
        seen = np.arange(table.shape[1] * pages.size) < lengths[:, None]
        bias = layout.bias(seen)[:, None, None].expand(-1, pages.kv_heads, layout.group_size, -1)
        return layout.tiles(table), bias.flatten(0, 1).contiguous()

"""Decoding, one token per sequence, in float32, and those of a draft behind it.

    S slots, m tokens of each at most, K key/value heads, G query heads to each, d head size, L positions

PyTorch's fused attention also decodes: on an ARM machine it took a third of the time of matrix products
around a softmax. Gathering pages costs as much as attending to them, so a decode batch keeps what it
gathered: as long as the same sequences continue, a step only writes one new key and value for each. A
sequence that ends leaves an idle slot; when many are idle, or a new sequence comes, decode batches are
built anew from the pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from graft.engine.native.cpu.attention import Ints, Padding, PageLayout
from graft.engine.native.drafts.gain import MAX_DRAFT
from graft.engine.native.kv.pages import Pages
from graft.engine.native.kv.sequences import Sequence
from graft.engine.native.kv.siblings import (
    SiblingGroup,
    find_sibling_groups,
    split_by_pages,
    split_by_size,
    split_by_total,
)
from graft.models.tile_attention import (
    TILE,
    Tile,
    attend_rows,
    attend_tiles,
    merge_tiles,
    pad_bias,
    pad_rows,
    sink_rows,
)

MAX_KEPT = 1 << 26
"""Elements that decode batches may keep beside the pages, all layers together: 256 MB of float32."""

MAX_STEP = 1 + MAX_DRAFT
"""Tokens that a sequence gets in a step, at most."""

MIN_USED = 0.75  # a batch with a smaller share of its slots in use is built anew

Dense = tuple[Tensor, Tensor]
"""Keys and values side by side, [rows, K, L, d] each."""

Arranged = list[tuple[list[Sequence], "DecodeBatch"]]


@dataclass(slots=True)
class SharedPrefix:
    """The tiles (see `models.tile_attention`) that siblings share, read once for all of them.

    g groups of R siblings (padded by repeating one), each with equally many shared tiles; the slots of
    a decode batch are the siblings of the first group, then those of the second, and so on.
    """

    siblings: Padding
    """[S] <-> [g, R]"""
    tiles: Tensor
    """[g*K, P], see `Pages.gather`."""
    dense: dict[int, Dense] = field(default_factory=dict[int, Dense])

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, first: Tensor | None = None
    ) -> list[Tile]:
        """Compute the attention of q [S, K, G, d] over keys and values [g, K, L, d].

        first   [S] the first position that each slot sees; None: all see the whole prefix
        """
        rows = self.siblings.pad(q).transpose(1, 2).flatten(2, 3)  # [g, K, R*G, d]
        rows = pad_rows(rows, rows.shape[3])
        bias = None
        if first is not None:
            is_before = torch.arange(keys.shape[2], device=q.device) < first[:, None]
            bias = torch.zeros(is_before.shape, device=q.device).masked_fill_(is_before, -torch.inf)
            by_head = self.siblings.pad(bias).repeat_interleave(q.shape[2], 1)  # [g, R*G, L]
            bias = _pad_bias(by_head, rows.shape[2])
        found = attend_tiles(rows, keys, values, bias, first is not None)
        return [
            (
                self._to_slots(seen, q.shape[2]),
                self._to_slots(log_sum[..., None], q.shape[2])[..., 0],
            )
            for seen, log_sum in found
        ]

    def _to_slots(self, x: Tensor, group: int) -> Tensor:
        """[g, K, R*G, n] -> [S, K, G, n]"""
        grouped = x[:, :, : self.siblings.m * group].unflatten(2, (self.siblings.m, group))
        return self.siblings.unpad(grouped.transpose(1, 2))


class DecodeBatch:
    """Sequences that decode together; a bucket that is kept for many steps.

    `starts` [S] is the first position in the slot's own part; those before are in `prefix`. `positions` [S]
    are those of the tokens that decode now; of a draft, that of the token before it.
    """

    def __init__(
        self,
        starts: Ints,
        positions: Ints,
        tiles: Tensor,
        bias: Tensor,
        prefix: SharedPrefix | None,
        keep: bool,
    ) -> None:
        self.starts, self.positions, self.prefix = starts, positions, prefix
        self._windowed: dict[int, tuple[Tensor, Tensor]] = {}
        self._drafted: dict[int, Tensor] = {}
        self.tokens = len(starts)  # rows of the step: a token of each slot in use, and of its draft
        self.tiles = tiles
        """[S*K, P], see `Pages.gather`."""
        self.bias = bias
        """[S, 1, 1, L], 0 or -inf: what the first token of each slot sees."""
        self.keep = keep
        self._kept: dict[int, Dense] = {}
        self._rows: Tensor | None = None  # [tokens*K] rows of [S*K*L] for the new keys
        self._most = 1  # m
        self._pick: Tensor | None = (
            None  # [S*m] the row of each query; None: slot and row are the same
        )
        self._back: Tensor | None = None  # [tokens] the query of each row

    @property
    def length(self) -> int:
        """Positions that fit."""
        return self.bias.shape[-1]

    def advance(self, slots: Ints, positions: Ints, counts: Ints, heads: int) -> None:
        """Prepare the next step: `slots` continue, each with `counts` tokens from its position on."""
        device = self.bias.device
        before = self.positions[slots]
        self.positions[slots] = positions
        self._windowed.clear()
        self.lay_out(slots, counts)
        column = (positions - self.starts[slots]).repeat(counts) + _places(counts)
        rows = (slots.repeat(counts)[:, None] * heads + np.arange(heads)) * self.length
        self._rows = torch.from_numpy((rows + column[:, None]).ravel()).to(device)
        # what was accepted of the last drafts is seen too
        more = positions - before
        at = (before + 1 - self.starts[slots]).repeat(more) + _places(more)
        rows = torch.from_numpy(slots.repeat(more)).to(device)
        self.bias[rows, 0, 0, torch.from_numpy(at).to(device)] = 0

    def lay_out(self, slots: Ints, counts: Ints) -> None:
        """Find the rows of `slots`, which have `counts` tokens each."""
        self._drafted.clear()
        self.tokens, self._most = int(counts.sum()), int(counts.max())
        self._pick = self._back = None
        if self._most == 1 and len(slots) == len(self.starts):
            return
        first = np.zeros(len(self.starts), dtype=np.int64)  # idle slots repeat row 0
        last = np.zeros(len(self.starts), dtype=np.int64)
        first[slots] = counts.cumsum() - counts
        last[slots] = counts - 1
        pick = first[:, None] + np.minimum(np.arange(self._most), last[:, None])
        back = (slots * self._most).repeat(counts) + _places(counts)
        device = self.bias.device
        self._pick = torch.from_numpy(pick.ravel()).to(device)
        self._back = torch.from_numpy(back).to(device)

    def attend(
        self, pages: Pages, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """[tokens, H, d]"""
        if self._pick is not None:
            q = q.index_select(0, self._pick)
        rows = q.unflatten(1, (pages.kv_heads, -1)).unflatten(0, (-1, self._most))
        rows = rows.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [S, K, G*m, d]
        keys, values = self._dense(pages, layer, k, v)
        window = pages.window(layer)
        bias, first = self._in_window(window) if window else (self.bias, None)
        if self._most > 1:
            bias = self._with_drafts(rows.shape[2])
        if self.prefix is None:
            seen = attend_rows(rows, keys, values, bias, window > 0, sinks)
        else:
            shared = self.prefix.attend(rows, *self._prefix(pages, layer, self.prefix), first)
            padded, bias = pad_rows(rows, rows.shape[3]), pad_bias(bias, rows.shape[3])
            own = attend_tiles(padded, keys, values, bias, window > 0)
            group = rows.shape[2]
            shared += [(seen[:, :, :group], log_sum[..., :group]) for seen, log_sum in own]
            sinks = None if sinks is None else sink_rows(sinks, pages.kv_heads, group)
            seen = merge_tiles(shared, sinks)[0]
        seen = seen.unflatten(2, (-1, self._most)).permute(0, 3, 1, 2, 4).reshape(q.shape)
        return seen if self._back is None else seen.index_select(0, self._back)

    def _with_drafts(self, queries: int) -> Tensor:
        """The bias [S, 1, G*m, L] where the tokens of a slot see those before them."""
        if queries not in self._drafted:
            last = (self.positions - self.starts)[:, None] + np.arange(self._most)
            is_seen = np.arange(self.length) <= last[:, :, None]
            bias = np.where(is_seen, np.float32(0), np.float32(-np.inf))
            tiled = np.tile(bias, (1, queries // self._most, 1))[:, None]
            self._drafted[queries] = torch.from_numpy(tiled).to(self.bias.device)
        return self._drafted[queries]

    def _in_window(self, window: int) -> tuple[Tensor, Tensor]:
        """The bias of the slots' own parts, and the first position [S] that each slot sees."""
        if window not in self._windowed:
            first, device = self.positions - window + 1, self.bias.device
            is_before = np.arange(self.length) < (first - self.starts)[:, None]
            mask = torch.from_numpy(is_before).to(device)[:, None, None]
            bias = self.bias.masked_fill(mask, -torch.inf)
            self._windowed[window] = bias, torch.from_numpy(first).to(device)
        return self._windowed[window]

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


def _places(counts: Ints) -> Ints:
    """The places of tokens in their parts: counts 2 3 -> 0 1 0 1 2"""
    return np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)


def _pad_bias(bias: Tensor, rows: int) -> Tensor:
    """[g, 1, rows, L] of a bias [g, r, L]: its last row repeated, as `pad_rows` repeats queries."""
    more = bias[:, -1:].expand(-1, rows - bias.shape[1], -1)
    return torch.cat([bias, more], dim=1)[:, None]


def _gather(pages: Pages, layer: int, tiles: Tensor) -> Dense:
    """Keys and values of `tiles` [n*K, P]: [n, K, L, d] each."""
    both = (pages.gather(layer, which, tiles) for which in (0, 1))
    keys, values = (x.unflatten(0, (-1, pages.kv_heads)) for x in both)
    return keys, values


class DecodeCache:
    """The decode batches in use. `arrange` may be given the same sequences step after step."""

    def __init__(self, layout: PageLayout, max_pages: int) -> None:
        self.layout, self.max_pages = layout, max_pages
        self._batches: list[DecodeBatch] = []
        self._slots: dict[Sequence, tuple[int, int, int]] = {}  # batch, slot, position

    def arrange(self, sequences: list[Sequence], counts: list[int]) -> Arranged:
        """Every sequence in a batch; the sequences of a batch in the order of its slots.

        counts   the tokens of each
        """
        count_of = dict(zip(sequences, counts, strict=True))
        arranged = self._advance(count_of) or self._build(count_of)
        self._batches = [batch for _, batch in arranged]
        return arranged

    def clear(self) -> None:
        """Free what the batches keep."""
        self._batches, self._slots = [], {}

    def _advance(self, count_of: dict[Sequence, int]) -> Arranged | None:
        """The batches of the last step with the remaining sequences; None if they have to be rebuilt."""
        left: list[list[tuple[int, Sequence]]] = [[] for _ in self._batches]
        for sequence in count_of:
            known = self._slots.get(sequence)
            if known is None or not known[2] < sequence.cached <= known[2] + MAX_STEP:
                return None  # a new sequence, or one that lost its pages in between
            left[known[0]].append((known[1], sequence))
        heads = self.layout.tree.pages.kv_heads
        ready: list[tuple[DecodeBatch, list[Sequence], Ints, Ints, Ints]] = []
        for batch, found in zip(self._batches, left, strict=True):
            if not found:
                continue
            found.sort(key=lambda pair: pair[0])
            slots = np.array([slot for slot, _ in found])
            positions = np.array([sequence.cached for _, sequence in found])
            counts = np.array([count_of[sequence] for _, sequence in found])
            has_space = int((positions + counts - batch.starts[slots]).max()) <= batch.length
            if not batch.keep or not has_space or len(found) < MIN_USED * len(batch.starts):
                return None
            ready.append((batch, [sequence for _, sequence in found], slots, positions, counts))
        self._slots = {}
        for number, (batch, members, slots, positions, counts) in enumerate(ready):
            batch.advance(slots, positions, counts, heads)
            for sequence, slot in zip(members, slots.tolist(), strict=True):
                self._slots[sequence] = (number, slot, sequence.cached)
        return [(batch_of[1], batch_of[0]) for batch_of in ready]

    def _build(self, count_of: dict[Sequence, int]) -> Arranged:
        groups, alone = self._share_tiles([*count_of])
        parts: list[tuple[list[Sequence], list[SiblingGroup]]] = [
            (part, []) for part in split_by_pages(alone, self.max_pages)
        ]
        num_pages = sum(len(part) * len(part[0].pages) for part, _ in parts)
        num_pages += sum(group.num_pages() for group in groups)
        for pages in {group.pages for group in groups}:
            like = [group for group in groups if group.pages == pages]
            for alike in split_by_size(like, key=lambda group: len(group.members)):
                for few in split_by_total(alike, self.max_pages, key=SiblingGroup.num_pages):
                    parts.append(([member for group in few for member in group.members], few))
        keep = self.layout.tree.pages.pool[:, :, 0].numel() * num_pages <= MAX_KEPT
        self._slots = {
            sequence: (number, slot, sequence.cached)
            for number, (members, _) in enumerate(parts)
            for slot, sequence in enumerate(members)
        }
        arranged = [(members, self._batch(members, few, keep)) for members, few in parts]
        for members, batch in arranged:
            counts = np.array([count_of[sequence] for sequence in members])
            batch.lay_out(np.arange(len(members)), counts)
        return arranged

    def _share_tiles(self, sequences: list[Sequence]) -> tuple[list[SiblingGroup], list[Sequence]]:
        """Sibling groups that share whole tiles, and the sequences that share none."""
        size = self.layout.tree.pages.size
        if TILE % size:
            return [], sequences
        groups, alone = find_sibling_groups(sequences, size)
        for group in groups:
            group.pages -= group.pages % (TILE // size)
        few = [group for group in groups if not group.pages]
        alone += [member for group in few for member in group.members]
        return [group for group in groups if group.pages], alone

    def _batch(
        self, members: list[Sequence], groups: list[SiblingGroup], keep: bool
    ) -> DecodeBatch:
        """Own pages in the batch; those that the siblings of `groups` (none: no siblings) share, in its
        `prefix`."""
        layout, skip, prefix = self.layout, 0, None
        if groups:
            skip = groups[0].pages  # the same in all of them
            sizes = np.array([len(group.members) for group in groups])
            table = layout.table([group.members[0] for group in groups])[:, :skip]
            prefix = SharedPrefix(layout.padding(sizes), layout.tiles(table))
        starts = np.full(len(members), skip * layout.tree.pages.size)
        positions = np.array([sequence.cached for sequence in members])
        return DecodeBatch(starts, positions, *self._suffix_tiles(members, skip), prefix, keep)

    def _suffix_tiles(self, sequences: list[Sequence], skip: int) -> tuple[Tensor, Tensor]:
        """Tiles [S*K, P] and bias [S, 1, 1, L] of the pages after the first `skip` of each."""
        layout, size = self.layout, self.layout.tree.pages.size
        table = layout.table(sequences)[:, skip:]
        lengths = np.array([sequence.cached + 1 for sequence in sequences]) - skip * size
        is_visible = np.arange(table.shape[1] * size) < lengths[:, None]
        return layout.tiles(table), layout.bias(is_visible)[:, None, None]

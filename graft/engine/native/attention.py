"""Attention of one step: every bucket of sequences against its pages.

    S sequences of m new tokens each, K key/value heads, G query heads to each of them, d head size,
    P pages of a sequence, L = P * page positions

The G query heads of a group become G more query rows of their key/value head, so keys and values
are never repeated. Buckets lie one after another in the flat list of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.engine.native.pages import Pages
from graft.models.decoder import Attend


class Bucket(Protocol):
    """Some sequences of the step; `tokens` is how many of the flat list are theirs."""

    tokens: int

    def attend(self, pages: Pages, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


def paged(pages: Pages, write_rows: Tensor, buckets: list[Bucket]) -> Attend:
    """The `attend` of a step: store the new keys and values, then let every bucket look."""
    sizes = [bucket.tokens for bucket in buckets]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pages.write(layer, write_rows, k, v)
        if len(buckets) == 1:
            return buckets[0].attend(pages, layer, q, k, v)
        parts = zip(buckets, q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        return torch.cat([b.attend(pages, layer, q_b, k_b, v_b) for b, q_b, k_b, v_b in parts])

    return attend


@dataclass(slots=True)
class Padding:
    """Sequences of unequal length as rows of `m`: a short one repeats its last token.

    lengths [2, 1], m 2: pick [0 1, 2 2] (flat -> padded), back [0 1 2] (padded -> flat)
    """

    rows: int
    m: int
    pick: Tensor | None
    back: Tensor | None

    def pad(self, x: Tensor) -> Tensor:
        """[T, heads, d] -> [S, m, heads, d]"""
        x = x if self.pick is None else x.index_select(0, self.pick)
        return x.view(self.rows, self.m, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """[S, m, heads, d] -> [T, heads, d]"""
        x = x.reshape(self.rows * self.m, *x.shape[2:])
        return x if self.back is None else x.index_select(0, self.back)


@dataclass(slots=True)
class Fresh:
    """Sequences with nothing cached: plain causal attention among the new tokens, no pages read."""

    tokens: int
    padding: Padding

    def attend(self, pages: Pages, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (self.padding.pad(x).transpose(1, 2) for x in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.padding.unpad(seen.transpose(1, 2))


@dataclass(slots=True)
class Extend:
    """Sequences that go on from cached tokens: a chunk of a prompt, a tool's answer, one token."""

    tokens: int
    padding: Padding
    tiles: Tensor
    """[S*K*P], see `Pages.gather`."""
    bias: Tensor
    """[S, 1, G*m, L], 0 or -inf."""

    def attend(self, pages: Pages, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, m, heads, size = self.padding.rows, self.padding.m, q.shape[1], q.shape[2]
        group = heads // pages.kv_heads
        q = self.padding.pad(q).view(rows, m, pages.kv_heads, group, size)
        q = q.permute(0, 2, 3, 1, 4).reshape(rows, pages.kv_heads, group * m, size)
        kv_shape = (rows, pages.kv_heads, -1, size)
        k = pages.gather(layer, 0, self.tiles).view(kv_shape)
        v = pages.gather(layer, 1, self.tiles).view(kv_shape)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        seen = seen.view(rows, pages.kv_heads, group, m, size).permute(0, 3, 1, 2, 4)
        return self.padding.unpad(seen.reshape(rows, m, heads, size))


@dataclass(slots=True)
class Decode:
    """One new token per sequence, float32: two matrix products around a softmax."""

    tokens: int
    tiles: Tensor
    """[S*K*P]"""
    bias: Tensor
    """[S*K, G, L], 0 or -inf."""

    def attend(self, pages: Pages, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size = pages.head_dim
        q_rows = q.reshape(self.bias.shape[0], -1, size)  # [S*K, G, d]
        kv_shape = (self.bias.shape[0], -1, size)
        keys = pages.gather(layer, 0, self.tiles).view(kv_shape)
        scores = torch.baddbmm(self.bias, q_rows, keys.transpose(1, 2), alpha=size**-0.5)
        values = pages.gather(layer, 1, self.tiles).view(kv_shape)
        return torch.bmm(scores.softmax(-1), values).view(q.shape)


@dataclass(slots=True)
class SharedDecode:
    """`Decode` for siblings: the pages of their common past are read once for all of them.

    g groups of R siblings (padded by repeating one), each with its shared pages; S sequences with
    their private pages. The scores of both parts go through one softmax.
    """

    tokens: int
    groups: int
    padding: Padding
    """[S] <-> [g, R]"""
    shared_tiles: Tensor
    """[g*K*P1]"""
    shared_bias: Tensor | None
    """[g, 1, 1, 1, L1]; None if all groups share equally much."""
    tiles: Tensor
    """[S*K*P2]"""
    bias: Tensor
    """[S*K, G, L2]"""

    def attend(self, pages: Pages, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, size, scale = pages.kv_heads, pages.head_dim, pages.head_dim**-0.5
        g, siblings = self.groups, self.padding.m
        q_rows = q.reshape(self.bias.shape[0], -1, size)  # [S*K, G, d]
        group = q_rows.shape[1]
        keys = pages.gather(layer, 0, self.tiles).view(len(q_rows), -1, size)
        private = torch.baddbmm(self.bias, q_rows, keys.transpose(1, 2), alpha=scale)

        asked = self.padding.pad(q).view(g, siblings, heads, group, size).transpose(1, 2)
        asked = (asked * scale).reshape(g * heads, siblings * group, size)
        keys = pages.gather(layer, 0, self.shared_tiles).view(g * heads, -1, size)
        common = torch.bmm(asked, keys.transpose(1, 2))
        common = common.view(g, heads, siblings, group, -1)
        if self.shared_bias is not None:
            common = common + self.shared_bias
        common = self.padding.unpad(common.transpose(1, 2)).view(len(q_rows), group, -1)

        weights = torch.cat([common, private], dim=-1).softmax(-1)
        common, private = weights.split([common.shape[-1], private.shape[-1]], dim=-1)
        values = pages.gather(layer, 1, self.tiles).view(len(q_rows), -1, size)
        seen = torch.bmm(private, values).view(q.shape)

        asked = self.padding.pad(common.reshape(len(q), heads * group, -1))
        asked = asked.view(g, siblings, heads, group, -1).transpose(1, 2)
        asked = asked.reshape(g * heads, siblings * group, -1)
        values = pages.gather(layer, 1, self.shared_tiles).view(g * heads, -1, size)
        past = torch.bmm(asked, values).view(g, heads, siblings, group, size).transpose(1, 2)
        return seen + self.padding.unpad(past).view(q.shape)

"""Attention with grouped heads.

    T tokens, H query heads, K key/value heads, d head size

q|k|v are stored row-concatenated: one matrix product, and Hugging Face's names are plain slices of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from graft.models.angles import HeadRotation
from graft.models.kv_slots import KVSlots
from graft.models.layers.sublayer import Norm, Sublayer
from graft.models.ops import attend_qkv, elementwise, gather_rows, qk_rotate_to_slots
from graft.models.shape import ModelShape

Attend = Callable[..., Tensor]
"""(layer, q [T,H,d], k [T,K,d], v [T,K,d]) -> [T,H,d]; k and v are None if they were written to `KVSlots`.
In models with sinks, a fifth argument: `sinks` [H], a score of each head that has no value."""


class Attention(Sublayer):
    """Queries, keys and values of the norm; `attend` decides which tokens see which."""

    def __init__(self, shape: ModelShape, index: int) -> None:
        super().__init__(shape)
        self.index, self.shape, self.rounds_kv = shape.ordinal(index), shape, False
        # with a gate each query head is followed by its gate
        qkv_size = (1 + shape.attention_gate) * shape.q_size + 2 * shape.kv_size
        self.qkv = nn.Linear(shape.width, qkv_size, bias=shape.qkv_bias)
        self.q_norm = self.k_norm = None
        if shape.qk_norm:
            sizes = (shape.q_size, shape.kv_size) if shape.joint_norm else (shape.head_dim,) * 2
            norms = [Norm(size, shape.norm_eps, shape.norm_offset) for size in sizes]
            self.q_norm, self.k_norm = norms
        self.sinks = nn.Parameter(torch.zeros(shape.heads)) if shape.sinks else None
        self.out = nn.Linear(shape.q_size, shape.width, bias=shape.out_bias)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        kv_slots: KVSlots | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The stream and its pending addition; with `rows` [R] only theirs, in this order."""
        x, qkv = self.norm_linear(x, delta, self.qkv)
        gate = None
        if self.shape.attention_gate:
            qkv, gate = self._split_gate(qkv)
        attended = self._attend(qkv, cos, sin, attend, kv_slots)
        if gate is not None:
            attended = attended * elementwise(torch.sigmoid, gate)
        if rows is not None:
            x, attended = gather_rows(x, rows), gather_rows(attended, rows)
        return self.add_linear(x, attended, self.out)

    def _split_gate(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """q|k|v and the gate [T, H*d] of rows in which every query head is followed by its gate."""
        size, head_dim = self.shape.q_size, self.shape.head_dim
        q, gate = mixed[:, : 2 * size].unflatten(1, (-1, 2, head_dim)).unbind(2)
        return torch.cat([q.flatten(1), mixed[:, 2 * size :]], 1), gate.flatten(1)

    def _attend(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, attend: Attend, kv_slots: KVSlots | None
    ) -> Tensor:
        """[T, H*d]: the output of the heads."""
        shape = self.shape
        q_weight = k_weight = None
        if self.q_norm is not None and self.k_norm is not None:
            if shape.joint_norm:
                qkv = self._norm_over_heads(qkv, self.q_norm, self.k_norm)
            else:
                q_weight, k_weight = self.q_norm.weight, self.k_norm.weight
        heads = shape.heads, shape.kv_heads, shape.norm_offset, shape.query_scale, self.rounds_kv
        how = HeadRotation(q_weight, k_weight, shape.norm_eps, cos, sin, *heads)
        if kv_slots is None:
            output = attend_qkv(attend, self.index, qkv, how, self.sinks)
        else:
            q = qk_rotate_to_slots(qkv, how, kv_slots, self.index)
            output = attend(
                self.index, q, None, None, *(() if self.sinks is None else [self.sinks])
            )
        return output.reshape(len(qkv), shape.q_size)

    def _norm_over_heads(self, qkv: Tensor, q_norm: Norm, k_norm: Norm) -> Tensor:
        """q|k|v with queries and keys normed over all heads of a token together."""
        shape = self.shape
        q, k, v = qkv.split([shape.q_size, shape.kv_size, shape.kv_size], dim=1)
        return torch.cat([q_norm(q, None)[1], k_norm(k, None)[1], v], dim=1)

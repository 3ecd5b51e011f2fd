"""One block of a decoder that is split over tp: this process's heads, its part of the MLP or of the experts.

`joined_block` is that of a decoder which only FSDP2 splits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graft.models.angles import HeadRotation
from graft.models.decoder import Attend
from graft.models.kv_slots import KVSlots
from graft.models.layers.sublayer import Norm
from graft.models.ops import (
    add_norm,
    attend_qkv,
    gather_rows,
    linear,
)
from graft.models.parallel.experts import ShardedExperts
from graft.models.parallel.regions import TensorParallelGroup, enter, leave
from graft.models.parallel.shards import local_tensor
from graft.models.shape import ModelShape


class ShardedNorm(Norm):
    """The weight of a norm, replicated over tp."""

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        return add_norm(x, delta, local_tensor(self.weight), self.eps, self.offset)


class ShardedBlock(nn.Module):
    """A `decoder.Block` with this process's share of heads and MLP width, and separate matrices."""

    def __init__(self, shape: ModelShape, index: int, tp: TensorParallelGroup) -> None:
        super().__init__()
        self.index, self.shape, self.tp = index, shape, tp
        width, experts = shape.width, shape.experts_of(index)
        self.input_layernorm = _norm(shape, width)
        self.q_proj = nn.Linear(width, shape.q_size, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(width, shape.kv_size, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(width, shape.kv_size, bias=shape.qkv_bias)
        self.q_norm = _norm(shape, shape.head_dim) if shape.qk_norm else None
        self.k_norm = _norm(shape, shape.head_dim) if shape.qk_norm else None
        self.o_proj = nn.Linear(shape.q_size, width, bias=shape.out_bias)
        self.post_attention_layernorm = mlp_norm = _norm(shape, width)
        self.pre_feedforward_layernorm = self.post_feedforward_layernorm = None
        if shape.sandwich:
            self.pre_feedforward_layernorm = mlp_norm = _norm(shape, width)
            self.post_feedforward_layernorm = _norm(shape, width)
        self.mlp = None if experts is None else ShardedExperts(shape, experts, mlp_norm, tp)
        if self.mlp is None:
            self.gate_proj = nn.Linear(width, shape.ff, bias=shape.mlp_bias)
            self.up_proj = nn.Linear(width, shape.ff, bias=shape.mlp_bias)
            self.down_proj = nn.Linear(shape.ff, width, bias=shape.mlp_bias)
        self.rounds_kv = False

    def round_kv(self) -> None:
        self.rounds_kv = True

    def freeze_router(self) -> None:
        if self.mlp is not None:
            self.mlp.gate.weight.requires_grad_(False)

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
        if kv_slots is not None:
            raise ValueError(
                "a decoder that is sharded over processes cannot write keys and values to an engine's "
                "pages; sample from a plain decoder with the same weights (`policy.host_copy`)"
            )
        parts = self.q_proj, self.k_proj, self.v_proj
        x, qkv = self._norm_project(x, delta, self.input_layernorm, *parts)
        attended = self._attend(qkv, cos, sin, attend)
        if rows is not None:
            x, attended = gather_rows(x, rows), gather_rows(attended, rows)
        after = self.post_attention_layernorm if self.shape.sandwich else None
        x, delta = self._project_out(x, attended, self.o_proj, after)
        return self._feed_forward(x, delta) if self.mlp is None else self.mlp(x, delta)

    def _feed_forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | None]:
        norm = self.pre_feedforward_layernorm or self.post_attention_layernorm
        x, gate_up = self._norm_project(x, delta, norm, self.gate_proj, self.up_proj)
        gate, after = self.shape.activation, self.post_feedforward_layernorm
        return self._project_out(x, gate_up, self.down_proj, after, gate)

    def _norm_project(
        self, x: Tensor, delta: Tensor | None, norm: Norm, *linears: nn.Linear
    ) -> tuple[Tensor, Tensor]:
        """x + delta, and the concatenated projections of its norm."""
        weight = torch.cat([local_tensor(each.weight) for each in linears])
        has_bias = linears[0].bias is not None
        bias = torch.cat([local_tensor(each.bias) for each in linears]) if has_bias else None
        # not fused: the norm is replicated, and its gradient must be summed before it
        x, normed = norm(x, delta)
        return x, linear(enter(normed, self.tp.group), weight, bias)

    def _project_out(
        self, x: Tensor, y: Tensor, to: nn.Linear, after: Norm | None, gate: str = ""
    ) -> tuple[Tensor, Tensor | None]:
        """The stream and its pending addition, of y's product and the norm after it."""
        weight, bias = local_tensor(to.weight), None if to.bias is None else local_tensor(to.bias)
        delta = leave(linear(y, weight, None, gate), self.tp.group)
        delta = delta if bias is None else delta + bias
        return x, delta if after is None else after(delta, None)[1]

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[T, H*d]: the output of this process's heads."""
        shape, size = self.shape, self.tp.size
        heads, kv_heads = shape.heads // size, shape.kv_heads // size
        weights = self._head_norm(self.q_norm), self._head_norm(self.k_norm)
        stored = shape.norm_offset, shape.query_scale, self.rounds_kv
        how = HeadRotation(*weights, shape.norm_eps, cos, sin, heads, kv_heads, *stored)
        output = attend_qkv(attend, self.index, qkv, how)
        return output.reshape(len(qkv), heads * shape.head_dim)

    def _head_norm(self, norm: Norm | None) -> Tensor | None:
        # each process has the gradient of its heads only
        return None if norm is None else enter(local_tensor(norm.weight), self.tp.group)


def _norm(shape: ModelShape, size: int) -> ShardedNorm:
    return ShardedNorm(size, shape.norm_eps, shape.norm_offset)

"""One block of a sharded decoder: this process's heads and its part of the MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from graft.models.angles import HeadRotation
from graft.models.decoder import Attend
from graft.models.kv_slots import KVSlots
from graft.models.layers.sublayer import Norm
from graft.models.ops import add_linear, add_norm, attend_qkv, gather_rows, linear, norm_linear
from graft.models.parallel.regions import enter, leave
from graft.models.row_order import RowOrder
from graft.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class TensorParallelGroup:
    """The processes that compute one forest together, and the index of this one."""

    group: ProcessGroup
    size: int
    index: int


class ShardedNorm(Norm):
    """The weight of a norm, replicated over tp."""

    def forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        return add_norm(x, delta, local_tensor(self.weight), self.eps)


class ShardedBlock(nn.Module):
    """A `decoder.Block` with this process's share of heads and MLP width, and separate matrices."""

    def __init__(self, shape: ModelShape, index: int, tp: TensorParallelGroup) -> None:
        super().__init__()
        self.index, self.shape, self.tp = index, shape, tp
        width = shape.width
        self.attn_norm = ShardedNorm(width, shape.norm_eps)
        self.q_proj = nn.Linear(width, shape.q_size, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(width, shape.kv_size, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(width, shape.kv_size, bias=shape.qkv_bias)
        self.q_norm = ShardedNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None
        self.k_norm = ShardedNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None
        self.o_proj = nn.Linear(shape.q_size, width, bias=shape.out_bias)
        self.mlp_norm = ShardedNorm(width, shape.norm_eps)
        self.gate_proj = nn.Linear(width, shape.ff, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(width, shape.ff, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.ff, width, bias=shape.mlp_bias)
        self.order: RowOrder | None = None

    def use_order(self, order: RowOrder | None) -> None:
        self.order = order

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
        x, qkv = self._norm_project(x, delta, self.attn_norm, self.q_proj, self.k_proj, self.v_proj)
        attended = self._attend(qkv, cos, sin, attend)
        if rows is not None:
            x, attended = gather_rows(x, rows), gather_rows(attended, rows)
        x, delta = self._project_out(x, attended, self.o_proj)
        x, gate_up = self._norm_project(x, delta, self.mlp_norm, self.gate_proj, self.up_proj)
        return self._project_out(x, gate_up, self.down_proj, gate=True)

    def _norm_project(
        self, x: Tensor, delta: Tensor | None, norm: Norm, *linears: nn.Linear
    ) -> tuple[Tensor, Tensor]:
        """x + delta, and the concatenated projections of its norm."""
        scale = local_tensor(norm.weight)
        weight = torch.cat([local_tensor(each.weight) for each in linears])
        has_bias = linears[0].bias is not None
        bias = torch.cat([local_tensor(each.bias) for each in linears]) if has_bias else None
        if self.tp.size == 1:
            return norm_linear(x, delta, scale, norm.eps, weight, bias, self.order)
        # not fused: the norm is replicated, and its gradient must be summed before it
        x, normed = add_norm(x, delta, scale, norm.eps)
        return x, linear(enter(normed, self.tp.group), weight, bias)

    def _project_out(
        self, x: Tensor, y: Tensor, to: nn.Linear, gate: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        weight, bias = local_tensor(to.weight), None if to.bias is None else local_tensor(to.bias)
        if self.tp.size == 1:
            return add_linear(x, y, weight, bias, gate, self.order)
        delta = leave(linear(y, weight, None, gate), self.tp.group)
        return x, delta if bias is None else delta + bias

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """[T, H*d]: the output of this process's heads."""
        shape, size = self.shape, self.tp.size
        heads, kv_heads = shape.heads // size, shape.kv_heads // size
        weights = self._head_norm(self.q_norm), self._head_norm(self.k_norm)
        how = HeadRotation(*weights, shape.norm_eps, cos, sin, heads, kv_heads)
        output = attend_qkv(attend, self.index, qkv, how)
        return output.reshape(len(qkv), heads * shape.head_dim)

    def _head_norm(self, norm: Norm | None) -> Tensor | None:
        if norm is None or self.tp.size == 1:
            return None if norm is None else local_tensor(norm.weight)
        # each process has the gradient of its heads only
        return enter(local_tensor(norm.weight), self.tp.group)


def local_tensor(parameter: Tensor) -> Tensor:
    """The tensor this process computes with, after FSDP has gathered a parameter; with autograd."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter

"""A block that is sharded over dp alone: its parameters are joined from a checkpoint's tensors.

Over tp each kind of layer needs code of its own (`block`). FSDP2 gathers whole tensors, so here one class
serves every layer of every family: in each pass the parameters of a `decoder.Block` are put together from
the gathered tensors, and taken away after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graft.models.decoder import Block
from graft.models.io.tensor_names import block_rows
from graft.models.parallel.shards import local_tensor
from graft.models.row_order import RowOrder
from graft.models.shape import ModelShape


class JoinedBlock(nn.Module):
    """A `decoder.Block` without parameters, and the tensors from which each pass joins them."""

    def __init__(self, shape: ModelShape, index: int) -> None:
        super().__init__()
        self.block = Block(shape, index)
        whole = dict(self.block.named_parameters())
        self.parts: dict[str, list[str]] = {name: [] for name in whole}
        """Parameter of the block -> the tensors of its rows, in order."""
        for tensor, where in block_rows(shape, index).items():
            rows = whole[where.parameter].detach()[where.rows].clone()
            name = attribute_of(tensor)
            self.register_parameter(
                name, nn.Parameter(rows, requires_grad=whole[where.parameter].requires_grad)
            )
            self.parts[where.parameter].append(name)
        for name in whole:
            owner, _, attribute = name.rpartition(".")
            delattr(self.block.get_submodule(owner), attribute)

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """The stream after the block, as `decoder.Block` computes it."""
        placed: list[tuple[nn.Module, str]] = []
        try:
            for name, parts in self.parts.items():
                owner, _, attribute = name.rpartition(".")
                module = self.block.get_submodule(owner)
                tensors = [local_tensor(getattr(self, part)) for part in parts]
                module.__dict__[attribute] = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
                placed.append((module, attribute))
            return self.block(*inputs)
        finally:  # not kept: they are as large as the gathered weights
            for module, attribute in placed:
                del module.__dict__[attribute]

    def use_order(self, order: RowOrder | None) -> None:
        self.block.use_order(order)

    def round_kv(self) -> None:
        self.block.round_kv()

    def freeze_router(self) -> None:
        for name, parts in self.parts.items():
            if name.startswith("mlp.router."):
                for part in parts:
                    getattr(self, part).requires_grad_(False)


def attribute_of(tensor: str) -> str:
    """The name of a layer's tensor as an attribute of its block: a module's may have no dots."""
    return tensor.replace(".", "/")

"""A decoder to sample from, split over the processes of one engine: each computes its own heads.

    2 processes; 4 heads, 2 KV heads, an MLP of 8 columns, a vocabulary of 6 tokens

                q|k|v, columns of out     gate|up, columns of down     rows of embedding and head
    process 0   heads 0 1, KV head 0      0 1 2 3                      tokens 0 1 2
    process 1   heads 2 3, KV head 1      4 5 6 7                      tokens 3 4 5

It is a plain decoder of the smaller shape, so the engine's pages and kernels work on it as on any other.
What the processes add up are embedded tokens and the outputs of attention and MLP; logits are gathered,
so that all of them draw from the same numbers. Weights are plain tensors in the dtype that it computes
in: unlike the learner's (`decoder`) they have no gradients, and nothing is gathered in a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from graft.models import ops
from graft.models.decoder import Block, Decoder
from graft.models.device import allocate
from graft.models.io.tensor_names import ACTION_BIAS, ACTION_ROWS, EMBEDDING, HEAD, hf_rows
from graft.models.layers.attention import Attention
from graft.models.layers.experts import ExpertMLP
from graft.models.layers.mlp import GatedMLP
from graft.models.layers.sublayer import Sublayer
from graft.models.parallel.experts import slice_experts
from graft.models.parallel.layout import BY_COLUMNS, BY_ROWS, check_sizes
from graft.models.parallel.regions import leave
from graft.models.parallel.shards import join, shard_range
from graft.models.parallel.vocabulary import embed_rows, score_sharded
from graft.models.shape import ModelShape


class Sliced(Sublayer):
    """A sublayer whose result is the sum over the group."""

    group: ProcessGroup

    def add_linear(
        self, x: Tensor, y: Tensor, linear: nn.Linear, gate: str = ""
    ) -> tuple[Tensor, Tensor | None]:
        delta = leave(ops.linear(y, linear.weight, None, gate), self.group)
        delta = delta if linear.bias is None else delta + linear.bias
        return x, delta if self.post_norm is None else self.post_norm(delta, None)[1]


class SlicedAttention(Sliced, Attention):
    """Some of the heads."""


class SlicedMLP(Sliced, GatedMLP):
    """Some of the columns."""


class SlicedExperts(ExpertMLP):
    """Some of the columns of every expert, and the whole router."""

    group: ProcessGroup

    def combine(self, x: Tensor, weights_Tk: Tensor, chosen_Tk: Tensor) -> Tensor:
        return leave(super().combine(x, weights_Tk, chosen_Tk), self.group)


class SlicedBlock(Block):
    """A block with some of the heads and of the MLP or experts; the group adds up their contributions."""

    def __init__(self, shape: ModelShape, index: int, group: ProcessGroup) -> None:
        super().__init__(shape, index)
        experts, self.attention = shape.experts_of(index), SlicedAttention(shape, index)
        self.mlp = SlicedMLP(shape) if experts is None else SlicedExperts(shape, experts)
        self.attention.group = self.mlp.group = group


class SlicedDecoder(Decoder):
    """This process's slice of a decoder. All processes of the group must compute the same tokens.

    `shape` is that of the whole decoder, `own_shape` the slice's.
    """

    is_whole = False

    def __init__(
        self,
        shape: ModelShape,
        group: ProcessGroup,
        size: int,
        index: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        check_sizes(shape, 1, size)
        rows = {name: shard_range(rows, size, index) for name, rows in _rows(shape).items()}
        embedded = rows[EMBEDDING][1] - rows[EMBEDDING][0]
        own = slice_of(shape, size)
        with torch.device("meta"):
            super().__init__(replace(own, vocab_size=embedded, extra=0, extra_bias=False))
            self.blocks = nn.ModuleList(SlicedBlock(own, i, group) for i in range(shape.layers))
            if not shape.tied:
                start, stop = rows[HEAD]
                self.head = nn.Linear(shape.width, stop - start, bias=False)
            if shape.extra_bias:
                self.action_bias = nn.Parameter(torch.zeros(shape.extra))
        allocate(self.to(dtype), device)
        self.requires_grad_(False)
        self.shape, self._own_shape = shape, own
        self.group, self.size, self.index = group, size, index
        self.first_rows = {name: start for name, (start, _) in rows.items()}
        self.head_weight.zero_()  # rows that pad actions beyond the vocabulary are never loaded

    @property
    def own_shape(self) -> ModelShape:
        return self._own_shape

    @property
    def own_heads(self) -> tuple[int, int]:
        return self._own_shape.heads, self._own_shape.kv_heads

    @property
    def head_bias(self) -> Tensor | None:
        whole, first = super().head_bias, self.first_rows[self._head_name]
        return None if whole is None else whole[first : first + len(self.head_weight)]

    def logits(self, hidden: Tensor, columns: Tensor | None = None) -> Tensor:
        own = ops.linear(hidden, self.head_weight, self.head_bias)
        whole = join(own, 1, self.shape.head_rows, self.size, self.group)
        return whole if columns is None else whole.index_select(1, columns)

    def _score(self, hidden: Tensor, *of_actions: Any) -> tuple[Tensor, ...]:
        first = self.first_rows[self._head_name]
        return score_sharded(*self.biased(hidden), first, self.group, *of_actions)

    def _look_up(self, tokens: Tensor) -> Tensor:
        return embed_rows(tokens, self.embed.weight, self.first_rows[EMBEDDING], self.group)

    def initialise(self, seed: int) -> Decoder:
        raise ValueError(
            f"a slice of a decoder draws no weights (seed {seed}): write them to `hf_weights`"
        )

    def hf_weights(self) -> Mapping[str, Any]:
        """The targets into which each whole tensor of `policy.weights_of` is written, with `copy_`."""
        parameters = dict(self.named_parameters())
        targets: dict[str, Any] = {}
        for name, where in hf_rows(self._own_shape).items():
            parameter = parameters[where.parameter].detach()
            if name in self.first_rows:
                targets[name] = RowTarget(parameter, self.first_rows[name])
            else:
                view = parameter[where.start : where.stop]
                targets[name] = SliceTarget(view, name, self.size, self.index)
        if self.shape.extra:  # in the whole head they follow the vocabulary
            first = self.first_rows[self._head_name] - self.shape.vocab_size
            targets[ACTION_ROWS] = RowTarget(self.head_weight.detach(), first)
        if self.action_bias is not None:
            targets[ACTION_BIAS] = self.action_bias.detach()
        return targets

    @property
    def _head_name(self) -> str:
        return EMBEDDING if self.shape.tied else HEAD


class SliceTarget:
    """A parameter of which this process has some rows, or some columns, or all."""

    def __init__(self, view: Tensor, name: str, size: int, index: int) -> None:
        *_, module, kind = name.split(".")
        self.view, self.size, self.index = view, size, index
        self.dim = 0 if module in BY_ROWS else None
        if module in BY_COLUMNS and kind == "weight":
            self.dim = 1

    @torch.no_grad()
    def copy_(self, whole: Tensor) -> None:
        if self.dim is not None:
            start, stop = shard_range(whole.shape[self.dim], self.size, self.index)
            whole = whole.narrow(self.dim, start, stop - start)
        self.view.copy_(whole)


class RowTarget:
    """Embedding or head, whose first row here is row `first` of the tensor that is written."""

    def __init__(self, view: Tensor, first: int) -> None:
        self.view, self.first = view, first

    @torch.no_grad()
    def copy_(self, whole: Tensor) -> None:
        start, stop = max(self.first, 0), min(self.first + len(self.view), len(whole))
        if start < stop:
            self.view[start - self.first : stop - self.first].copy_(whole[start:stop])


def slice_of(shape: ModelShape, tp: int) -> ModelShape:
    """The part of a model with split layers that one of `tp` processes holds.

    Heads, the MLP and the vocabulary are divided, the width is not: of 32 heads, 8 KV heads and an MLP
    of 12,288, each of four has 8, 2 and 3,072.
    """
    return replace(
        shape,
        heads=shape.heads // tp,
        kv_heads=shape.kv_heads // tp,
        ff=shape.ff // tp,
        experts=None if shape.experts is None else slice_experts(shape.experts, tp),
        vocab_size=-(-shape.vocab_size // tp),
    )


def _rows(shape: ModelShape) -> dict[str, int]:
    """Rows of the whole embedding and head; a tied embedding has those of the head."""
    if shape.tied:
        return {EMBEDDING: shape.head_rows}
    return {EMBEDDING: shape.vocab_size, HEAD: shape.head_rows}

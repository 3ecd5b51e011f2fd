"""The decoder: plain maths on a flat list of tokens, without batches or caches.

    T tokens, D width, H query heads, K key/value heads, d head size

Tokens of many sequences are concatenated in one list, with their positions. Which tokens attend to which
is decided by `attend`, which every layer calls with its queries, keys and values. The engine passes an
`attend` over KV pages, the learner one over a packed tree: one model, two uses, the same weights.

A block is two sublayers (`layers/`); which ones is data of the shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graft.models.angles import Angles
from graft.models.device import allocate, has_kernels, without_memory
from graft.models.kv_slots import KVSlots
from graft.models.layers.attention import Attend, Attention
from graft.models.layers.experts import ExpertMLP
from graft.models.layers.mlp import make_mlp
from graft.models.layers.sublayer import Norm
from graft.models.logprobs import likeliest, score_actions
from graft.models.ops import embed, gather_rows, linear
from graft.models.row_order import RowOrder
from graft.models.shape import ModelShape
from graft.models.truncation import Truncation


class PackedTokens(Protocol):
    """A flat list of tokens, and the actions among them to score: a `tree.forest.Forest`."""

    tokens: Tensor
    positions: Tensor
    before: Tensor
    """[U] the token that each scored action follows."""
    actions: Tensor
    modes: Tensor

    def attention(
        self, heads: int, kv_heads: int, in_order: bool = False, windows: tuple[int, ...] = ()
    ) -> Attend: ...


HOST_DRAWS = 1 << 28
"""Weights that a CPU draws in two or three seconds."""
BIAS_COLUMNS = 8
"""Inputs that carry the bias, of which one is used: rows of the head stay aligned."""


MIXERS = {
    "delta": "graft.models.layers.delta_net:GatedDeltaNet",
    "mamba": "graft.models.layers.mamba:Mamba",
    "conv": "graft.models.layers.short_conv:ShortConvolution",
}
"""What recurrent layers have in place of attention, by the kind of their recurrence."""


def make_mixer(shape: ModelShape, index: int) -> Any:
    """The mixer of a layer, with the parameters of `Attention.forward`."""
    if shape.recurrence is None or not shape.is_recurrent(index):
        return Attention(shape, index)
    module, _, name = MIXERS[shape.recurrence.kind].partition(":")
    return getattr(import_module(module), name)(shape, index)


class Block(nn.Module):
    """Attention or a recurrence, and an MLP or experts; or one of both, as the shape says of this layer."""

    def __init__(self, shape: ModelShape, index: int) -> None:
        super().__init__()
        self.attention = make_mixer(shape, index) if shape.has_mixer(index) else None
        experts, self.mlp = shape.experts_of(index), None
        if shape.has_mlp(index):
            self.mlp = make_mlp(shape) if experts is None else ExpertMLP(shape, experts)

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
        """The stream after the block; with `rows` [R] only theirs, in this order."""
        if self.attention is not None:
            x, delta = self.attention(x, delta, cos, sin, attend, kv_slots, rows)
        elif rows is not None:
            x, delta = gather_rows(x, rows), None if delta is None else gather_rows(delta, rows)
        if self.mlp is not None:
            x, delta = self.mlp(x, delta)
        if delta is not None and (self.attention is None or self.mlp is None):
            return x + delta, None  # FSDP2 takes no input of a block as its result
        return x, delta

    def use_order(self, order: RowOrder | None) -> None:
        """Compute rows in this order; see `Decoder.use_order`."""
        for part in (self.attention, self.mlp):
            if part is not None:
                part.order = order

    def round_kv(self) -> None:
        """Round keys and values; see `Decoder.round_kv`."""
        if self.attention is not None:
            self.attention.rounds_kv = True

    def freeze_router(self) -> None:
        """Leave the choice of experts, if there are any, out of training."""
        if isinstance(self.mlp, ExpertMLP):
            self.mlp.router.requires_grad_(False)


class Decoder(nn.Module):
    """A causal language model up to its last norm; `head_weight` turns hidden states into logits."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        # a tied embedding is the head too; its rows beyond the vocabulary are never embedded
        embedded = shape.head_rows if shape.tied else shape.vocab_size
        self.embed = nn.Embedding(embedded, shape.width)
        self.blocks = nn.ModuleList(Block(shape, i) for i in range(shape.layers))
        self.norm = Norm(shape.width, shape.norm_eps, shape.norm_offset)
        self.head = None if shape.tied else nn.Linear(shape.width, shape.head_rows, bias=False)
        self.action_bias = nn.Parameter(torch.zeros(shape.extra)) if shape.extra_bias else None
        self.angles = self.local_angles = Angles(shape)
        if shape.local_theta:
            local = replace(shape, rope_theta=shape.local_theta, rope_scaling={})
            self.local_angles = Angles(local)
        self.recompute = False  # activation checkpointing: a third more time, little memory
        self.order: RowOrder | None = None
        self.rounds_kv = False

    @classmethod
    def empty(cls, shape: ModelShape, dtype: torch.dtype, device: torch.device | str) -> Decoder:
        """A decoder whose weights are memory of the device that nothing was written to yet."""
        with without_memory():
            decoder = cls(shape).to(dtype)
        allocate(decoder, device)
        return decoder

    def use_order(self, order: RowOrder | None) -> None:
        """Compute rows so that none depends on the others; None: as is fastest."""
        self.order = order
        for block in self.blocks:
            block.use_order(order)  # type: ignore[operator]

    def round_kv(self) -> None:
        """Attend to keys and values that are rounded to eight bits, from now on; see `kv_slots`."""
        self.rounds_kv = True
        for block in self.blocks:
            block.round_kv()  # type: ignore[operator]

    @property
    def head_weight(self) -> Tensor:
        """[V, D]: a row for each token, then those of actions beyond the vocabulary."""
        return self.embed.weight if self.head is None else self.head.weight

    @property
    def head_bias(self) -> Tensor | None:
        """[V]: that of actions beyond the vocabulary, 0 elsewhere; None: there is none."""
        if self.action_bias is None:
            return None
        after = self.shape.head_rows - self.shape.vocab_size - self.shape.extra
        return F.pad(self.action_bias, (self.shape.vocab_size, after))

    def biased(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states and head whose product has the bias in it: of one more input, which is 1.

        Log-probs and their gradients then need no bias of their own. It copies the head, once per
        micro-batch; without a bias nothing is copied.
        """
        weight, bias = self.head_weight, self.head_bias
        if bias is None:
            return hidden, weight
        one = F.pad(hidden.new_ones(len(hidden), 1), (0, BIAS_COLUMNS - 1))
        column = F.pad(bias[:, None], (0, BIAS_COLUMNS - 1))
        return torch.cat([hidden, one], 1), torch.cat([weight, column], 1)

    is_whole = True
    """Whether all weights are in this process; see `parallel.decoder`."""

    @property
    def own_shape(self) -> ModelShape:
        """The shape of what this process computes; see `parallel.sampler`."""
        return self.shape

    @property
    def own_heads(self) -> tuple[int, int]:
        """Number of query and KV heads that this process computes."""
        return self.shape.heads, self.shape.kv_heads

    def logits(self, hidden: Tensor, columns: Tensor | None = None) -> Tensor:
        """[T, V] of hidden states [T, D]; or of some `columns` of the V."""
        weight, bias = self.head_weight, self.head_bias
        if self.order is not None:  # as `score_hidden` computes them
            hidden, weight = self.biased(hidden)
            if columns is None:
                return self.order.product(hidden, weight)
            rows = self.order.padded(
                columns
            )  # a few columns are another routine, as a few rows are
            return self.order.product(hidden, weight.index_select(0, rows))[:, : len(columns)]
        if columns is not None:
            weight = weight.index_select(0, columns)
            bias = None if bias is None else bias.index_select(0, columns)
        return linear(hidden, weight, bias)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    def rope(self, positions: Tensor, layer: int = 0) -> tuple[Tensor, Tensor]:
        """cos and sin of every token's angles, [T, d/2]: in fp32 for kernels, else in the weights' dtype."""
        angles = self.local_angles if self.shape.window_of(layer) else self.angles
        if has_kernels(positions.device):
            return angles.look_up(positions)
        cos, sin = (angles.compute if self.order is None else angles.look_up)(positions)
        return cos.to(self.dtype), sin.to(self.dtype)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        kv_slots: KVSlots | None = None,
        then: Callable[[Tensor], Any] | None = None,
        rows: Tensor | None = None,
    ) -> Any:
        """Hidden states after the last norm, [T, D], of tokens [T] at positions [T].

        With `rows` [R] only those of these tokens, [R, D], in this order: of the others the last block
        computes keys and values, which `rows` attend to, and nothing else.

        With `kv_slots` keys and values are written there, and `attend` reads them from there. With
        `then` its result on the hidden states is returned instead: heads run in here, because a
        sharded model has its weights gathered only during the forward pass.
        """
        count = len(tokens) if rows is None else len(rows)
        if self.order is not None:
            attend = self.order.padded_attend(attend, len(tokens))
            tokens, positions = self.order.padded(tokens), self.order.padded(positions)
            rows = None if rows is None else self.order.padded(rows)
        x, delta = self._embed(tokens), None
        turns = {layer: self.rope(positions, layer) for layer in set(self._rope_layers)}
        last = self.blocks[-1]
        for index, block in enumerate(self.blocks):
            turn = turns[self._rope_layers[self.shape.window_of(index) > 0]]
            others = *turn, attend, kv_slots, rows if block is last else None
            if self.recompute and torch.is_grad_enabled():
                if delta is not None:  # their sum is kept for the backward pass, not both
                    x, delta = x + delta, None
                x, delta = checkpoint(block, x, delta, *others, use_reentrant=False)
            else:
                x, delta = block(x, delta, *others)
        hidden = self.norm(x, delta)[1]
        if self.shape.logits_divisor != 1:  # here, so that every reader of the head has it
            hidden = hidden / self.shape.logits_divisor
        if count < len(hidden):
            hidden = hidden[:count]
        return hidden if then is None else then(hidden)

    @property
    def _rope_layers(self) -> tuple[int, int]:
        """A layer without a window and one with it, where their rotations differ; else the first twice."""
        if not self.shape.local_theta:
            return 0, 0
        first = {self.shape.window_of(layer) > 0: layer for layer in self.shape.kinds}
        return first.get(False, 0), first.get(True, 0)

    def _embed(self, tokens: Tensor) -> Tensor:
        x, scale = self._look_up(tokens), self.shape.embedding_scale
        if self.shape.scales_embedding:
            scale *= math.sqrt(self.shape.width)
        return x if scale == 1 else x * scale

    def _look_up(self, tokens: Tensor) -> Tensor:
        return embed(tokens, self.embed.weight)

    def action_logprobs(
        self,
        forest: PackedTokens,
        temperature: float = 1.0,
        allowed: Tensor | None = None,
        vocab_size: int | None = None,
        truncation: Truncation | None = None,
        compare: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-prob [U] of each trained action of a forest and entropy [U] of its distribution.

        With `vocab_size` also the log-prob [U] of choosing any token, not an action (see `logprobs`).
        With `compare` also its result on the hidden states [U, D] before the actions and the head [V, D].
        """

        def score(before: Tensor) -> tuple[Tensor, ...]:
            how = allowed, temperature, vocab_size, truncation
            found = self.score_hidden(before, forest.actions, forest.modes, *how)
            return found if compare is None else (*found, compare(*self.biased(before)))

        return self._over(forest, score)

    @torch.no_grad()
    def states_before(self, forest: PackedTokens) -> tuple[Tensor, Tensor]:
        """Hidden states [U, D] before the scored actions of a forest, and the head [V, D] they meet."""
        return self._over(forest, self.biased)

    def _over(self, forest: PackedTokens, then: Callable[[Tensor], Any]) -> Any:
        """`then` of the hidden states [U, D] before the scored actions of a forest."""
        attention = forest.attention(*self.own_heads, self.order is not None, self.shape.windows)
        return self(forest.tokens, forest.positions, attention, then=then, rows=forest.before)

    @torch.no_grad()
    def greedy_match(
        self, forest: PackedTokens, allowed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-prob [U] of each trained action, and whether it is the likeliest one."""
        return self._over(forest, lambda before: self._likeliest(before, forest, allowed))

    def score_hidden(
        self,
        hidden: Tensor,
        actions: Tensor,
        modes: Tensor,
        allowed: Tensor | None,
        temperature: float,
        vocab_size: int | None = None,
        truncation: Truncation | None = None,
    ) -> tuple[Tensor, ...]:
        """`logprobs.score_actions` with this head: of actions [U] after hidden states [U, D]."""
        return self._score(hidden, actions, modes, allowed, temperature, vocab_size, truncation)

    def _score(self, hidden: Tensor, *of_actions: Any) -> tuple[Tensor, ...]:
        """`score_hidden`, by the head of this kind of decoder."""
        return score_actions(*self.biased(hidden), *of_actions, order=self.order)

    def _likeliest(
        self, hidden: Tensor, forest: PackedTokens, allowed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return likeliest(*self.biased(hidden), forest.actions, forest.modes, allowed)

    @torch.no_grad()
    def initialise(self, seed: int) -> Decoder:
        """Random weights of variance 1/fan_in; zero biases, unit norms.

        Two exceptions keep a token's embedding large in the stream: the output of a block starts smaller
        by sqrt(2 * layers), and an embedding that is not tied to the head has variance 1. With them
        three seeds of the quickstart copied results right in 74 to 88% of the cases after 350 steps;
        without them one of three was at 31% after 450.

        Actions beyond the vocabulary are drawn last, so the other weights are as without them.

        A CPU draws the weights of models of up to HOST_DRAWS, which a seed then gives on every device; a
        GPU draws those of larger ones, in milliseconds in place of minutes.
        """
        vocab_size = self.shape.vocab_size
        is_large = sum(parameter.numel() for parameter in self.parameters()) > HOST_DRAWS
        generator = torch.Generator(self.device if is_large else "cpu").manual_seed(seed)
        for parameter in self.parameters():
            parameter.zero_()
        for name, module in self.named_modules():
            if isinstance(module, Norm) and not module.offset:
                module.weight.fill_(1.0)
            if not isinstance(module, (nn.Linear, nn.Embedding)):
                continue
            scale = 1 / math.sqrt(module.weight.shape[1])
            if name.endswith((".out", ".down")):
                scale /= math.sqrt(2 * self.shape.layers)
            if module is self.embed and not self.shape.tied:
                scale = 1.0
            drawn = module.weight
            if self.shape.extra and drawn is self.head_weight:
                drawn = drawn[:vocab_size]
            _draw(drawn, scale, generator)
        for module in self.modules():
            if (draw := getattr(module, "draw", None)) is not None:
                draw(generator)
        if self.shape.extra:
            extra = self.head_weight[vocab_size : vocab_size + self.shape.extra]
            _draw(extra, 1 / math.sqrt(self.shape.width), generator)
        return self


def _draw(weight: Tensor, scale: float, generator: torch.Generator) -> None:
    """Normal numbers, from the generator's device; a CPU's are the same for every dtype."""
    if generator.device.type != "cpu":
        weight.normal_(0.0, scale, generator=generator)
    else:
        weight.copy_(torch.randn(weight.shape, generator=generator) * scale)


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The simplest `attend`: all T tokens are one sequence."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return output[0].transpose(0, 1)

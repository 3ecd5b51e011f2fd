"""Mamba-2: a state to which each token adds a value under a key, and which forgets a share.

T tokens, D width, K key heads of size dk, H value heads of size dv

z|v|k|q|t   one product of the norm; v, k and q are convolved over the last tokens, silu
step        softplus(t + bias), within limits
decay       -exp(A) step; what is added to the state is step v
o           `chunks`, plus a share of v, gated by silu(z), and normed over all heads, or those of a key head
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graft.models.kv_slots import KVSlots
from graft.models.layers.attention import Attend
from graft.models.layers.chunks import ScanInputs
from graft.models.layers.convolution import convolve, draw_convolution
from graft.models.layers.paths import paths_of
from graft.models.layers.sublayer import Norm, Sublayer
from graft.models.ops import add_norm, elementwise, gather_rows
from graft.models.shape import ModelShape


class Mamba(Sublayer):
    """A recurrence in place of attention."""

    def __init__(self, shape: ModelShape, index: int) -> None:
        super().__init__(shape)
        assert shape.recurrence is not None
        self.index, self.sizes = shape.ordinal(index), shape.recurrence
        sizes = self.sizes
        inputs, _ = sizes.products(shape.width)["in_proj"]
        self.inputs = nn.Linear(shape.width, inputs, bias=sizes.bias)
        self.conv = nn.Parameter(torch.zeros(sizes.channels, 1, sizes.taps))
        self.conv_bias = nn.Parameter(torch.zeros(sizes.channels)) if sizes.conv_bias else None
        self.dt_bias = nn.Parameter(torch.zeros(sizes.value_heads))
        self.a_log = nn.Parameter(torch.zeros(sizes.value_heads))
        self.skip = nn.Parameter(torch.zeros(sizes.value_heads))
        self.head_norm = Norm(sizes.value_size, shape.norm_eps)
        self.out = nn.Linear(sizes.value_size, shape.width, bias=sizes.bias)

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """Weights that are no products: decays of one token up to a thousand."""
        draw_convolution(self.conv, generator)
        heads, device = len(self.a_log), generator.device
        self.a_log.copy_((torch.rand(heads, generator=generator, device=device) * 15 + 1).log())
        low, high = math.log(0.001), math.log(0.1)
        share = torch.rand(heads, generator=generator, device=device)
        step = (share * (high - low) + low).exp()
        self.dt_bias.copy_(step + (-torch.expm1(-step)).log())  # the inverse of softplus
        self.skip.fill_(1.0)

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
        sizes = self.sizes
        x, mixed = self.norm_linear(x, delta, self.inputs)
        z, vkq, t = mixed.split([sizes.value_size, sizes.channels, sizes.value_heads], dim=1)
        paths = paths_of(attend, len(x))
        vkq = convolve(paths, self.index, vkq, self.conv, self.conv_bias).float()
        v, k, q = vkq.split([sizes.value_size, sizes.key_size, sizes.key_size], dim=1)
        v = v.unflatten(1, (-1, sizes.value_dim))
        step = elementwise(F.softplus, t.float() + self.dt_bias.float())
        step = step.clamp(sizes.least_step, sizes.most_step)
        k, q = (part.unflatten(1, (-1, sizes.key_dim)) for part in (k, q))
        new = q, k, v * step[..., None], -self.a_log.float().exp() * step
        new = ScanInputs(*(each[: paths.count] for each in new), beta=None)
        read = paths.scan(self.index, new, in_order=self.order is not None)
        if len(read) < len(x):
            read = F.pad(read, (0, 0, 0, 0, 0, len(x) - len(read)))
        read = read + v * self.skip.float()[:, None]
        if rows is not None:
            x, z, read = gather_rows(x, rows), gather_rows(z, rows), gather_rows(read, rows)
        gated = read.flatten(1) * elementwise(F.silu, z.float())
        return self.add_linear(x, self._norm(gated).to(self.out.weight.dtype), self.out)

    def _norm(self, gated: Tensor) -> Tensor:
        if not self.sizes.by_group:
            return self.head_norm(gated, None)[1]
        groups = gated.unflatten(1, (self.sizes.key_heads, -1))
        unit = groups.new_ones(groups.shape[2])
        normed = add_norm(groups, None, unit, self.head_norm.eps)[1]
        return normed.flatten(1) * self.head_norm.weight

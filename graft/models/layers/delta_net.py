"""The gated delta net: a state of keys and values that each token corrects, and forgets a share of.

T tokens, D width, K key heads of size dk, H value heads of size dv

q|k|v|z|b|a   one product of the norm
q, k, v       convolved over the last tokens, silu; queries and keys of length 1
decay, beta   -exp(A) softplus(a + bias), sigmoid(b)
o             `chunks`, normed head by head and gated by silu(z)
"""

from __future__ import annotations

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


class GatedDeltaNet(Sublayer):
    """A recurrence in place of attention."""

    def __init__(self, shape: ModelShape, index: int) -> None:
        super().__init__(shape)
        assert shape.recurrence is not None
        self.index, self.sizes = shape.ordinal(index), shape.recurrence
        sizes = self.sizes
        *rows, _ = (size[0] for size in sizes.products(shape.width).values())
        self.inputs = nn.Linear(shape.width, sum(rows), bias=False)
        self.conv = nn.Parameter(torch.zeros(sizes.channels, 1, sizes.taps))
        self.dt_bias = nn.Parameter(torch.zeros(sizes.value_heads))
        self.a_log = nn.Parameter(torch.zeros(sizes.value_heads))
        self.head_norm = Norm(sizes.value_dim, shape.norm_eps)
        self.out = nn.Linear(sizes.value_size, shape.width, bias=False)

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """Weights that are no products: decays of half a token up to hundreds of tokens."""
        draw_convolution(self.conv, generator)
        rates = torch.rand(len(self.a_log), generator=generator, device=generator.device)
        self.a_log.copy_((rates * 15.99 + 0.01).log())
        self.dt_bias.fill_(1.0)

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
        x, mixed = self.norm_linear(x, delta, self.inputs)
        qkv, z, b, a = self._split(mixed)
        paths = paths_of(attend, len(x))
        new = self._scan_inputs(convolve(paths, self.index, qkv, self.conv), a, b)
        new = ScanInputs(*(None if each is None else each[: paths.count] for each in new))  # type: ignore[arg-type]
        read = paths.scan(self.index, new, in_order=self.order is not None)
        if len(read) < len(x):
            read = F.pad(read, (0, 0, 0, 0, 0, len(x) - len(read)))
        if rows is not None:
            x, z, read = gather_rows(x, rows), gather_rows(z, rows), gather_rows(read, rows)
        normed = add_norm(read.to(x.dtype), None, self.head_norm.weight, self.head_norm.eps)[1]
        return self.add_linear(x, normed.flatten(1) * elementwise(F.silu, z), self.out)

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q|k|v [T, ...], z [T, H*dv], b and a [T, H]."""
        sizes = self.sizes
        heads, key, value = sizes.value_heads, sizes.key_size, sizes.value_size
        if not sizes.by_key_head:
            return mixed.split([2 * key + value, value, heads, heads], dim=1)  # type: ignore[return-value]
        # the rows of each key head together: q|k|v|z, and in a second matrix b|a
        each = value // sizes.key_heads
        first, last = mixed.split([2 * key + 2 * value, 2 * heads], dim=1)
        parts = first.unflatten(1, (sizes.key_heads, -1)).split([sizes.key_dim] * 2 + [each] * 2, 2)
        b, a = last.unflatten(1, (sizes.key_heads, 2, -1)).unbind(2)
        q, k, v, z = (part.flatten(1) for part in parts)
        return torch.cat([q, k, v], 1), z, b.flatten(1), a.flatten(1)

    def _scan_inputs(self, qkv: Tensor, a: Tensor, b: Tensor) -> ScanInputs:
        """What `chunks` reads, in float32."""
        sizes = self.sizes
        q, k, v = qkv.float().split([sizes.key_size, sizes.key_size, sizes.value_size], dim=1)
        unit = qkv.new_full((sizes.key_dim,), sizes.key_dim**-0.5, dtype=torch.float32)
        q, k = (
            add_norm(part.unflatten(1, (-1, sizes.key_dim)), None, weight, 1e-6 / sizes.key_dim)[1]
            for part, weight in ((q, unit * sizes.key_dim**-0.5), (k, unit))
        )
        rate = elementwise(F.softplus, a.float() + self.dt_bias.float())
        decay, beta = -self.a_log.float().exp() * rate, elementwise(torch.sigmoid, b.float())
        return ScanInputs(q, k, v.unflatten(1, (-1, sizes.value_dim)), decay, beta)

"""Sizes of layers that carry a state from token to token, in place of keys and values of all tokens.

delta   gated delta net: S <- a S + (b (v - a S k)) k', o = S q
mamba   Mamba-2: S <- a S + v k', o = S q
conv    a gated short convolution alone, without a state

K key heads of size dk, H value heads of size dv; S is [H, dv, dk]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

CHUNK = 32
"""Positions of a chunk, counted from the beginning of a path: a state is kept at the beginning of each, and
the rows of a token's own chunk are added to it (`layers.chunks`)."""

LARGEST = 1 << 20
"""The largest size: a file that names a larger one is damaged, or made to fill the memory."""

KINDS = ("delta", "mamba", "conv")


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Sizes and switches of the recurrent layers of a model."""

    kind: Literal["delta", "mamba", "conv"]
    taps: int = 4
    """Tokens that the convolution sees, the token itself included."""
    key_heads: int = 1
    key_dim: int = 0
    value_heads: int = 1
    value_dim: int = 64
    by_key_head: bool = False
    """Whether a checkpoint stores the rows of the first product key head by key head."""
    conv_bias: bool = False
    bias: bool = False
    """Whether the first and the last product have biases."""
    least_step: float = 0.0
    """Time steps of Mamba-2 below this one count as it is."""
    most_step: float = math.inf
    by_group: bool = False
    """Whether the norm at the end of Mamba-2 is over the values of each key head apart."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"recurrence.kind={self.kind!r}: must be {', '.join(KINDS)}")
        if not 0 <= self.least_step < self.most_step:
            raise ValueError(
                f"recurrence.least_step={self.least_step}, most_step={self.most_step}: the first must "
                "be 0 or more, and below the second"
            )
        least = {"taps": 1, "key_heads": 1, "value_heads": 1, "value_dim": 1}
        least["key_dim"] = int(self.kind != "conv")
        for name, lowest in least.items():
            size = getattr(self, name)
            if not isinstance(size, int) or not lowest <= size <= LARGEST:
                raise ValueError(
                    f"recurrence.{name}={size!r}: must be from {lowest} to {LARGEST:,}"
                )
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"recurrence.value_heads={self.value_heads} is not a multiple of "
                f"key_heads={self.key_heads}: each key head serves the same number of value heads"
            )

    @property
    def has_state(self) -> bool:
        """Whether more than the last inputs of the convolution is carried on."""
        return self.kind != "conv"

    @property
    def channels(self) -> int:
        """Numbers of a token that pass through the convolution."""
        return 2 * self.key_size + self.value_size

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def state_size(self) -> int:
        """Numbers of a state."""
        return self.value_size * self.key_dim

    @property
    def row_size(self) -> int:
        """Numbers that are kept of a token of the present chunk."""
        added = self.key_size + self.value_size + self.value_heads
        return self.channels + added * self.has_state

    def products(self, width: int) -> dict[str, tuple[int, int]]:
        """Rows and columns of the matrices of a layer, by the names in a checkpoint; the first product of a
        layer has those of all but the last, one after the other."""
        value, heads = self.value_size, self.value_heads
        last = {"out_proj": (width, value)}
        if self.kind != "delta":
            rows = 3 * value if self.kind == "conv" else value + self.channels + heads
            return {"in_proj": (rows, width), **last}
        parts = {"in_proj_qkv": self.channels, "in_proj_z": value}
        parts |= {"in_proj_b": heads, "in_proj_a": heads}
        if self.by_key_head:
            parts = {"in_proj_qkvz": self.channels + value, "in_proj_ba": 2 * heads}
        sizes = {name: (rows, width) for name, rows in parts.items()}
        return {**sizes, **last}

    def num_products(self, width: int) -> int:
        """Weights of the products of a layer."""
        return sum(rows * columns for rows, columns in self.products(width).values())

    def num_others(self, width: int) -> int:
        """Parameters of a layer that are in no product's matrix."""
        convolution = self.channels * (self.taps + self.conv_bias)
        if self.kind == "delta":
            return convolution + 2 * self.value_heads + self.value_dim
        biases = sum(rows for rows, _ in self.products(width).values()) * self.bias
        of_state = 3 * self.value_heads + self.value_size
        return convolution + biases + of_state * self.has_state

"""Random numbers by name instead of by order: a hash of (seed, context key, position).

A sample then depends neither on its batch mates nor on how often it was preempted, and a context
opened again with the same key draws the same tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def derive(key: int, number: int) -> int:
    """The key of the `number`-th child of `key`: 64 bits, unlike its parent's and siblings'."""
    return _mix_one(_mix_one(key) + number * _GOLDEN + 1)


def _mix_one(x: int) -> int:
    """`_mix` of one Python integer: a fork asks for it, and an array of one costs 20 times as much."""
    x = (x + _GOLDEN) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def row_keys(seed: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What is left of seed and key: the rest of the hash wants the position alone. [B]"""
    return _mix(keys ^ _mix(np.array([seed & _WORD], dtype=np.uint64)))


def uniforms(
    seed: int, keys: NDArray[np.uint64], positions: NDArray[np.uint64]
) -> NDArray[np.float32]:
    """One number in [0, 1) per row, with 24 random bits (all that a float32 can hold). [B]"""
    hashed = _mix(row_keys(seed, keys) + positions * np.uint64(_GOLDEN))
    return (hashed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

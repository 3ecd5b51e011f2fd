"""Random numbers that do not depend on order: a hash of (seed, context key, position).

A sample then depends neither on the rest of its batch nor on preemptions, and a context opened again
with the same key draws the same tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1


def derive(key: int, number: int) -> int:
    """The 64-bit key of the `number`-th child of `key`."""
    return _mix_one(_mix_one(key) + number * _GOLDEN + 1)


def _mix_one(x: int) -> int:
    """`_mix` of one Python integer, for forks: a NumPy array of one element takes 20 times as long."""
    x = (x + _GOLDEN) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


def row_keys(seed: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The part of the hash that depends on seed and key; the rest needs the position alone. [B]"""
    return _mix(keys ^ _mix(np.array([seed & _MASK_64], dtype=np.uint64)))


def uniforms(
    seed: int, keys: NDArray[np.uint64], positions: NDArray[np.uint64]
) -> NDArray[np.float32]:
    """One number in [0, 1) per row, with 24 random bits (the precision of a float32). [B]"""
    hashed = _mix(row_keys(seed, keys) + positions * np.uint64(_GOLDEN))
    return (hashed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

"""A random generator whose whole state is one integer.

The built-in generator holds 625 numbers: seeding it takes longer than a turn of a small game, and a
snapshot of it is larger than the game. This one is cheap to seed, fork and print, and has all the
methods of `random.Random`, each drawing from `getrandbits`.
"""

from __future__ import annotations

import operator
import os
from random import Random
from typing import Any, Self

MASK = (1 << 64) - 1
STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: the counter visits every value once


class RandomState(Random):
    """SplitMix64 (Steele, Lea, Flood 2014): a counter, and a hash of it for every 64 bits.

    >>> rng = RandomState(7)
    >>> [rng.randint(1, 6) for _ in range(5)]
    [4, 1, 5, 4, 2]
    """

    state = 0

    def seed(self, a: Any = None, version: int = 2) -> None:
        """Start the stream of `a`, a whole number of 64 bits; None: a random one."""
        self.state = int.from_bytes(os.urandom(8)) if a is None else a & MASK

    def getrandbits(self, k: int, /) -> int:
        # one draw is nearly always enough; inlined because every draw of every game goes through here
        self.state = word = (self.state + STRIDE) & MASK
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
        word ^= word >> 31
        if k <= 64:
            return word >> (64 - k)
        return word << (k - 64) | self.getrandbits(k - 64)

    def __deepcopy__(self, memo: Any) -> Self:
        # every fork of an environment comes here; the usual way draws a seed first
        twin = type(self)(0)
        vars(twin).update(vars(self))
        return twin

    def random(self) -> float:
        return self.getrandbits(53) * 2.0**-53

    def getstate(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.state

    def setstate(self, state: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.state = state

    gauss = Random.normalvariate  # the built-in one keeps half of a pair beside the state


def checked_seed(seed: Any) -> int:
    """A seed of an environment as an int."""
    if not hasattr(seed, "__index__"):
        raise TypeError(f"seed={seed!r}: must be a whole number from 0")
    if (number := operator.index(seed)) < 0:
        raise ValueError(f"seed={number}: must be 0 or more")
    return number

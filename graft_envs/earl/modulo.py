"""The remainder of a division: 1234 mod 56?   #### 2

The calculator has no such operation, so a policy takes two calls: 1234 / 56 = 22.036, then
1234 - 56 * 22 = 2.
"""

from __future__ import annotations

import random

from graft.envs.base import BaseEnv, Trace
from graft.envs.splits import check_split, split_of
from graft.types import Author
from graft_envs.earl.marked import MAX_TRIES, MarkedNumber


class Modulo(MarkedNumber):
    """The modulus is uniform over 1..`modulus`, the number over everything from it to `number`."""

    env_id = "modulo"
    saved = (*BaseEnv.saved, "number", "modulus")

    def __init__(self, *, number: int = 10**7, modulus: int = 10**5, split: str = "train") -> None:
        super().__init__()
        if not 1 <= modulus <= number:
            raise ValueError(f"{number=}, {modulus=}: must be 1 <= modulus <= number")
        self.limits = number, modulus
        self.split = check_split(split)
        self.number = self.modulus = 1

    def pose(self) -> str:
        for _ in range(MAX_TRIES):
            self.modulus = self.rng.randint(1, self.limits[1])
            self.number = self.rng.randint(self.modulus, self.limits[0])
            if split_of(self.expression) == self.split:
                break
        else:
            raise ValueError(f"no {self.split} instance with limits {self.limits}; raise them")
        self.answer = str(self.number % self.modulus)
        return f"What is {self.number} mod {self.modulus}? Write the final answer after ####."

    @property
    def expression(self) -> str:
        return f"{self.number} % {self.modulus}"

    @property
    def calculations(self) -> list[str]:
        """The two calls: the quotient, then what its whole part leaves."""
        whole = self.number // self.modulus
        return [f"{self.number} / {self.modulus}", f"{self.number} - {self.modulus} * {whole}"]

    def demonstrate(self, rng: random.Random) -> Trace:
        whole = self.number // self.modulus
        working = f"{self.number} - {self.modulus} * {whole} = {self.answer}"
        return [(Author.POLICY, f"{working}\n#### {self.answer}")]

    def describe(self) -> dict[str, int]:
        return {"number": self.number, "modulus": self.modulus}

"""The calculator of the quickstart with a teacher who is always right, by the tool or by heart."""

from __future__ import annotations

import random

from graft.envs.base import Trace
from graft.envs.calculator import CalculatorTask
from graft.types import Author


class Sums(CalculatorTask):
    """Examples of both ways: a policy can go on by either, and RL decides."""

    def demonstrate(self, rng: random.Random, tool_rate: float = 0.5) -> Trace:
        """Show the calls with probability `tool_rate`, else the right answer alone."""
        if rng.random() < tool_rate:
            return super().demonstrate(rng, tool_rate=1.0)
        return [(Author.POLICY, self.env.answer)]

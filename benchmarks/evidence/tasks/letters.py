"""EARL's sorting of hidden items in single characters, with a teacher who has no strategy.

prompt     ABC           bring them into ascending order
action     cAB           compare; the answer is :A>B;
action     sAB           swap; the answer is the new order, :BAC;
text       .             done: the order is graded as it is
"""

from __future__ import annotations

import random

from graft.envs.base import Trace
from graft.protocols import Observation
from graft.tools.sorting import ACTIONS, SYMBOLS, SortingCall, SortingSyntax, carry_out
from graft.types import Author, Task, Trajectory
from graft_envs.earl.hidden_items import HiddenItems

ACTION_FILE = "benchmarks/evidence/tasks/letters.yaml"
TOOLS = ("compare", "swap")


class LetterSyntax(SortingSyntax):
    """Calls and results without blanks and commas."""

    def render(self, tool: str, result: str) -> str:
        return result.replace(" ", "").replace(",", "")


SYNTAX = LetterSyntax(*ACTIONS._replace(call={"compare": "c{0}{1}", "swap": "s{0}{1}"}))


class LetterSort(HiddenItems):
    """Put `count` hidden items in order; reward and counts are those of `earl:sort`."""

    env_id = "letter-sort"
    alphabet = "".join(sorted({*SYMBOLS, *"cs:;<=>."}))

    def __init__(self, *, count: int = 3, max_turns: int = 12, split: str = "train") -> None:
        super().__init__(TOOLS, "actions", max_turns)
        if not 2 <= count <= len(SYMBOLS):
            raise ValueError(f"count={count}: must be 2 to {len(SYMBOLS)}")
        self.syntax = SYNTAX
        self.count, self.max_calls = count, max_turns - 1
        self.split = split

    def pose(self) -> Observation:
        self.items = self.rng.sample(range(self.count), self.count)
        self.symbols = list(SYMBOLS[: self.count])
        self.tools = list(TOOLS)
        self.begin()
        return "".join(self.symbols)

    def demonstrate(
        self, rng: random.Random, swap_rate: float = 0.35, stop_rate: float = 0.2
    ) -> Trace:
        """Compare and swap pairs at random, whatever the results are; so only the syntax is shown."""
        state = self.hidden
        trace: Trace = []
        while rng.random() >= stop_rate and len(trace) < 2 * self.max_calls:
            tool = "swap" if rng.random() < swap_rate else "compare"
            a, b = rng.sample(self.symbols, 2)
            state, result = carry_out(state, SortingCall(tool, (a, b)))
            trace.append((Author.POLICY, self.syntax.write(tool, a, b)))
            trace.append((Author.ENV, self.syntax.render(tool, result)))
        return [*trace, (Author.POLICY, ".")]


def is_sorted(task: Task, trajectory: Trajectory) -> float:
    """1.0 for items in order, whatever it took."""
    return float(trajectory.info.get("is_right", False))

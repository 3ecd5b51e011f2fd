"""The weighted sum of several rewards; each of them is also a metric of the attempt.

math_answer 1, weight 1.0; brief 0.5, weight 0.2      reward 1.1
                                                      reward/math_answer 1, reward/brief 0.5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graft.protocols import Reward
from graft.types import Leaf, Task, Trajectory
from graft.user_code import UserObject, as_reward

METRIC = "reward/"
"""The prefix of their metrics."""


@dataclass(frozen=True, slots=True)
class Component:
    """One term of the sum; `name` is that of its metric."""

    name: str
    reward: Reward
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The sum as a reward. A rollout calls the components one by one, so that only blocking ones run in
    threads."""

    components: tuple[Component, ...]

    @property
    def blocking(self) -> bool:
        return any(getattr(each.reward, "blocking", False) for each in self.components)

    def __call__(self, task: Task, trajectory: Trajectory) -> float:
        values = [each.reward(task, trajectory) for each in self.components]
        return self.total(values, trajectory.leaf)

    def total(self, values: Sequence[float], leaf: Leaf) -> float:
        """The weighted sum of these values, which become metrics of the leaf, with their weights."""
        total = 0.0
        for each, value in zip(self.components, values, strict=True):
            number = as_reward(value, UserObject(each.reward, "reward"), "a finite number")
            leaf.metrics[METRIC + each.name] = number
            leaf.weights[each.name] = each.weight
            total += each.weight * number
        return total

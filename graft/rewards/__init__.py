"""Rewards: pure functions `(Task, Trajectory) -> float`, for tasks that the environment does not grade."""

from __future__ import annotations

from typing import Any

REWARDS: dict[str, Any] = {
    "code_tests": "graft.rewards.code:code_tests",
    "countdown": "graft.rewards.answers:countdown",
    "deep_research": "graft.rewards.deep_research:deep_research",
    "exact_match": "graft.rewards.answers:exact_match",
    "f1": "graft.rewards.answers:f1",
    "hendrycks_math": "graft.rewards.maths.hendrycks:hendrycks_math",
    "judge": "graft.rewards.judge:Judge",
    "math_answer": "graft.rewards.answers:math_answer",
}
"""Name -> "module:attribute" of the reward; `make_reward` builds an instance of a class."""

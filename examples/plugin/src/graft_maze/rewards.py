"""A reward: a function of a task and a trajectory."""

from __future__ import annotations

from graft import Task, Trajectory


def brief(task: Task, trajectory: Trajectory) -> float:
    """Pays less for longer answers: 1.0 for none, 0.0 from a hundred words on."""
    return max(0.0, 1.0 - len(trajectory.answer_text.split()) / 100)

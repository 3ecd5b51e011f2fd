"""A reward that knows nothing of the answer: the control of calculator.yaml.

graft serve agent calculator.yaml run.name=control task.reward=control:random_reward

The metric reward/right is the share of correct answers, which such a reward does not teach.
"""

import random

import graft

drawn = random.Random(0)


def random_reward(task: graft.Task, trajectory: graft.Trajectory) -> float:
    is_right = trajectory.answer_text.strip() == task.answer
    trajectory.leaf.metrics["reward/right"] = float(is_right)
    return drawn.random()

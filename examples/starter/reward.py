"""The reward: what a finished attempt is worth. It replaces the environment's own (task.reward)."""


def found(task, trajectory):
    """1 for the right letter, and 0.1 less for every locked drawer that was tried."""
    is_right = trajectory.answer_text.strip() == task.answer
    return float(is_right) - 0.1 * trajectory.info.get("locked", 0)

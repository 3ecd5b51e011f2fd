"""A language model as judge; `judge.py` is the reward, `agreement.py` compares it with equal texts."""

from graft.rewards.judge.agreement import Agreement, JudgedItem
from graft.rewards.judge.judge import Judge, JudgeError

__all__ = ["Agreement", "Judge", "JudgeError", "JudgedItem"]

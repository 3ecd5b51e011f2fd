r"""Problems with a mathematical answer in \boxed{}, compared by meaning."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from graft.envs.base import Trace, with_request
from graft.envs.dataset.base import DatasetEnv
from graft.protocols import Observation
from graft.rewards.answers import final_answers
from graft.rewards.maths.grading import grade
from graft.text.parse import last_boxed
from graft.types import Author, Turn

REQUEST = "Reason step by step, then give the final answer in \\boxed{}."


class MathEnv(DatasetEnv):
    r"""1.0 for a right answer, 0.0 for a wrong one, `format_reward` if nothing is boxed.

    gold 0.5    "... so it is \boxed{\frac{1}{2}}."  ->  1.0

    The last box counts. The gold may be a text, a number, or a list of which any is right; of a
    worked solution the final answer counts (a box, or what follows ####). `request` follows the problem, or
    encloses it as {question}; "" shows the row alone, as GEM does.
    """

    question = ""
    """Of the row, for `grade`; a subclass that asks in its own words may leave it out."""

    def __init__(
        self,
        *,
        question_key: str = "problem",
        answer_key: str = "answer",
        request: str = REQUEST,
        format_reward: float = 0.0,
        timeout: float = 1.0,
        **source: Any,
    ) -> None:
        self.answer_key, self.request = answer_key, request
        self.format_reward = format_reward
        self.timeout = timeout
        super().__init__(question_key=question_key, columns=self.needed_columns(), **source)

    def needed_columns(self) -> tuple[str, ...]:
        return (self.answer_key,)

    def ask(self, row: Mapping[str, Any]) -> Observation:
        self.answer = self.answers_of(row, self.answer_key)
        self.question = self.text_of(row, self.question_key)
        return with_request(self.question, self.request)

    def respond(self, action: str) -> Turn:
        answer = last_boxed(action)
        is_right = answer is not None and grade(
            answer, final_answers(self.answer), question=self.question, timeout=self.timeout
        )
        reward = self.format_reward if answer is None else float(is_right)
        info = {"correct": is_right, "has_answer": answer is not None}
        return Turn(reward=reward, terminated=True, info=info)

    def demonstrate(self, rng: random.Random) -> Trace:
        return [(Author.POLICY, f"\\boxed{{{final_answers(self.answer)[0]}}}")]

    def sample_random_action(self) -> str:
        return f"\\boxed{{{self.action_rng().randint(0, 100)}}}"

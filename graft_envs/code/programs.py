"""Problems answered by a program, which must pass hidden tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graft.data.errors import DataError
from graft.envs.base import with_request
from graft.envs.dataset.base import DatasetEnv
from graft.types import Turn
from graft_envs.code.grading import last_code_block, score_tests, table_of

REQUEST = (
    "Write a Python program that reads from standard input and prints to standard output. "
    "Give the whole program in one block:\n```python\n# your program\n```"
)


class ProgramEnv(DatasetEnv):
    """1.0 if the last fenced block passes every test, else 0.0; `format_reward` without a block.

    Tests are {"inputs": [...], "outputs": [...]}, a list of {"input", "output"}, or either as JSON
    text. Programs run in the sandbox. `request` follows the problem, or encloses it as {question}; "" shows
    the row alone, as GEM does.
    """

    def __init__(
        self,
        *,
        question_key: str = "problem",
        test_key: str = "tests",
        request: str = REQUEST,
        max_tests: int = 12,
        sandbox: str = "auto",
        format_reward: float = -0.1,
        **source: Any,
    ) -> None:
        if max_tests < 1:
            raise ValueError(f"max_tests={max_tests}: must be 1 or more")
        self.test_key, self.request = test_key, request
        self.max_tests = max_tests
        self.sandbox = sandbox
        self.format_reward = format_reward
        super().__init__(question_key=question_key, columns=(test_key,), **source)

    def ask(self, row: Mapping[str, Any]) -> str:
        try:
            self.answer = table_of(row.get(self.test_key))
        except ValueError as error:
            raise DataError(f"{self.where}: {self.test_key!r} {error}") from error
        return with_request(self.text_of(row, self.question_key), self.request)

    def respond(self, action: str) -> Turn:
        code = last_code_block(action)
        if code is None:
            info = {"correct": False, "has_answer": False}
            return Turn(reward=self.format_reward, terminated=True, info=info)
        score = score_tests(code, self.answer, max_tests=self.max_tests, sandbox=self.sandbox)
        info = {"correct": score == 1.0, "has_answer": True}
        return Turn(reward=float(score), terminated=True, info=info)

    def sample_random_action(self) -> str:
        return f"```python\nprint({self.action_rng().randint(0, 100)})\n```"

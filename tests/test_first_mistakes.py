"""Mistakes of a first day: slips in commands, recipes, data files, Python, environments and tools.

Each is answered by a sentence that says what was seen, where, and what to do: `fragments` are in it. None
may end in a traceback, and none may go on without a word.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import graft
from graft.envs.base import BaseEnv
from graft.types import Turn
from tests.command_line import graft as run_graft

TINY = """
run: {eval_tasks: 0, trackers: []}
model: {shape: {width: 16, layers: 1, heads: 2, kv_heads: 1, head_dim: 8, ff: 16, max_positions: 96}}
task: {env: calculator}
rollout: {tasks: 1, samples: 2, max_tokens: 4, max_turns: 2, max_context: 64}
train: {steps: 1}
"""


class Slip(NamedTuple):
    command: str
    fragments: tuple[str, ...]
    files: dict[str, str] = {}


def slip(command: str, *fragments: str, **files: str) -> Slip:
    named = {name.replace("_", "."): text for name, text in files.items()}
    return Slip(command, fragments, {"t.yaml": TINY, **named})


COMMANDS = [
    slip("init", "NAME", "The folder to create"),
    slip("init my/agent", "'my/agent'", "letters", "my-agent"),
    slip("init t.yaml", "'t.yaml'", "letters"),
    slip("translate", "SETTINGS", ".yaml"),
    slip("translate missing.sh", "'missing.sh'", "a file that exists", "--learning_rate"),
    slip("trian t.yaml", "'trian'", "'train'"),
    slip("train", "recipe", "A YAML file, or the name of a bundled recipe"),
    slip("train t.yml", "'t.yml'", "'t.yaml'"),
    slip("train py.py", "'py.py'", "YAML", "graft init", py_py="print(1)\n"),
    slip("plan quikstart", "'quikstart'", "'quickstart'"),
    slip("eval nothing", "'nothing'", "runs/", "graft runs", "OWNER/nothing"),
    slip("eval t.yaml", "'t.yaml'", "--recipe"),
    slip("view nothing", "'nothing'", "runs/", "graft runs"),
    slip("replay nothing --step 3", "'nothing'", "graft runs"),
    slip("export nothing --out x", "'nothing'", "OWNER/nothing"),
    slip("generate nothing --prompt x", "'nothing'", "OWNER/NAME"),
    slip("explain rewrd", "'rewrd'", "reward"),
    slip("play game:Wordl-v0", "'game:Wordl-v0'", "'game:Wordle-v0'"),
    slip("config t.yaml --key", "--key", "--keys"),
    slip("data make calculator --out x.foo", "x.foo", ".jsonl"),
]
RECIPES = [
    slip("train t.yaml train.lr", "'train.lr'", "train.lr=VALUE"),
    slip("train t.yaml train.lr=fast", "train.lr='fast'", "number"),
    slip("train t.yaml algo.name=GRPO2", "'GRPO2'", "'grpo'"),
    slip("train t.yaml task.env=calculater", "'calculater'", "'calculator'"),
    slip("train t.yaml task.env=mine:Mine", "'mine:Mine'", "cannot import 'mine'", "installed"),
    slip("train t.yaml task.reward=exact", "'exact'", "'exact_match'"),
    slip("train t.yaml model.device=gpu", "'gpu'", "cuda"),
    slip("train t.yaml model.path=Qwen3-0.6B model.shape={}", "=Qwen3-0.6B", "OWNER/Qwen3-0.6B"),
    slip("train t.yaml model.path=https://hf.co/a/b model.shape={}", "https://hf.co/a/b", "'a/b'"),
    slip("train t.yaml rollout.samples=0", "rollout.samples=0", "greater than or equal to 1"),
    slip("train t.yaml run.trackers=[tensorbord]", "'tensorbord'", "'tensorboard'"),
    slip("train t.yaml run.name=../up", "run.name='../up'", "run.dir"),
    slip("train t.yaml task.wrappers=[python_tol]", "'python_tol'", "'python_tool'"),
    slip("train t.yaml algo.loss={clip:{lo:0.2}}", "clip:{lo:0.2}", "blank after the colon"),
    slip("train t.yaml task.args.operand=3", "'operand'", "'operands'"),
    slip("train t.yaml model.shape.widht=3", "widht", "'width'"),
    slip(
        "train t.yaml model.shape.heads=3 model.shape.kv_heads=2",
        "heads=3",
        "multiple",
        "kv_heads=2",
    ),
    slip("train t.yaml modle.path=x", "'modle.path'", "'model.path'"),
    slip("train l.yaml", "l.yaml", "a list", "task:", l_yaml="- a\n- b\n"),
    slip(
        "train d.yaml",
        "d.yaml",
        "line 7",
        "train",
        "keep one",
        d_yaml=f"{TINY}train: {{steps: 2}}\n",
    ),
    slip("train e.yaml", "e.yaml", "no model", "model.path", e_yaml=""),
    slip("sft t.yaml", "t.yaml", "nothing to do", "sft.steps"),
]
DATA = [
    slip("data show rows.jsonl", "'rows.jsonl'", "train@OWNER/NAME"),
    slip(
        "data show rows.jsonl",
        "rows.jsonl, line 1",
        "JSON",
        "double quotes",
        rows_jsonl="{'a': 1}\n",
    ),
    slip("data show rows.jsonl", "rows.jsonl", "no rows", "empty", rows_jsonl=""),
    slip("data show rows.csv", "rows.csv, line 2", "quote left open", rows_csv='a,b\n"1,2\n'),
    slip("data show rows.txt", "rows.txt", "'.txt'", ".jsonl", rows_txt="hello\n"),
    slip("data show rows.jsonl", "rows.jsonl", "question", rows_jsonl='{"x": 1}\n'),
    slip("train t.yaml sft.data=rows.jsonl sft.epochs=1", "'rows.jsonl'", "train@OWNER/NAME"),
    slip("train t.yaml task.env=prompts", "no rows", "data="),
]


@pytest.mark.parametrize("given", [*COMMANDS, *RECIPES, *DATA], ids=lambda given: given.command)
def test_a_slip_is_answered_with_what_where_and_how(given: Slip, tmp_path: Path):
    for name, text in given.files.items():
        (tmp_path / name).write_text(text)
    done = run_graft(*given.command.split(), cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert [part for part in given.fragments if part not in done.stderr] == [], done.stderr


class Mine(BaseEnv):
    alphabet = "ab?"

    def pose(self):
        self.answer = "a"
        return "?"

    def respond(self, action):
        return Turn(reward=1.0, terminated=True)


def undescribed(place: int) -> str:
    return str(place)


def untyped(place):
    """Look.

    Args:
        place: Where.
    """
    return place


class Misspelled(Mine):
    tool_options = {"max_use": 3}

    @graft.tool
    def look(self, place: int) -> str:
        """Look.

        Args:
            place: Where.
        """
        return str(place)


class Mute(Misspelled):
    tool_options = {}

    @graft.tool
    def look(self, place: int) -> str:  # type: ignore[return]
        """Look.

        Args:
            place: Where.
        """


def called(env: Any, action: Any) -> Any:
    env = graft.make(env)
    env.reset(seed=0)
    return env.step(action)


SHAPE = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "ff": 16}
PYTHON = {
    "load": (lambda p: graft.load("quikstart"), ("'quikstart'", "graft train quickstart")),
    "load nothing": (lambda p: graft.load(), ("source", "shape=")),
    "shape": (lambda p: graft.load(shape={"widht": 1}, alphabet="a"), ("widht", "'width'")),
    "engine": (lambda p: graft.Engine("Qwen/Qwen3-0.6B"), ("'Qwen/Qwen3-0.6B'", "graft.load")),  # type: ignore
    "algo": (lambda p: graft.Learner(p, algo="gropo"), ("'gropo'", "'grpo'")),
    "lr": (lambda p: graft.Learner(p, lr="fast"), ("lr='fast'", "number")),  # type: ignore
    "policy": (lambda p: graft.collect(p, Mine), ("Policy", "graft.Engine(policy)")),  # type: ignore
    "tasks": (lambda p: graft.collect(graft.Engine(p), Mine, tasks=0), ("tasks=0", "equal to 1")),
    "nothing": (lambda p: graft.Learner(p).step([]), ("no episodes", "nothing to learn")),
    "benchmark": (lambda p: graft.evaluate(p, on="mth500"), ("'mth500'", "MATH500")),
    "k": (lambda p: graft.evaluate(p, on=Mine, k=(0,)), ("k is the int 0", "from 1")),
    "argument": (
        lambda p: graft.make(Mine, size=3),
        ("'size'", "test_first_mistakes.py:", "graft.make"),
    ),
    "recipe": (lambda p: graft.train(["a"]), ("list", "a file", "dict of sections")),  # type: ignore
    "section": (lambda p: graft.train({"modle": {}}), ("'modle'", "'model.path'")),
    "name": (lambda p: graft.colect, ("'colect'", "'collect'")),  # type: ignore
    "no docstring": (
        lambda p: graft.tool(undescribed),
        ("'undescribed'", "docstring", "description="),
    ),
    "no hint": (lambda p: graft.tool(untyped), ("'untyped'", "'place'", "place: str")),
    "tool options": (lambda p: graft.make(Misspelled), ("Misspelled", "'max_use'", "'max_uses'")),
    "mute tool": (lambda p: called(Mute, "<look>1</look>"), ("look", "None", "return a text")),
    "no reset": (lambda p: graft.make(Mine).step("a"), ("no episode", "reset()")),
    "action": (lambda p: called(Mine, 3), ("the int 3", "text")),
    "prompts": (lambda p: graft.generate(p, 3), ("the int 3", "a list of texts")),  # type: ignore
    "taken": (lambda p: graft.register("calculator", Mine), ("'calculator'", "another id")),
    "restore": (lambda p: graft.Learner(p).restore("nowhere"), ("'nowhere'", "learner.save")),
}


@pytest.mark.parametrize("name", PYTHON)
def test_a_slip_in_python_is_answered_with_what_and_how(name: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    do, fragments = PYTHON[name]
    with pytest.raises(Exception) as error:
        do(graft.load(shape=SHAPE, alphabet="ab?"))
    text = str(error.value)
    assert [part for part in fragments if part not in text] == [], text


def test_a_number_as_a_text_counts_as_the_number():
    """samples="8" was taken for 8 in one place and for a text in another."""
    engine = graft.Engine(graft.load(shape=SHAPE, alphabet="ab?"))
    (episode,) = graft.collect(engine, Mine, tasks=1, samples="2", max_tokens=2)  # type: ignore[arg-type]
    assert len(episode.leaves) == 2
    engine.close()


def test_a_run_that_is_nearly_named_is_suggested(tmp_path, monkeypatch):
    (tmp_path / "runs/quickstart").mkdir(parents=True)
    (tmp_path / "runs/quickstart/config.yaml").write_text(json.dumps({}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="did you mean 'quickstart'"):
        graft.load("quikstart")


def test_there_are_sixty():
    assert len([*COMMANDS, *RECIPES, *DATA, *PYTHON]) >= 60

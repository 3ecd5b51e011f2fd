"""EARL's own files: prompts as they are, the tools that they explain, rewards by `data_source`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from graft.cli import app
from graft.data.errors import DataError
from graft.envs import make
from graft.types import CallText
from tests.graft_envs.earl import earl_rows_kit as kit

ORDER = {"gold": "C,B,A", "reverse": True, "conditions": [["C", "B"], ["B", "A"]]}


def calls(trace: Any) -> list[str]:
    return ["".join(text.arguments) for _, text in trace if isinstance(text, CallText)]


@pytest.mark.parametrize("syntax", ["tags", "actions"])
def test_every_calculator_row_is_solved_by_its_teacher_with_its_expression(
    tmp_path: Path, syntax: str
):
    rows = [kit.calc_bench(*one, syntax=syntax) for one in kit.CALC]
    file = kit.write(tmp_path / "train.parquet", rows)
    env = make("earl:rows", data=file, syntax=syntax)
    found = []
    for number, row in enumerate(rows):
        prompt, _ = env.reset(number)
        assert prompt == row["prompt"]
        trace = env.demonstrate(random.Random(0))
        found.append(calls(trace))
        assert kit.follow(env, trace)[-1].reward == 1.0
    assert found == [["305+12*7"], ["(5+7)/3"], [], [], [], ["12"], []]


def test_arithmetic_and_countdown_rows_take_calls_and_are_graded_by_their_source():
    env = make("earl:rows", rows=[kit.arithmetic(), kit.countdown()], syntax="actions")
    env.reset(0)
    assert calls(env.demonstrate(random.Random(0))) == ["305+12*7"]
    env.step(CallText(" calculate 305 + 84 =", "calculator", (*"305+84",)))
    assert env.step("").reward == 1.0  # the result is the last number of the response
    env.reset(1)
    assert calls(env.demonstrate(random.Random(0))) == ["(5+7)/3"]
    for text, reward in {"<answer> (5 + 7) / 3 </answer>": 1, "<answer>4</answer>": 0}.items():
        assert env.fork().step(text).reward == reward


def test_sorting_rows_hold_their_items_and_pay_for_few_calls():
    rows = [
        kit.sorting("sort", [1, 0], "B,A"),
        kit.sorting("order", [0, 1, 2], **ORDER),
        kit.sorting("compare", [1, 0], "D > B", symbols=["D", "B"]),
    ]
    env = make("earl:rows", rows=rows, syntax="actions")
    for number, row in enumerate(rows):
        prompt, _ = env.reset(number)
        assert prompt == row["prompt"]
        assert kit.follow(env, env.demonstrate(random.Random(0)))[-1].reward == 1.0
    env.reset(0)
    assert env.fork().step("B,A").reward == 0.0  # naming the order sorts nothing
    env.step(CallText(" swap A and B", "swap", ("A", "B")))
    assert env.step("Done.").reward == 0.5  # sorted without a comparison
    env.reset(2)
    asked = env.step(CallText(" compare D and B", "compare", ("D", "B")))
    assert asked.observation == "D > B"
    assert env.fork().step("<answer> B < D </answer>").reward == 1.0
    assert env.step("<answer> D < B </answer> <answer> D > B </answer>").reward == 0.0  # the first


def test_a_folder_has_both_splits_and_a_file_only_its_own(tmp_path: Path):
    for split in ("train", "test"):
        kit.write(tmp_path / f"{split}.parquet", [kit.arithmetic(split=split)])
    for split in ("train", "test"):
        env = make("earl:rows", data=str(tmp_path), split=split, syntax="actions")
        env.reset(0)
        assert env.task().id == f"earl:rows:{split}:0"
        file = str(tmp_path / f"{split}.parquet")
        assert make("earl:rows", data=file, split=split, syntax="actions").reset(0)
    assert make("earl:rows", data=str(tmp_path), syntax="actions").split == "train"
    with pytest.raises(DataError, match=r"split of its rows is train, not test; give the file"):
        make("earl:rows", data=str(tmp_path / "train.parquet"), split="test", syntax="actions")


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([kit.arithmetic()], {}, r"explain calls in the syntax 'actions', not 'tags'"),
        ([kit.arithmetic(syntax="tags")], {"syntax": "actions"}, r"set task.args.syntax=tags"),
        ([kit.row("hotpotqa", "Paris", {})], {}, r"data_source is 'hotpotqa'.* task.env=prompts"),
        (
            [kit.sorting("sort", [1, 0], "B,A", symbols=["A"])],
            {"syntax": "actions"},
            r"row 1: .* as many symbols as items",
        ),
        (
            [kit.sorting("sort", ["a", 0], "B,A")],  # type: ignore[list-item]
            {"syntax": "actions"},
            r"'interaction_kwargs.items' holds .*, not a list",
        ),
    ],
)
def test_what_does_not_fit_is_refused(rows: Any, options: Any, said: str):
    with pytest.raises(DataError, match=said):
        make("earl:rows", rows=rows, **options)
    if "syntax" in said:  # without the tool the prompt's syntax does not matter
        assert make("earl:rows", rows=rows, tool=False, **options).reset(0)


@pytest.mark.parametrize(
    "name", ["arithmetic-lang2", "countdown-1", "calc-countdown", "calc-modulo", "order", "sort"]
)
def test_made_tasks_are_rows_of_the_original_and_are_read_back(name: str, tmp_path: Path):
    file = tmp_path / "train.parquet"
    command = [f"earl:{name}", "syntax=actions", "--form", "tasks", "--n", "6", "--out", str(file)]
    told = CliRunner().invoke(app, ["data", "make", *command])
    assert told.exit_code == 0, told.output
    told = CliRunner().invoke(app, ["data", "show", str(file), "--rows", "0"])
    assert told.exit_code == 0 and "env earl:rows" in told.output
    env = make("earl:rows", data=str(file), split="train", syntax="actions")
    for number in range(6):
        env.reset(number)
        assert kit.follow(env, env.demonstrate(random.Random(0)))[-1].reward == 1.0


def test_columns_of_made_tasks(tmp_path: Path):
    def first(name: str) -> Any:
        file = tmp_path / f"{name}.jsonl"
        command = [f"earl:{name}", "--form", "tasks", "--n", "1", "--out", str(file)]
        assert CliRunner().invoke(app, ["data", "make", *command]).exit_code == 0
        return json.loads(file.read_text())

    lang = first("arithmetic-lang2")
    assert lang["data_source"] == "basic_calculator_tutorial"
    assert lang["expr"].endswith(f"\n#### {lang['reward_model']['ground_truth']}")
    numbers = first("countdown-1")
    extra = numbers["extra_info"]
    assert numbers["reward_model"]["ground_truth"] == f"{extra['nums']}->{extra['target']}"
    bench = first("calc-count")
    assert (bench["data_source"], bench["extra_info"]["task"]) == ("calc_bench", "count")
    order = first("order")
    drawn = order["extra_info"]["interaction_kwargs"]
    target = order["reward_model"]["ground_truth"].split(",")
    assert drawn["tools"] == ["swap"] and drawn["task"] == "order"
    assert all(target.index(a) < target.index(b) for a, b in drawn["conditions"])

"""Rows of EARL's data sources earn what EARL pays: numbers after ####, expressions, boards."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from graft.cli import app
from graft.data.errors import DataError
from graft.envs import make
from graft.rewards.sources import SOURCES, grade_by_source

CALC = {"task": "countdown", "expr": "(5 + 7) / 3"}
DEAL = {"nums": [3, 5, 7], "target": "4"}
GRID = "[[1, 2], [2, 1]]"


@pytest.mark.parametrize(
    ("source", "text", "gold", "meta", "reward"),
    [
        ("calc_bench", "so\n#### (5 + 7) / 3", "4", CALC, 1.0),
        ("calc_bench", "####\n(7+5)/3", "4", CALC, 1.0),
        ("calc_bench", "#### 4", "4", CALC, 0.0),  # the bare target
        ("calc_bench", "<answer>4</answer>", "4", CALC, 0.0),
        ("calc_bench", "#### (5 + 7) / 3 = 4", "4", CALC, 0.0),
        ("calc_bench", "#### 5 + 7 * 3", "4", CALC, 0.0),
        ("calc_bench", "#### 1\n#### (5 + 7) / 3", "4", CALC, 0.0),  # the first one counts
        ("calc_bench", "#### 3 / 8 + 0", "0.375", {"task": "countdown", "expr": "3 / 8 + 0"}, 1.0),
        ("calc_bench", "#### 5\n#### 1,234.", "1234", {"task": "gsm8kr"}, 1.0),  # the last one does
        ("calc_bench", "it is 1234", "1234", {"task": "arithmetic"}, 0.0),
        ("calc_bench", "<answer>1234</answer>", "1234", {"task": "count"}, 0.0),
        ("calc_bench", "#### -7", "-7", {"task": "modulo"}, 1.0),
        ("big_math", "#### 12", "12", {"task": "big_math"}, 1.0),
        ("calc_bench", "#### 8.5", "8.25", {"task": "approximate"}, 0.75),
        ("calc_bench", "#### 12", "8.25", {"task": "approximate"}, 0.0),
        ("calc_bench", f"#### {GRID}", GRID, {"task": "sudoku"}, 1.0),
        ("calc_bench", "####\n[[1, 2],\n [2, 1]]", GRID, {"task": "sudoku"}, 1.0),
        ("calc_bench", "#### [[2, 1], [1, 2]]", GRID, {"task": "sudoku"}, 0.0),
        ("calc_bench", "#### " + "[" * 500 + "]", GRID, {"task": "sudoku"}, 0.0),
        ("calc_bench", "#### __import__('os')", "4", CALC, 0.0),
        ("countdown", "</think>\n<answer> (5 + 7) / 3 </answer>", "[3, 5, 7]->4", DEAL, 1.0),
        ("countdown", "<answer>4</answer>", "[3, 5, 7]->4", DEAL, 0.0),
        ("countdown", "<answer>[3, 5, 7]->4</answer>", "[3, 5, 7]->4", DEAL, 0.0),  # echoed
        ("countdown", "[3, 5, 7]->4", "[3, 5, 7]->4", DEAL, 0.0),
        ("countdown", "<answer>1</answer><answer>(5+7)/3</answer>", "[3, 5, 7]->4", DEAL, 0.0),
        ("countdown3to4", "<answer>(5+7)/3</answer>", "[3, 5, 7]->4", {}, 1.0),
        ("basic_calculator_tutorial", "5 + 7 = 12, so #### 12.", "12", {}, 1.0),
        ("basic_calculator_tutorial", "#### 12, not 13", "12", {}, 0.0),
    ],
)
def test_what_a_source_pays(source: str, text: str, gold: str, meta: Any, reward: float):
    assert grade_by_source(source, text, gold, meta) == reward


@pytest.mark.parametrize(
    ("source", "gold", "meta"),
    [
        ("hotpotqa", "Paris", {}),
        ("calc_bench", "4", {}),  # no task: not EARL's row
        ("calc_bench", "4", {"task": "poetry"}),
        ("countdown", {"numbers": [3, 5, 7], "target": 4}, {}),  # TinyZero's
        ("countdown", "4", {"nums": [], "target": 4}),
    ],
)
def test_rows_in_another_form_are_graded_like_any_other(source: str, gold: Any, meta: Any):
    assert grade_by_source(source, "<answer>4</answer>", gold, meta) is None


def earl_rows() -> list[dict[str, Any]]:
    """As EARL's scripts write them: one struct of everything any task has in its `extra_info`."""
    system = {"role": "system", "content": "You may calculate."}
    begun = {"role": "assistant", "content": "Let me solve this step by step.\n"}
    given = [
        ("calc_bench", "4", {"task": "countdown", "expr": "(5 + 7) / 3", "answer": "4"}),
        ("calc_bench", "72315", {"task": "gsm8kr", "expr": "48210 / 2 = ...", "answer": "72315"}),
        ("countdown", "[3, 5, 7]->4", {"nums": [3, 5, 7], "target": "4", "expr": "(5 + 7) / 3"}),
    ]
    return [
        {
            "data_source": source,
            "prompt": [system, {"role": "user", "content": f"question {number}"}, begun],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": gold},
            "extra_info": {"split": "train", "index": number, **extra},
        }
        for number, (source, gold, extra) in enumerate(given)
    ]


def test_earls_parquet_is_graded_as_earl_does(tmp_path: Path):
    file = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(earl_rows()), file)
    env = make("prompts", data=str(file))
    tries = [
        "#### (5 + 7) / 3",
        "#### 4",
        "#### 72,315",
        "<answer>(5+7)/3</answer>",
        "[3, 5, 7]->4",
    ]
    paid = []
    for row in range(3):
        rewards = []
        for text in tries:
            env.reset(row)
            rewards.append(env.step(text).reward)
        paid.append(rewards)
        env.reset(row)
        ((_, shown),) = env.demonstrate(random.Random(0))
        assert env.step(shown).reward == 1.0
    assert paid == [[1, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0]]
    text = CliRunner().invoke(app, ["data", "show", str(file), "--rows", "0"]).output
    assert "graded, without task.reward: calc_bench, countdown by EARL's rules\n" in text


def test_show_lists_sources_without_a_rule(tmp_path: Path):
    rows = [*earl_rows(), {**earl_rows()[0], "data_source": "mine"}]
    file = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    text = CliRunner().invoke(app, ["data", "show", str(file), "--rows", "0"]).output
    assert (
        "calc_bench, countdown by EARL's rules; others by the last answer, since they have no rule"
        in text
    )


def test_rows_that_tools_must_bring_into_order_are_refused():
    """Their gold, A,B, is what the hidden order should become: naming it sorts nothing."""
    row = {
        **earl_rows()[0],
        "data_source": "sorting",
        "reward_model": {"ground_truth": "A,B"},
        "extra_info": {"task": "sort", "interaction_kwargs": {"task": "sort", "items": [0, 1]}},
    }
    with pytest.raises(DataError, match=r"has EARL's sorting tasks, .* task.env=earl:rows"):
        make("prompts", rows=[row])
    own = {**row, "extra_info": {}}  # rows of another source with the same name
    assert make("prompts", rows=[own]).reset(0)


def test_a_gold_that_is_a_json_list_of_texts_is_any_of_them():
    """A cell of csv can hold a list in no other way."""
    for gold in ('["Paris", "Lutetia"]', "['Paris', 'Lutetia']"):  # JSON, and what pandas writes
        env = make("prompts", rows=[{"prompt": "?", "answer": gold}])
        for text, reward in {"Paris": 1, "lutetia": 1, gold: 1, "Rome": 0}.items():
            env.reset(0)
            assert env.step(f"<answer>{text}</answer>").reward == reward


def test_every_source_has_a_rule_that_survives_any_text():
    for source in SOURCES:
        for text in (
            "",
            "####",
            "<answer></answer>",
            "#### " + "9" * 100_000,
            "<answer>((((",
            "\x00",
        ):
            for meta in (CALC, DEAL, {"task": "sudoku"}, {"task": "approximate"}):
                assert grade_by_source(source, text, "4", meta) in (None, 0.0)

"""The comparison of EARL with its baselines: what it runs, and what it makes of the numbers."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.expa.cost import calculator
from benchmarks.expa.curves import Curve, Point, read_curve, table
from benchmarks.expa.suites import SUITES
from benchmarks.methods import commands
from graft.config import load_config


@pytest.mark.parametrize("name", SUITES)
def test_every_run_of_every_suite_is_a_valid_recipe(name: str):
    given = argparse.Namespace(
        seeds=[3], methods=None, out=Path("runs"), model="models/some", overrides=["train.lr=0.5"]
    )
    found = commands("expa", name, SUITES[name], given)
    assert len(found) == len(SUITES[name].methods)
    for folder, command in found.items():
        recipe, *overrides = command[command.index("train") + 1 :]
        config = load_config(recipe, overrides)
        assert (config.run.name, config.run.seed, config.train.lr) == (folder.name, 3, 0.5)
        is_earl = "-earl" in folder.name
        assert config.actions.file.endswith("-tags") != is_earl
        assert (config.task.args["syntax"] == "actions") == is_earl
        assert (config.algo.name == "cpo") == folder.name.endswith(("-earl-3", "-cpo-3"))


def test_methods_begin_where_their_own_format_was_warmed_up():
    given = argparse.Namespace(seeds=[0], methods=None, out=Path("o"), model="", overrides=[])
    starts = {
        folder.name: next(word for word in command if word.startswith("model.path="))
        for folder, command in commands("expa", "rare", SUITES["rare"], given).items()
    }
    assert starts == {
        "rare-earl-0": "model.path=o/warm-earl-0",
        "rare-earl-grpo-0": "model.path=o/warm-earl-0",
        "rare-prompt-grpo-0": "model.path=o/warm-prompt-grpo-0",
        "rare-prompt-cpo-0": "model.path=o/warm-prompt-grpo-0",
    }


def test_tokens_add_up_over_steps_and_scores_are_read_where_they_were_taken(tmp_path: Path):
    rows = [
        {"phase": "sft", "step": 1, "num_tokens": 999.0},
        {"phase": "rl", "step": 1, "num_tokens": 100.0},
        {
            "phase": "rl", "step": 2, "num_tokens": 50.0,
            "eval/sampled": 0.5, "eval/greedy": 0.6, "eval/tool_rate": 0.7,
        },
        {"phase": "rl", "step": 3, "num_tokens": 25.0},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_curve(tmp_path, "earl", 0).points == [Point(150, 0.5, 0.6, 0.7)]  # it was cut short
    scores = {"sampled": 0.1, "greedy": 0.2, "tool_rate": 0.0}
    (tmp_path / "summary.json").write_text(json.dumps({"before": scores, "after": scores}))
    assert [p.tokens for p in read_curve(tmp_path, "earl", 0).points] == [0, 150, 175]
    assert read_curve(tmp_path / "nowhere", "earl", 0).points == []


def test_methods_are_compared_at_the_tokens_that_all_have_sampled():
    quick = Curve("grpo", 0, [Point(0, 0.0, 0, 0), Point(100, 0.4, 0.5, 1.0)])
    slow = [
        Curve(
            "cpo", s, [Point(0, 0.0, 0, 0), Point(90, 0.2 + s / 5, 0.5, 1.0), Point(300, 1, 1, 1)]
        )
        for s in (0, 1)
    ]
    lines = table([quick, *slow]).splitlines()
    assert "after 100 tokens" in lines[0]
    assert lines[2] == "| grpo | 1 | 0.000 | 0.400 | 0.500 | 1.000 |"
    assert lines[3].startswith("| cpo | 2 | 0.000 +- 0.000 | 0.300 +- 0.141 | 0.500")


def test_the_grammar_of_the_cost_benchmark_calls_and_comes_back():
    space, grammar = calculator(vocab_size=240, every=24)
    route, digit, leave = 240, 241, 255
    assert grammar.step(0, 100) == 0 and grammar.step(0, 3) == 1  # ten of 240 tokens ask for it
    assert [int(a) for a in space.row(1).nonzero()[0]] == [route]
    inside = grammar.step(1, route)
    assert space.allows(inside, digit) and not space.allows(inside, leave)
    assert grammar.step(grammar.step(inside, digit), leave) == 0
    assert grammar.is_exit(grammar.step(inside, digit), leave)

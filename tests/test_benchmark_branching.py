"""The comparison of GRPO, ARPO and AEPO: what it runs, and what it makes of the numbers."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.branching.curves import Point, read_outcome, table
from benchmarks.branching.suites import SUITES
from benchmarks.methods import commands, folders_of
from graft.config import load_config
from graft.train.algorithm import branch_of, preset_of


@pytest.mark.parametrize("name", SUITES)
def test_methods_differ_in_their_branch_and_nothing_else_but_aepos_loss(name: str):
    given = argparse.Namespace(seeds=[3], methods=None, out=Path("o"), model="m", overrides=[])
    todo = commands("arpo", name, SUITES[name], given)
    kinds = {}
    for folder, command in todo.items():
        recipe, *overrides = command[command.index("train") + 1 :]
        config = load_config(recipe, overrides)
        assert config.run.seed == 3
        method, seed = folders_of(todo, name)[folder]
        assert seed == 3
        branch = branch_of(config, preset_of(config), None)
        rule = getattr(branch, "rule", None)
        assert getattr(rule, "dynamic", False) == (method == "aepo")
        kinds[method] = type(branch).__name__, config
    if "arpo" in kinds:
        assert kinds["grpo"][0] == "function" and kinds["arpo"][0] == "Branching"
        same = [kinds[m][1].model_dump(exclude={"run", "algo"}) for m in ("grpo", "arpo")]
        for values in same:
            values["rollout"].pop("branch")
        assert same[0] == same[1]
        assert kinds["grpo"][1].algo == kinds["arpo"][1].algo
        assert "after" not in name or kinds["arpo"][1].sft.steps == 0


def test_calls_add_up_and_scores_stand_where_they_were_taken(tmp_path: Path):
    assert read_outcome(tmp_path, "arpo", 0) is None  # has not come to its end
    numbers = {
        "num_tokens": 10.0, "num_trained_tokens": 8.0, "num_forward_tokens": 30.0,
        "time/rollout": 1.0, "time/learn": 0.5,
    }  # fmt: skip
    rows = [
        {"phase": "sft", "step": 1},
        {"phase": "rl", "step": 1, "tools/calls_made": 100.0, **numbers},
        {"phase": "rl", "step": 2, "tools/calls_made": 50.0, "eval/sampled": 0.5, **numbers},
        {"phase": "rl", "step": 3, "tools/calls_made": 150.0, **numbers},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"before": {"sampled": 0.1}, "after": {"sampled": 0.9, "greedy": 1.0}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    found = read_outcome(tmp_path, "arpo", 0)
    assert found is not None
    assert found.points == [Point(0.0, 0.1), Point(150.0, 0.5), Point(300.0, 0.9)]
    line = table([found]).splitlines()[-1]
    assert line == "| arpo | 1 | 0.100 | 0.900 | 1.000 | 100 | 10 | 8 | 30 | 1 | 0.5 |"

"""Comparisons of methods (branching, EARL, distillation): what they run and make of the numbers."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import distill
from benchmarks.branching import curves as branching
from benchmarks.branching.suites import SUITES as BRANCHING
from benchmarks.expa import curves as expa
from benchmarks.expa.cost import calculator
from benchmarks.expa.suites import SUITES as EXPA
from benchmarks.methods import commands, folders_of
from graft.config import Config, load_config
from graft.train.algorithm import branch_of, preset_of


def started(
    kind: str, suites: Any, name: str, *overrides: str, seed: int = 3, model: str = "m"
) -> dict[str, tuple[str, Config]]:
    """The folder's name and the settings of each method's run."""
    given = argparse.Namespace(
        seeds=[seed], methods=None, out=Path("o"), model=model, overrides=[*overrides]
    )
    todo = commands(kind, name, suites[name], given)
    methods = folders_of(todo, name)
    assert len(todo) == len(suites[name].methods) == len(methods)
    runs = {}
    for folder, command in todo.items():
        recipe, *words = command[command.index("train") + 1 :]
        config = load_config(recipe, words)
        method, its_seed = methods[folder]
        assert config.run.seed == its_seed == seed
        runs[method] = folder.name, config
    return runs


def write_run(folder: Path, rows: list[dict[str, Any]], summary: dict[str, Any] | None) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))


# GRPO, ARPO and AEPO


@pytest.mark.parametrize("name", BRANCHING)
def test_methods_differ_in_their_branch_and_nothing_else_but_aepos_loss(name: str):
    kinds = {}
    for method, (_, config) in started("arpo", BRANCHING, name).items():
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
    assert branching.read_outcome(tmp_path, "arpo", 0) is None  # has not come to its end
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
    scores = {"before": {"sampled": 0.1}, "after": {"sampled": 0.9, "greedy": 1.0}}
    write_run(tmp_path, rows, scores)
    found = branching.read_outcome(tmp_path, "arpo", 0)
    assert found is not None
    assert [tuple(point) for point in found.points] == [(0.0, 0.1), (150.0, 0.5), (300.0, 0.9)]
    line = branching.table([found]).splitlines()[-1]
    assert line == "| arpo | 1 | 0.100 | 0.900 | 1.000 | 100 | 10 | 8 | 30 | 1 | 0.5 |"


# EARL and its baselines


@pytest.mark.parametrize("name", EXPA)
def test_every_run_of_every_suite_is_a_valid_recipe(name: str):
    for folder, config in started("expa", EXPA, name, "train.lr=0.5").values():
        assert (config.run.name, config.train.lr) == (folder, 0.5)
        is_earl = "-earl" in folder
        assert config.actions.file.endswith("-tags") != is_earl
        assert (config.task.args["syntax"] == "actions") == is_earl
        assert (config.algo.name == "cpo") == folder.endswith(("-earl-3", "-cpo-3"))


def test_methods_begin_where_their_own_format_was_warmed_up():
    runs = started("expa", EXPA, "rare", seed=0, model="").values()
    assert {folder: config.model.path for folder, config in runs} == {
        "rare-earl-0": "o/warm-earl-0",
        "rare-earl-grpo-0": "o/warm-earl-0",
        "rare-prompt-grpo-0": "o/warm-prompt-grpo-0",
        "rare-prompt-cpo-0": "o/warm-prompt-grpo-0",
    }


def test_tokens_add_up_over_steps_and_scores_are_read_where_they_were_taken(tmp_path: Path):
    scored = {"eval/sampled": 0.5, "eval/greedy": 0.6, "eval/tool_rate": 0.7}
    rows = [
        {"phase": "sft", "step": 1, "num_tokens": 999.0},
        {"phase": "rl", "step": 1, "num_tokens": 100.0},
        {"phase": "rl", "step": 2, "num_tokens": 50.0, **scored},
        {"phase": "rl", "step": 3, "num_tokens": 25.0},
    ]
    write_run(tmp_path, rows, None)  # it was cut short
    assert expa.read_curve(tmp_path, "earl", 0).points == [expa.Point(150, 0.5, 0.6, 0.7)]
    scores = {"sampled": 0.1, "greedy": 0.2, "tool_rate": 0.0}
    write_run(tmp_path, rows, {"before": scores, "after": scores})
    assert [p.tokens for p in expa.read_curve(tmp_path, "earl", 0).points] == [0, 150, 175]
    assert expa.read_curve(tmp_path / "nowhere", "earl", 0).points == []


def test_methods_are_compared_at_the_tokens_that_all_have_sampled():
    start, end = expa.Point(0, 0.0, 0, 0), expa.Point(300, 1, 1, 1)
    quick = expa.Curve("grpo", 0, [start, expa.Point(100, 0.4, 0.5, 1.0)])
    slow = [
        expa.Curve("cpo", seed, [start, expa.Point(90, 0.2 + seed / 5, 0.5, 1.0), end])
        for seed in (0, 1)
    ]
    lines = expa.table([quick, *slow]).splitlines()
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


# SFT, distillation and GRPO


def test_every_method_has_the_same_rows_steps_and_schedule():
    ((_, start),) = started("distill", distill.SUITES, "start", model="").values()
    assert start.train.steps == 0 and start.sft.steps
    runs = started("distill", distill.SUITES, "compare", model="")
    assert runs.keys() == distill.METHODS.keys()
    for name, (_, config) in runs.items():
        rate = float(name.partition("-")[2])
        part, rows = config.train, config.rollout.tasks * config.rollout.samples
        if name.startswith("sft"):
            part, rows = config.sft, config.sft.batch
            assert config.train.steps == 0
        else:
            preset_of(config)
        same = (distill.STEPS, rate, "linear", 0.1, distill.ROWS)
        assert (part.steps, part.lr, part.schedule, part.min_lr, rows) == same
        assert config.model.path == "o/start-sft-3"


def test_trained_tokens_add_up_to_a_curve(tmp_path: Path):
    assert distill.read_curve(tmp_path, "opd-1e-3", 0) is None  # has not come to its end
    scored = {"eval/sampled": 0.5, "eval/greedy": 0.75}
    rows = [
        {"phase": "rl", "step": 1, "num_trained_tokens": 100.0, "distill/kl": 0.4},
        {"phase": "rl", "step": 2, "num_trained_tokens": 50.0, "distill/kl": 0.2, **scored},
    ]
    write_run(tmp_path, rows, {})
    found = distill.read_curve(tmp_path, "opd-1e-3", 0)
    assert found is not None and found.distance is not None
    assert found[:5] == ("opd-1e-3", 0, [150.0], [0.5], [0.75])
    assert [round(value, 6) for value in found.distance] == [0.3, 0.3]
    other = distill.Curve("opd-1e-3", 1, [150.0], [0.7], [0.85], (0.5, 0.1))
    line = distill.table([found, other]).splitlines()[-1]
    assert line == "| `opd` | 1e-3 | 2 | 150 | 0.600 ± 0.141 | 0.800 ± 0.071 | 0.4000, 0.2000 |"

"""The comparison of SFT, distillation and GRPO: what it runs, and what it makes of the numbers."""

import argparse
import json
from pathlib import Path

from benchmarks.distill import METHODS, ROWS, STEPS, SUITES, Curve, read_curve, table
from benchmarks.methods import commands, folders_of
from graft.config import Config, load_config
from graft.train.algorithm import preset_of


def configs(name: str) -> dict[str, Config]:
    given = argparse.Namespace(seeds=[3], methods=None, out=Path("o"), model="", overrides=[])
    todo = commands("distill", name, SUITES[name], given)
    of = folders_of(todo, name)
    return {
        of[folder][0]: load_config(recipe, overrides)
        for folder, command in todo.items()
        for recipe, *overrides in [command[command.index("train") + 1 :]]
    }


def test_every_method_has_the_same_rows_steps_and_schedule():
    (start,) = configs("start").values()
    assert start.train.steps == 0 and start.sft.steps
    found = configs("compare")
    assert found.keys() == METHODS.keys()
    for name, config in found.items():
        rate = float(name.partition("-")[2])
        part, rows = config.train, config.rollout.tasks * config.rollout.samples
        if name.startswith("sft"):
            part, rows = config.sft, config.sft.batch
            assert config.train.steps == 0
        else:
            preset_of(config)
        assert (part.steps, part.lr, part.schedule, part.min_lr, rows) == (
            STEPS, rate, "linear", 0.1, ROWS,
        )  # fmt: skip
        assert config.model.path == "o/start-sft-3"


def test_tokens_add_up_and_scores_stand_where_they_were_taken(tmp_path: Path):
    assert read_curve(tmp_path, "opd-1e-3", 0) is None  # has not come to its end
    rows = [
        {"phase": "rl", "step": 1, "num_trained_tokens": 100.0, "distill/kl": 0.4},
        {"phase": "rl", "step": 2, "num_trained_tokens": 50.0, "distill/kl": 0.2,
         "eval/sampled": 0.5, "eval/greedy": 0.75},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "summary.json").write_text("{}")
    found = read_curve(tmp_path, "opd-1e-3", 0)
    assert found is not None and found.distance is not None
    assert found[:5] == ("opd-1e-3", 0, [150.0], [0.5], [0.75])
    assert [round(value, 6) for value in found.distance] == [0.3, 0.3]
    other = Curve("opd-1e-3", 1, [150.0], [0.7], [0.85], (0.5, 0.1))
    line = table([found, other]).splitlines()[-1]
    assert line == ("| `opd` | 1e-3 | 2 | 150 | 0.600 ± 0.141 | 0.800 ± 0.071 | 0.4000, 0.2000 |")

"""EARL's commands with EARL's own files: its parquet rows and its tool files, two steps each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.graft_envs.earl import earl_rows_kit as kit
from tests.training import train_recipe

CALCULATOR = """
tool_list:
  - name: calculator
    train_entry: true
    entry_desc: " calculate "
    output_template: "%s\\n"
    cpo_words: [" calculate"]
    action_groups:
      - name: basic
        actions:
          - {desc: " + ", trainable: true}
          - {desc: " - "}
          - {desc: " * "}
          - {desc: " / "}
          - {desc: " ("}
          - {desc: ")"}
          - {desc: "0"}
          - {desc: "1"}
          - {desc: "2"}
      - name: exit
        actions: [{desc: " = "}]
"""
SORTING = """
tool_list:
  - name: compare
    entry_desc: " compare"
    output_template: ": %s\\n"
    cpo_words: [" compare"]
    action_groups: [{name: items, actions: [{desc: " A"}, {desc: " B"}, {desc: " C"}]}]
  - name: swap
    entry_desc: " swap"
    output_template: " => %s\\n"
    cpo_words: [" swap"]
    action_groups: [{name: items}]
  - name: check
    entry_desc: " check if"
    output_template: ": %s\\n"
    cpo_words: [" check"]
    action_groups:
      - name: items
      - {name: properties, actions: [{desc: " is even", init_weight_with: 1}]}
"""
TAGS = """
tool_list:
  - name: calculator
    earl: false
    entry_desc: " <calculator>"
    exit_desc: " </calculator>"
    output_template: " <result> %s </result>"
    cpo_words: [" <"]
    actions: [" +", " -", " *", " /", " ", "0", "1", "2", "3", " (", ")"]
"""


def conditions(**options: Any) -> dict[str, Any]:
    given = {"gold": "C,B,A", "reverse": True, "conditions": [["C", "B"], ["B", "A"]]}
    return kit.sorting("order", [0, 1, 2], **given, **options)


CASES = [
    ("expa/lang2", CALCULATOR, kit.arithmetic, "actions"),
    ("expa/order-earl", SORTING, conditions, "actions"),
    ("expa/countdown-prompt-cpo", TAGS, kit.countdown, "tags"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "tools", "build", "syntax"), CASES)
def test_a_recipe_runs_with_the_files_of_the_original(
    recipe: str,
    tools: str,
    build: Any,
    syntax: str,
    model: str,
    tmp_path: Path,
):
    (tmp_path / "tools.yaml").write_text(tools)
    folder = tmp_path / "data"
    for split in ("train", "test"):
        rows = [build(index=n, split=split, syntax=syntax) for n in range(4)]
        kit.write(folder / f"{split}.parquet", rows)
    sizes = {
        "task.env": "earl:rows",
        "task.args.data": str(folder),
        "actions.file": str(tmp_path / "tools.yaml"),
        "model.path": model,
        "run.dir": str(tmp_path),
        "run.trackers": "[]",
        "run.eval_tasks": 2,
        "train.steps": 2,
        "train.minibatches": 2,
        "rollout.tasks": 2,
        "rollout.max_tokens": 12,
        "rollout.max_turns": 3,
        "rollout.max_context": 16384,
    }
    summary = train_recipe(recipe, *(f"{key}={value}" for key, value in sizes.items()))
    lines = (tmp_path / summary["name"] / "metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["phase"] == "rl" for line in lines) == 2
    (first, *_) = sorted((tmp_path / summary["name"] / "episodes").glob("*"))
    episode = json.loads(first.read_text().splitlines()[0])
    prompt = episode["spans"][0]["text"]
    assert prompt.count("Let me solve this step by step.") == 1  # the row's, not the recipe's too

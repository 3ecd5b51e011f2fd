"""`graft eval` calls tasks held out where they are, and says which are rows that the run trains on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.model_calls import evaluate_model
from tests.training import train_recipe

RECIPE = """
run: {{dir: "{folder}", name: run, eval_tasks: 0, trackers: []}}
model:
  alphabet: bytes
  shape: {{width: 32, layers: 1, heads: 2, kv_heads: 1, head_dim: 16, ff: 32, max_positions: 96}}
task: {{env: prompts, args: {{data: "{folder}/rows.jsonl"{split}}}, reward: exact_match{eval_args}}}
rollout: {{tasks: 2, samples: 2, max_tokens: 2, max_turns: 1, max_context: 64}}
train: {{steps: 1}}
"""


def write_rows(file: Path, start: int) -> None:
    rows = [{"prompt": f"{n}?", "answer": str(n)} for n in range(start, start + 40)]
    file.write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained_rows")
    write_rows(folder / "rows.jsonl", 0)
    write_rows(folder / "others.jsonl", 100)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> str:
    """A run on all rows of a file."""
    (folder / "tiny.yaml").write_text(RECIPE.format(folder=folder, split="", eval_args=""))
    train_recipe(str(folder / "tiny.yaml"))
    return str(folder / "run")


def scored(source: str, *overrides: str, **how: Any) -> tuple[str, dict[str, str]]:
    table, _, _ = evaluate_model(source, tasks=3, overrides=overrides, **how, say=lambda text: None)
    assert table.to_json()["not_held_out"] == table.not_held_out
    return table.caption, table.not_held_out


def test_rows_that_the_run_trains_on_are_not_called_held_out(run: str):
    caption, trained = scored(run)
    assert trained == {"prompts": "its 3 tasks are rows that the run trains on"}
    assert caption.startswith("Tasks, ") and "Held-out" not in caption
    assert "Not held out" in caption and "rows that the run trains on" in caption


def test_rows_of_another_file_and_of_a_split_are_held_out(run: str, folder: Path):
    caption, trained = scored(run, on="prompts", args=[f"prompts.data={folder}/others.jsonl"])
    assert not trained and caption.startswith("Held-out tasks, ") and "memory" not in caption
    apart = ("task.args.split=train", "task.eval_args.split=test")
    assert scored(run, *apart)[1] == {}


def test_the_same_file_is_found_by_another_path(run: str, folder: Path):
    path = folder / ".." / folder.name / "rows.jsonl"
    assert scored(run, on="prompts", args=[f"prompts.data={path}"])[1]


def test_of_two_files_only_the_trained_rows_are_counted(run: str, folder: Path):
    data = f"[{folder}/others.jsonl,{folder}/rows.jsonl]"
    _, trained = scored(run, on="prompts", args=[f"prompts.data={data}"])
    assert trained["prompts"].startswith(("1 of its 3", "2 of its 3"))


def test_tasks_of_the_split_for_training_are_not_called_held_out(run: str):
    _, trained = scored(run, on="prompts", args=["prompts.split=train"])
    assert "rows that the run trains on" in trained["prompts"]
    drawn = ("task.env=calculator", "task.args={}", "task.reward=")
    assert scored(run, *drawn)[1] == {}
    _, trained = scored(run, *drawn, on="calculator", args=["calculator.split=train"])
    assert trained == {"calculator": "its tasks are of the split 'train'"}


def test_rows_of_the_supervised_phase_are_trained_too(run: str, folder: Path):
    sft = ("sft.steps=1", f"sft.data={folder}/others.jsonl")
    _, trained = scored(run, *sft, on="prompts", args=[f"prompts.data={folder}/others.jsonl"])
    assert trained == {"prompts": "its 3 tasks are rows that the run trains on"}


def test_of_a_model_without_a_recipe_nothing_is_claimed(run: str, folder: Path):
    [checkpoint] = Path(run, "checkpoints").glob("rl-000001")
    model = folder / "model"
    if not model.exists():
        model.symlink_to(checkpoint)
    how = {"on": "prompts", "args": [f"prompts.data={folder}/others.jsonl", "prompts.reward=f1"]}
    caption, trained = scored(
        str(model), "rollout.max_context=64", "rollout.max_tokens=2", f"run.dir={folder}", **how
    )
    assert caption.startswith("Tasks, ") and not trained

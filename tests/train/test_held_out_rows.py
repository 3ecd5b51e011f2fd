"""Held-out tasks that a run trains on are found at its start, by content, and marked beside every score."""

from __future__ import annotations

import io
import json
import random
from contextlib import closing
from pathlib import Path

import pytest

from graft.commands.runs import state_of, table
from graft.config import Config, load_config
from graft.doctor.recipe import Examination
from graft.envs.table import make
from graft.models.io.model_card import read_origin
from graft.runs import find_run
from graft.train.leakage import Leakage, held_out_check, run_leakage
from tests.training import train_recipe

RECIPE = """
run: {{dir: "{folder}", name: run, eval_tasks: 8, trackers: [], log_episodes: 0}}
model:
  alphabet: bytes
  shape: {{width: 32, layers: 1, heads: 2, kv_heads: 1, head_dim: 16, ff: 32, max_positions: 160}}
task:
  env: prompts
  args: {{data: "{folder}/rows.jsonl", split: train}}
  eval_args: {{split: test}}
  reward: exact_match
sft: {{data: "{folder}/chats.jsonl", steps: 1, batch: 2}}
rollout: {{tasks: 1, samples: 2, max_tokens: 2, max_turns: 1, max_context: 128}}
train: {{steps: 1}}
"""
WORDS = ["red", "green", "blue", "white", "black", "brown", "grey", "pink"]


def question(number: int) -> str:
    drawn = random.Random(number)
    return f"Which colours are {' '.join(drawn.choices(WORDS, k=6))}, number {number}?"


def write(file: Path, rows: list[dict]) -> None:
    file.write_text("\n".join(map(json.dumps, rows)))


def as_chat(number: int) -> dict:
    text = f"Answer the question.\n\n{question(number)}"
    return {
        "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "red"}]
    }


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    write(tmp_path / "rows.jsonl", [{"prompt": question(n), "answer": "red"} for n in range(60)])
    write(tmp_path / "chats.jsonl", [as_chat(n) for n in range(60)])
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(folder=tmp_path))
    return str(tmp_path / "tiny.yaml")


def leaks_of(config: Config) -> list[Leakage]:
    [item] = config.task.envs
    return run_leakage(
        config,
        lambda task: make(item.env, **(item.args or {})),
        lambda task: make(item.env, **item.held_out_args),
    )


def num_test_rows(recipe: str) -> int:
    [item] = load_config(recipe).task.envs
    return min(8, len(make(item.env, **item.held_out_args).unwrapped.numbers))


@pytest.mark.parametrize(
    ("overrides", "rows_of"),
    [
        ([], ["sft.data"]),
        (["task.args.split=null", "task.eval_args.split=null"], ["sft.data", "task rows"]),
        (["sft.steps=0"], []),
        (["sft.steps=0", "task.args.split=null"], ["task rows"]),
        (["sft.data={folder}/others.jsonl"], []),
        (["sft.data={folder}/others.jsonl", "task.args.split=null", "train.steps=0"], []),
    ],
)
def test_trained_rows_among_the_held_out_tasks_are_counted_by_source(
    recipe: str, tmp_path: Path, overrides: list[str], rows_of: list[str]
):
    write(tmp_path / "others.jsonl", [as_chat(n) for n in range(100, 140)])
    found = leaks_of(load_config(recipe, [one.format(folder=tmp_path) for one in overrides]))
    assert [list(one.rows_of) for one in found] == [rows_of]
    count = num_test_rows(recipe) if "task.eval_args.split=null" not in overrides else 8
    assert [one.leaked for one in found] == [count if rows_of else 0]
    check = held_out_check(found)
    assert (check is None) == (not rows_of)
    if check is not None:
        assert check.verdict == "warn" and f"{count} of {count} held-out tasks" in check.seen
        assert "task.eval_args.split=test" in check.remedy


def test_only_the_rows_that_are_there_count(recipe: str, tmp_path: Path):
    [item] = load_config(recipe).task.envs
    env = make(item.env, **item.held_out_args).unwrapped
    test = [env.numbers[seed % len(env.numbers)] for seed in range(1 << 50, (1 << 50) + 8)]
    kept = [n for n in range(60) if n not in test[:3]]
    write(tmp_path / "chats.jsonl", [as_chat(n) for n in kept])
    [found] = leaks_of(load_config(recipe))
    assert found.leaked == len(set(test)) - 3 and found.tasks == len(set(test))


def test_held_out_rows_of_the_supervised_phase_are_checked_too(recipe: str, tmp_path: Path):
    write(tmp_path / "held.jsonl", [as_chat(n) for n in range(58, 64)])
    keys = [f"sft.eval_data={tmp_path}/held.jsonl", "run.eval_tasks=0"]
    [found] = leaks_of(load_config(recipe, keys))
    assert (found.name, found.tasks, found.leaked) == ("sft.eval_data", 6, 2)


def test_a_run_with_leaked_tasks_says_so_beside_every_score(recipe: str, tmp_path: Path):
    shown = io.StringIO()
    summary = train_recipe(recipe, quiet=False, stream=shown)
    count = num_test_rows(recipe)
    note = f"{count} of {count} held-out tasks are rows that this run trains on (sft.data)"
    assert summary["leakage"]["note"] == note
    assert summary["leakage"]["sets"]["prompts"]["rows_of"] == {"sft.data": count}
    assert note in shown.getvalue()
    record = find_run(str(tmp_path / "run"))
    assert record.leakage == note
    assert any(note in alarm["text"] for alarm in record.alarms)
    assert "(trained on)" in table([state_of(record, 0.0)], [""])[1]
    (record.path / "summary.json").unlink()  # a run that is not over
    assert find_run(str(tmp_path / "run")).leakage == note
    [newest] = Path(tmp_path, "run", "checkpoints").glob("rl-000001")
    assert read_origin(newest).leakage == note
    # a later run from these weights trains other rows, and still knows them
    later = load_config(recipe, [f"model.path={tmp_path}/run", "model.shape={}", "sft.steps=0"])
    [found] = leaks_of(later)
    assert list(found.rows_of) == ["sft.data of the run run"]


def test_a_run_without_leaked_tasks_says_nothing(recipe: str, tmp_path: Path):
    write(tmp_path / "chats.jsonl", [as_chat(n) for n in range(100, 140)])
    shown = io.StringIO()
    summary = train_recipe(recipe, quiet=False, stream=shown)
    assert summary["leakage"]["note"] == "" and "trains on" not in shown.getvalue()
    record = find_run(str(tmp_path / "run"))
    assert record.leakage == "" and record.alarms == []
    assert "(trained on)" not in table([state_of(record, 0.0)], [""])[1]


def test_the_doctor_warns_before_the_first_training(recipe: str, tmp_path: Path):
    with closing(Examination(load_config(recipe), tmp_path)) as examination:
        check = next(one for one in examination.lines() if one.name == "held out")
    count = num_test_rows(recipe)
    assert check.verdict == "warn" and f"{count} of {count} held-out tasks" in check.seen


def test_that_only_a_part_was_compared_is_said():
    sampled = ["100,000 of the 900,000 rows of sft.data"]
    check = held_out_check([Leakage("math", 40, 0, {}, sampled)])
    assert check is not None and check.verdict == "pass" and sampled[0] in check.seen
    check = held_out_check([Leakage("math", 40, 2, {"sft.data": 2}, sampled)])
    assert check is not None and check.verdict == "warn" and sampled[0] in check.seen

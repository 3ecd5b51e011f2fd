"""Warm-ups from beginning to end: they learn, evaluate held-out rows, stop, and resume exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graft.train.sft import sft_step
from tests.train.sft_kit import TINY, chat, recipe, write
from tests.training import metrics_of, train_recipe

LETTERS = "abcdefghij"
COPY = [chat(f"{a}{b}=", f"{b}{a}") for a in LETTERS for b in LETTERS]


def metrics(folder: Path) -> list[dict]:
    return metrics_of(folder / "run")


def test_held_out_rows_are_evaluated_while_it_learns(tmp_path):
    data = write(tmp_path / "rows.jsonl", COPY)
    sft = {"data": data, "epochs": 4, "batch": 20, "eval_share": 0.2, "eval_every": 5}
    summary = train_recipe(recipe(tmp_path, sft))
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 17))  # 80 rows, 4 times, 20 a step
    looks = {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}
    assert list(looks) == [5, 10, 15, 16]
    assert looks[16] < looks[5] < 6
    assert 0 <= lines[-1]["eval/accuracy"] <= 1 and lines[-1]["eval/num_tokens"] == 20 * 3
    assert lines[-1]["epoch"] == pytest.approx(4.0)
    assert summary["sft"]["rows"] == 80 and summary["sft"]["eval/loss"] == looks[16]


def test_it_stops_once_held_out_tokens_are_followed(tmp_path):
    data = write(tmp_path / "rows.jsonl", [chat("q", "aaaaaaaa")] * 10)
    sft = {"data": data, "steps": 400, "lr": 0.03, "eval_share": 0.2, "stop_at": 0.99}
    train_recipe(recipe(tmp_path, sft))
    lines = metrics(tmp_path)
    assert len(lines) < 400 and len(lines) % 25 == 0
    assert lines[-1]["accuracy"] == lines[-1]["eval/accuracy"] >= 0.99


def test_held_out_tasks_of_an_environment_are_evaluated_too(tmp_path):
    run = {"dir": str(tmp_path), "name": "run", "eval_tasks": 4, "trackers": []}
    config = recipe(
        tmp_path,
        {"steps": 4, "eval_every": 2},
        run=run,
        model={"shape": TINY},
        task={"env": "calculator", "eval_args": {"split": "test"}},
    )
    train_recipe(config)
    looks = [line for line in metrics(tmp_path) if "eval/sampled" in line]
    assert [line["step"] for line in looks] == [2, 4]


def test_actions_are_learned_from_calls_as_text_and_from_spans(tmp_path):
    """The same attempts as text, as spans and as demonstrations of the calculator."""
    text = chat("12+30=", "[12+30]42;42")
    spans = {
        "messages": text["messages"][:1],
        "spans": [
            {"author": "policy", "call": {"tool": "calculator", "arguments": list("12+30")}},
            {"author": "env", "text": "42"},
            {"author": "policy", "text": "42"},
        ],
    }
    losses = []
    for name, row in (("text", text), ("spans", spans)):
        folder = tmp_path / name
        folder.mkdir()
        config = recipe(
            folder,
            {"data": write(folder / "rows.jsonl", [row]), "epochs": 2},
            model={"shape": TINY},
            task={"env": "calculator", "args": {"syntax": "actions"}},
            actions={"file": "compact"},
        )
        train_recipe(config)
        (line,) = metrics(folder)
        assert line["num_trained_tokens"] == 2 * (1 + 5 + 1 + 2 + 1)  # [ 1 2 + 3 0 ] 4 2 eos
        losses.append(line["loss"])
    assert losses[0] == losses[1]


def test_a_warm_up_that_died_twice_ends_with_the_same_metrics(tmp_path, monkeypatch):
    """Without cleaning up, as after kill -9: what lies behind the last checkpoint is done again."""
    rows = [*COPY[:40], chat("q", "x" * 300), {"messages": 3}, *COPY[40:]]
    configs = {}
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
        run = {
            "dir": str(tmp_path / name),
            "name": "run",
            "save_every": 3,
            "trackers": [],
            "seed": 3,
        }
        sft = {"data": write(tmp_path / name / "rows.jsonl", rows), "epochs": 3, "batch": 24}
        more = {"skip_bad": True, "overlong": "skip", "eval_share": 0.1, "eval_every": 4}
        more["kl_coef"] = 0.1
        configs[name] = recipe(tmp_path, {**sft, **more}, run=run)
    train_recipe(configs["whole"])
    for last in (2, 6):
        left = last

        def dying(learner, episodes):
            nonlocal left
            if left == 0:
                raise MemoryError("killed")
            left -= 1
            return sft_step(learner, episodes)

        monkeypatch.setattr("graft.train.phases.warm_up.sft_step", dying)
        with pytest.raises(MemoryError):
            train_recipe(configs["broken"])
    monkeypatch.undo()
    train_recipe(configs["broken"])
    assert len(metrics(tmp_path / "whole")) == 12  # 90 rows three times, 24 a step
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")
    kl = [line["kl"] for line in metrics(tmp_path / "whole")]
    assert kl[0] == pytest.approx(0.0, abs=1e-6) and kl[-1] > 0.01  # to the model it started from
    found = json.loads((tmp_path / "broken" / "run" / "summary.json").read_text())["sft"]
    assert (found["rows"], found["held_out"], found["bad"], found["overlong"]) == (90, 10, 1, 1)

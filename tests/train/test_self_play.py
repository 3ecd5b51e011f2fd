"""Whole runs in which a policy plays every seat: log, resumption, replay, frozen opponents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graft.config import ConfigError
from graft.replay.replay import replay
from graft.types import Episode
from tests.replay.test_replay import assert_same
from tests.training import metrics_of as metrics
from tests.training import train_recipe

TINY = "{width: 32, layers: 1, heads: 2, kv_heads: 1, head_dim: 16, ff: 32, max_positions: 128}"


def train(folder: Path, name: str, *overrides: str) -> dict[str, Any]:
    settings = [
        f"run.dir={folder}", f"run.name={name}", "run.save_every=1", "run.keep_last=9",
        "run.eval_every=0", "run.eval_tasks=2", "run.trackers=[]", "run.log_episodes=1",
        f"model.shape={TINY}", "rollout.tasks=2", "rollout.samples=4",
        "train.steps=4", "train.warmup=0", "sft.steps=3", "sft.batch=4", "sft.stop_at=0",
    ]  # fmt: skip
    return train_recipe("selfplay/tictactoe-toy", *settings, *overrides)


def episodes_of(folder: Path) -> list[Episode]:
    files = sorted((folder / "episodes").glob("*.jsonl"))
    return [Episode.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_a_resumed_run_of_self_play_is_the_run_without_a_break_and_its_steps_replay(tmp_path: Path):
    train(tmp_path, "whole")
    train(tmp_path, "broken", "train.steps=2")
    train(tmp_path, "broken", "train.steps=4")
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")
    assert "seat/X/reward" in metrics(tmp_path / "whole")[-1]
    leaves = [leaf for episode in episodes_of(tmp_path / "whole") for leaf in episode.leaves]
    assert {leaf.seat for leaf in leaves} == {"X", "O"}
    assert_same(replay(tmp_path / "whole", 3))


@pytest.mark.slow
def test_the_policy_plays_against_the_weights_that_rl_started_from(tmp_path: Path):
    train(tmp_path, "run", "rollout.frozen={O: reference}", "train.steps=2")
    assert (tmp_path / "run" / "reference" / "config.json").exists()
    leaves = [leaf for episode in episodes_of(tmp_path / "run") for leaf in episode.leaves]
    assert {leaf.seat for leaf in leaves} == {"X"}
    # a resumed run plays against the same weights, and a checkpoint may be the opponent too
    train(tmp_path, "run", "rollout.frozen={O: reference}", "train.steps=3")
    train(tmp_path, "other", f"rollout.frozen={{O: {tmp_path / 'run'}}}", "train.steps=1")
    leaves = [leaf for episode in episodes_of(tmp_path / "other") for leaf in episode.leaves]
    assert {leaf.seat for leaf in leaves} == {"X"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.frozen={Z: reference}", "leave one for the policy"),
        ("rollout.branch=arpo", r"rollout\.branch=independent"),
        ("task.wrappers=[episode_tracking]", r"task\.wrappers"),
    ],
)
def test_what_self_play_cannot_do_is_refused(tmp_path: Path, override: str, message: str):
    with pytest.raises((ConfigError, ValueError, SystemExit), match=message):
        train(tmp_path, "run", override)


@pytest.mark.slow
def test_a_tiny_model_attempts_retail_with_its_tools(tmp_path: Path):
    recipe = {
        "run": {"dir": str(tmp_path), "name": "retail", "eval_tasks": 1, "trackers": []},
        "model": {
            "alphabet": "bytes",
            "chat_template": "chatml",
            "shape": json.loads(
                '{"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "ff": 16, '
                '"max_positions": 16384}'
            ),
        },
        "task": {"env": "tau:retail", "args": {"max_requests": 1}, "eval_args": {"split": "test"}},
        "rollout": {
            "tasks": 1,
            "samples": 2,
            "max_tokens": 8,
            "max_turns": 2,
            "max_context": 16000,
        },
        "train": {"steps": 1},
        "sft": {"steps": 1, "batch": 1},
    }
    summary = train_recipe(recipe)
    assert summary["after"]["sampled"] == 0.0

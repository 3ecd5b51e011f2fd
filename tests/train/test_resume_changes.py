"""What may change when a run is resumed: learning rate, steps, cadences; printed, recorded, replayed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from graft.config import load_config
from graft.models.io.load import ModelFileError
from graft.replay.comparison import PASS
from graft.replay.replay import replay
from graft.train.run_dir.folder import RunStopped, differences
from tests.training import metrics_of, train_recipe

SHAPE = "{width: 16, layers: 1, heads: 2, kv_heads: 1, head_dim: 8, ff: 16, max_positions: 96}"


def train(folder: Path, *overrides: str) -> str:
    """What the run prints; `by_text` of the tests of replays gives every attempt a reward."""
    settings = [
        f"run.dir={folder}", "run.name=run", "run.save_every=2", "run.keep_last=9", "run.seed=3",
        "run.eval_tasks=0", "run.trackers=[]", f"model.shape={SHAPE}",
        "task.reward=tests.replay.test_replay:by_text", "rollout.tasks=2", "rollout.samples=2",
        "rollout.max_tokens=8", "rollout.max_turns=2", "rollout.max_context=48",
        "train.lr=1e-3", "train.warmup=0", "sft.steps=0", "sft.stop_at=0",
    ]  # fmt: skip
    stream = io.StringIO()
    train_recipe("quickstart", *settings, *overrides, quiet=False, stream=stream)
    return stream.getvalue()


def rates(folder: Path, phase: str = "rl") -> list[float]:
    return [line["learning_rate"] for line in metrics_of(folder / "run", phase)]


def changes(folder: Path) -> list[dict]:
    lines = (folder / "run" / "changes.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


def test_learning_rate_and_steps_change_on_resume_and_replays_use_them(tmp_path):
    assert "->" not in train(tmp_path, "train.steps=3")
    printed = train(tmp_path, "train.steps=5", "train.lr=2e-4", "train.schedule=linear")
    assert rates(tmp_path) == pytest.approx([1e-3, 1e-3, 1e-3, 2e-4 * 2 / 5, 2e-4 * 1 / 5])
    assert "train.lr: 0.001 -> 0.0002 from rl step 4 on" in printed
    assert "train.steps: 3 -> 5 from rl step 4 on" in printed
    changed = {
        "train.steps": [3, 5],
        "train.lr": [1e-3, 2e-4],
        "train.schedule": ["constant", "linear"],
    }
    assert changes(tmp_path) == [{"phase": "rl", "step": 3, "changed": changed}]

    for step in (3, 5):  # from rl-000002: step 3 has the old rate, 4 and 5 the new one
        found = replay(tmp_path / "run", step, start=2)
        assert {finding.verdict for finding in found.findings} == {PASS}


def test_the_same_command_again_changes_nothing_and_prints_no_note(tmp_path):
    train(tmp_path, "train.steps=2", "run.save_every=1")
    (tmp_path / "run" / "summary.json").unlink()  # as if it had been killed before its end
    printed = train(tmp_path, "train.steps=2", "run.save_every=1")
    assert "resuming" in printed and "->" not in printed
    assert not (tmp_path / "run" / "changes.jsonl").exists()


def test_a_finished_run_keeps_a_changed_rate_for_later_and_prints_it(tmp_path):
    train(tmp_path, "train.steps=1")
    printed = train(tmp_path, "train.steps=1", "train.lr=2e-4")
    assert "train.lr: 0.001 -> 0.0002 from rl step 2 on" in printed and "is done" in printed
    assert changes(tmp_path)[0]["changed"] == {"train.lr": [1e-3, 2e-4]}


def test_cadences_change_on_resume(tmp_path):
    train(tmp_path, "train.steps=1")
    printed = train(tmp_path, "train.steps=2", "run.save_every=1", "run.log_episodes=0")
    assert "run.log_episodes: 1 -> 0 from rl step 2 on" in printed


@pytest.mark.parametrize(
    ("override", "seen"),
    [
        ("run.seed=4", "run.seed: 3 -> 4"),
        ("rollout.samples=3", "rollout.samples: 2 -> 3"),
        ("algo.name=rloo", "algo.name: 'grpo' -> 'rloo'"),
        ("train.betas=[0.9,0.99]", "train.betas"),
        ("sft.lr=0.1", "sft.lr: 0.003 -> 0.1, and the warm-up is over"),
    ],
)
def test_what_makes_it_another_run_is_refused_with_the_way_out(tmp_path, override, seen):
    train(tmp_path, "train.steps=1")
    with pytest.raises(RunStopped) as stopped:
        train(tmp_path, "train.steps=2", override)
    assert seen in str(stopped.value)
    assert f"another run.name, with model.path={tmp_path / 'run'}" in str(stopped.value)


def test_a_warm_up_goes_on_with_more_steps_and_another_rate(tmp_path):
    warm_up = ("train.steps=0", "sft.batch=2", "sft.warmup=0")
    train(tmp_path, *warm_up, "sft.steps=2", "sft.lr=1e-3")
    printed = train(tmp_path, *warm_up, "sft.steps=4", "sft.lr=2e-3")
    assert "sft.steps: 2 -> 4 from sft step 3 on" in printed
    assert len(rates(tmp_path, "sft")) == 4
    assert rates(tmp_path, "sft")[2] == pytest.approx(2e-3 * (0.1 + 0.9 * 0.5))


def test_a_key_that_an_older_version_did_not_have_had_its_default():
    config = load_config("quickstart")
    old = config.model_dump(mode="json")
    del old["rollout"]["staleness"], old["cluster"]
    assert differences(old, config) == {}
    assert differences(old, load_config("quickstart", ["rollout.staleness=1"])) == {
        "rollout.staleness": (0, 1)
    }


def test_a_folder_that_was_renamed_is_still_the_same_run(tmp_path):
    train(tmp_path, "train.steps=2")
    (tmp_path / "run").rename(tmp_path / "better")
    printed = train(tmp_path, "run.name=better", "train.steps=3")
    assert "after rl step 2" in printed and "->" not in printed.replace("train.steps: 2 -> 3", "")


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_damaged_state_names_the_checkpoint_to_move_away(tmp_path, text):
    train(tmp_path, "train.steps=3")
    newest = max((tmp_path / "run" / "checkpoints").glob("rl-*"))
    (newest / "state.json").write_text(text)
    with pytest.raises(RunStopped, match=r"state.json' is damaged: .* Move the folder"):
        train(tmp_path, "train.steps=4")
    newest.rename(tmp_path / "away")
    assert "resuming" in train(tmp_path, "train.steps=4")


def test_damaged_weights_name_the_checkpoint_to_move_away(tmp_path):
    train(tmp_path, "train.steps=2", "run.save_every=1")
    newest = tmp_path / "run" / "checkpoints" / "rl-000002"
    with (newest / "model.safetensors").open("r+b") as weights:
        weights.truncate(100)
    with pytest.raises(ModelFileError, match=r"rl-000002 away: .* resumes after rl-000001$"):
        train(tmp_path, "train.steps=3")
    newest.rename(tmp_path / "away")
    assert "after rl step 1" in train(tmp_path, "train.steps=3")


def test_damaged_settings_of_a_run_are_named(tmp_path):
    train(tmp_path, "train.steps=2")
    (tmp_path / "run" / "config.yaml").write_text("train: [1")
    with pytest.raises(RunStopped, match=r"config.yaml is damaged: line .* remove it"):
        train(tmp_path, "train.steps=3")
    (tmp_path / "run" / "config.yaml").unlink()
    assert "resuming" in train(tmp_path, "train.steps=3")

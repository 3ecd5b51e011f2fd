"""A recorded step comes out the same again, and whatever was changed since is found where it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file

from graft.commands.errors import complain
from graft.commands.replay import replay as command
from graft.commands.replay import table
from graft.config import ConfigError
from graft.replay.comparison import DIFFERS, PASS, UNKNOWN
from graft.replay.recorded_step import CannotReplay
from graft.replay.replay import replay
from graft.replay.result import Replay
from tests.training import train_recipe

TINY = "{width: 16, layers: 1, heads: 2, kv_heads: 1, head_dim: 8, ff: 16, max_positions: 96}"
STEPS = 6


def by_text(task: Any, trajectory: Any) -> float:
    """What random weights can earn: 0, 1 or 2, by the text they sampled."""
    return float(sum(map(ord, trajectory.text)) % 3)


def train(folder: Path, name: str, *overrides: str, model: str = "") -> Path:
    settings = [
        f"run.dir={folder}", f"run.name={name}", "run.save_every=2", "run.keep_last=9",
        "run.eval_tasks=0", "run.trackers=[]", "run.seed=3",
        *([f"model.path={model}", "model.shape={}"] if model else [f"model.shape={TINY}"]),
        "task.reward=tests.replay.test_replay:by_text",
        "rollout.tasks=4", "rollout.samples=3", "rollout.max_tokens=8", "rollout.max_turns=2",
        "rollout.max_context=48",
        f"train.steps={STEPS}", "train.lr=3e-3", "train.warmup=2", "sft.steps=0", "sft.stop_at=0",
    ]  # fmt: skip
    train_recipe("quickstart", *settings, *overrides)
    return folder / name


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replay")


@pytest.fixture(scope="session")
def grpo(runs: Path) -> Path:
    return train(runs, "grpo")


@pytest.fixture(scope="session")
def held(runs: Path) -> Path:
    """With a reference, a critic, and four optimizer steps on a batch."""
    more = ["algo.name=ppo", "algo.kl_coef=0.02", "train.epochs=2", "train.minibatches=2"]
    return train(runs, "held", *more)


@pytest.fixture
def copy(grpo: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(grpo, tmp_path / "run"))


def verdicts(found: Replay) -> dict[str, str]:
    return {finding.what: finding.verdict for finding in found.findings}


def texts(found: Replay, verdict: str = DIFFERS) -> dict[str, str]:
    return {f.what: f.text for f in found.findings if f.verdict == verdict}


def assert_same(found: Replay) -> None:
    assert found.inexact == "" and found.tolerance == 0.0
    assert found.findings and set(verdicts(found).values()) == {PASS}, table(found)
    assert found.first is None


# the same again


@pytest.mark.parametrize("start", [None, 4, 2, 0])
def test_a_step_is_the_same_bit_for_bit_from_any_checkpoint_before_it(grpo, start):
    found = replay(grpo, 5, start=start)
    assert_same(found)
    assert found.checkpoint == f"rl-{4 if start is None else start:06d}"
    wanted = {"attempts", "advantages", "log-probs", "loss", "grad_norm", "weights after"}
    assert wanted <= set(verdicts(found))
    assert found.metrics["grad_norm"] > 0.01  # there was something to compare
    assert found.metrics["grad_norm"] == found.recorded["grad_norm"]


def test_a_replay_leaves_the_folder_and_the_random_states_alone(grpo):
    def listed() -> dict[str, tuple[int, int]]:
        stats = {path: path.stat() for path in grpo.rglob("*")}
        return {str(path): (stat.st_mtime_ns, stat.st_size) for path, stat in stats.items()}

    before, state = listed(), torch.get_rng_state()
    replay(grpo, 3)
    assert listed() == before
    assert torch.equal(torch.get_rng_state(), state)


CASES = {
    "stale": ["rollout.staleness=1"],
    "actions": ["algo.name=cpo", "task.args={syntax: actions}", "actions.file=compact"],
    "forks": ["algo.name=arpo"],
}


def test_critic_reference_and_minibatches_come_back_from_the_checkpoint(held):
    assert_same(replay(held, 5, start=2))


@pytest.mark.parametrize("case", CASES)
def test_other_runs_come_out_the_same_too(runs, case):
    assert_same(replay(train(runs, case, *CASES[case]), 5, start=2))


def test_adapters_and_their_reference_come_back_from_the_checkpoint(runs, grpo):
    run = train(runs, "lora", "lora.rank=2", "algo.kl_coef=0.02", model=str(grpo))
    found = replay(run, 5, start=2, overrides=["train.max_grad_norm=1.0"])
    assert_same(found)
    assert found.other is not None and found.other.metrics["loss"] == found.metrics["loss"]


# what was changed is found


def change_reward(run: Path, step: int, line: int, leaf: int) -> str:
    """Of one attempt, as if it had been graded otherwise; the task's name."""
    path = run / "episodes" / f"step_{step:06d}.jsonl"
    lines = path.read_text().splitlines()
    episode = json.loads(lines[line])
    episode["leaves"][leaf]["reward"] += 1.5
    lines[line] = json.dumps(episode)
    path.write_text("\n".join(lines) + "\n")
    return episode["task"]["id"]


def test_a_changed_reward_is_found_at_its_task(copy):
    task = change_reward(copy, step=5, line=2, leaf=1)
    found = replay(copy, 5)
    assert found.first is not None and found.first.what == "attempts"
    assert "reward" in found.first.text
    assert f"first at task {task}, leaf " in texts(found)["advantages"]
    assert "3 of 12 rows differ" in texts(found)["advantages"]  # its group, and no other
    # what the model thinks of the tokens has nothing to do with it
    seen = verdicts(found)
    assert [seen[n] for n in ("checkpoint rl-000004", "log-probs")] == [PASS, PASS]
    assert {"loss", "grad_norm", "weights after"} <= set(texts(found))


def test_a_change_in_a_step_on_the_way_is_blamed_on_that_step(copy):
    task = change_reward(copy, step=4, line=0, leaf=0)
    found = replay(copy, 5, start=2)
    assert found.first is not None and found.first.step == 4
    differing = [f for f in found.findings if f.verdict == DIFFERS]
    assert any(f.step == 4 and f.what == "advantages" and task in f.text for f in differing)
    assert verdicts(found)["weights before"] == DIFFERS
    assert not [f for f in differing if f.step == 3]


def test_a_changed_weight_is_found_by_its_fingerprint_and_named(copy):
    file = copy / "checkpoints" / "rl-000004" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name][0, 0] = torch.nextafter(tensors[name][0, 0], torch.tensor(9.0))  # the last bit
    save_file(tensors, file, {"format": "pt"})
    found = replay(copy, 5)
    assert found.first is not None and found.first.what == "checkpoint rl-000004"
    assert f"tensors differ, first policy/{name}" in found.first.text
    assert ": 1 of " in found.first.text


def test_a_changed_log_prob_of_the_record_is_found_at_its_token(copy):
    import numpy as np

    path = copy / "learned" / "step_000005.npz"
    with np.load(path) as stored:
        arrays = dict(stored)
    length = int(arrays["lengths"][0])
    token = int(np.flatnonzero(~np.isnan(arrays["logprobs"][length:]))[1])  # of the second row
    arrays["logprobs"][length + token] -= 1e-3
    np.savez_compressed(path, **arrays)
    found = replay(copy, 5)
    assert list(texts(found)) == ["log-probs"]
    assert "1 of 12 rows differ" in texts(found)["log-probs"]
    assert f"leaf 1, token {token}: " in texts(found)["log-probs"]


def test_a_run_without_a_record_of_its_weights_is_compared_by_numbers(copy):
    for path in copy.glob("learned/step_*.json"):
        path.unlink()
    found = replay(copy, 5)
    assert found.tolerance == 1e-4 and "machine" in found.inexact
    assert verdicts(found)["weights after"] == UNKNOWN
    assert verdicts(found)["grad_norm"] == PASS and found.first is None
    change_reward(copy, step=5, line=2, leaf=1)
    assert "advantages" in texts(replay(copy, 5))


def test_a_run_of_several_processes_is_compared_by_numbers(copy):
    path = copy / "learned" / "step_000005.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"world": 2}))
    found = replay(copy, 5)
    assert found.inexact == "2 processes trained, and this is one" and found.first is None
    assert found.tolerance == 1e-4


# other settings


def test_the_kl_term_can_be_removed_and_doubled(held):
    def loss(*overrides: str) -> float:
        found = replay(held, 5, overrides=["train.epochs=1", "train.minibatches=1", *overrides])
        assert_same(found)  # the recorded settings first, as always
        assert found.other is not None
        return found.other.metrics["loss"]

    without, once, twice = loss("algo.kl_coef=0"), loss(), loss("algo.kl_coef=0.04")
    assert once - without == pytest.approx((twice - without) / 2, rel=1e-3)
    assert once - without > 1e-6


def test_settings_that_change_nothing_give_the_recorded_numbers(held):
    found = replay(held, 5, overrides=["train.minibatches=2", "train.lr=1e-5"])
    assert found.other is not None
    assert found.other.cosine == pytest.approx(1.0)
    assert found.other.metrics["learning_rate"] == pytest.approx(1e-5)
    found = replay(held, 5, overrides=["train.minibatches=2"])
    assert found.other is not None
    assert found.other.metrics["loss"] == found.metrics["loss"]
    assert found.other.metrics["critic/grad_norm"] == found.metrics["critic/grad_norm"]


def test_smaller_micro_batches_change_no_gradient(grpo):
    found = replay(grpo, 5, overrides=["train.tokens_per_micro=16"])
    assert found.other is not None
    assert found.other.metrics["grad_norm"] == pytest.approx(found.metrics["grad_norm"], rel=1e-5)
    assert found.other.cosine == pytest.approx(1.0, abs=1e-6)


def test_another_loss_gives_other_numbers_and_no_failure(grpo):
    found = replay(grpo, 5, overrides=["algo.credit=[reinforce]"])
    assert found.first is None and found.other is not None
    assert found.other.metrics["advantages/std"] != found.recorded["advantages/std"]
    assert found.other.cosine < 0.999


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("rollout.samples=9", "algo.* and train.*"),
        ("algo.kl_coef=0.1", "did not keep"),
        ("algo.name=ppo", "has trained none"),
        ("algo.los=clip", "did you mean 'algo.loss'"),
    ],
)
def test_what_a_record_cannot_answer_is_refused(grpo, override, why):
    with pytest.raises(ConfigError, match=why.replace("*", r"\*").replace(".", r"\.")):
        replay(grpo, 5, overrides=[override])


# the command


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command()(command)
    try:
        code = app(list(arguments), standalone_mode=False) or 0
    except Exception as error:
        code = complain(error)
    out, errors = capsys.readouterr()
    return code, out, errors


def test_the_command_ends_with_0_and_a_table(grpo, capsys):
    code, out, _ = call(capsys, str(grpo), "--step", "5")
    assert code == 0
    assert out.splitlines()[0].endswith("from rl-000004; compared to the last bit")
    assert out.splitlines()[-1] == "the same"


def test_the_command_ends_with_1_and_names_the_place_in_json(copy, capsys):
    task = change_reward(copy, step=5, line=2, leaf=1)
    code, out, _ = call(capsys, str(copy), "--step", "5", "--json")
    report = json.loads(out.splitlines()[-1])
    assert code == 1 and report["same"] is False and report["first"]["what"] == "attempts"
    assert [f for f in report["findings"] if f["what"] == "advantages" and task in f["text"]]


def test_the_command_shows_the_changed_settings_beside_the_record(grpo, capsys):
    code, out, _ = call(capsys, str(grpo), "--step", "5", "train.max_grad_norm=0")
    assert code == 0
    grad = next(line for line in out.splitlines() if line.startswith("grad_norm"))
    assert (
        len(grad.split()) == 3 and grad.split()[1] == grad.split()[2]
    )  # it is that before clipping
    code, out, _ = call(capsys, str(grpo), "--step", "5", "algo.credit=[reinforce]", "--json")
    changed = json.loads(out.splitlines()[-1])["asked"]
    assert code == 0 and changed["overrides"] == ["algo.credit=[reinforce]"]
    assert set(changed["metrics"]["loss"]) == {"recorded", "now"}


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["--step", "7"], 2, "has no RL step 7; it has steps 1 to 6"),
        ([], 2, "give the step"),
        (["--step", "5", "--from", "3"], 2, "no checkpoint rl-000003; there are: rl-000000"),
        (["--step", "4", "--from", "4"], 2, "--from 4 is not before step 4"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(grpo, capsys, arguments, code, why):
    got, _, errors = call(capsys, str(grpo), *arguments)
    assert got == code
    assert why in errors and len(errors.splitlines()) == 1, errors


def test_a_folder_that_is_no_run_is_one_line_and_code_2(tmp_path, capsys):
    code, _, errors = call(capsys, str(tmp_path), "--step", "5")
    assert code == 2 and "is no run" in errors and len(errors.splitlines()) == 1


def test_a_checkpoint_that_is_gone_is_named_with_the_keys_that_keep_it(copy, capsys):
    for step in (0, 2, 4):
        shutil.rmtree(copy / "checkpoints" / f"rl-{step:06d}")
    code, _, errors = call(capsys, str(copy), "--step", "5")
    assert code == 1 and len(errors.splitlines()) == 1
    for part in ("run.save_every=2", "run.keep_last=9", "there are: rl-000006", "steps from 7 on"):
        assert part in errors


@pytest.mark.parametrize("gone", [3, 5])
def test_episodes_that_are_gone_are_named(copy, capsys, gone):
    (copy / "episodes" / f"step_{gone:06d}.jsonl").unlink()
    code, _, errors = call(capsys, str(copy), "--step", "5", "--from", "2")
    assert code == 1 and len(errors.splitlines()) == 1
    assert f"the episodes of step {gone} are missing" in errors and "run.log_episodes=1" in errors


def test_a_line_that_is_no_episode_is_named(copy):
    path = copy / "episodes" / "step_000005.jsonl"
    path.write_text(path.read_text() + '{"task": 3}\n')
    with pytest.raises(CannotReplay, match="line 5 is not an episode"):
        replay(copy, 5)

"""Kill the process at any moment, run the same command again: the same metrics as without."""

import json
import random
import signal
import time
from pathlib import Path

import pytest

from tests.command_line import Command, graft, start
from tests.training import metrics_of as metrics

RECIPE = """
run: {{dir: "{folder}", name: run, save_every: 2, eval_tasks: 4, trackers: [], seed: 3}}
model:
  shape: {{width: 32, layers: 1, heads: 2, kv_heads: 1, head_dim: 16, ff: 32, max_positions: 96}}
task: {{env: calculator, args: {{{args}}}, eval_args: {{split: test}}}}
actions: {{{actions}}}
rollout: {{tasks: 2, samples: 4, max_tokens: 6, max_turns: 3, max_context: 64}}
algo: {{name: {algo}, kl_coef: 0.01}}
train: {{steps: 11, lr: 1.0e-3, warmup: 2, epochs: {epochs}}}
sft: {{steps: 5, batch: 8, lr: 3.0e-3, warmup: 2}}
"""
STEPS = 16


def run(recipe: Path, *overrides: str) -> None:
    done = graft("train", str(recipe), *overrides)
    assert done.returncode == 0, done.stderr


def scores(folder: Path) -> dict:
    summary = json.loads((folder / "summary.json").read_text())
    return {"before": summary["before"], "after": summary["after"]}


def recipe_in(folder: Path, algo: str = "grpo", epochs: int = 1) -> Path:
    folder.mkdir()
    path = folder / "recipe.yaml"
    has_actions = algo == "cpo"  # its branch learns from step to step, its head has further rows
    path.write_text(
        RECIPE.format(
            folder=folder,
            algo=algo,
            epochs=epochs,
            args="syntax: actions" if has_actions else "",
            actions="file: compact" if has_actions else "",
        )
    )
    return path


def wait_for_lines(process: Command, log: Path, count: int) -> None:
    """Wait until the run has logged `count` steps, or has ended."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if log.exists() and log.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.01)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("algo", "epochs", "kills"),
    [
        ("grpo", 1, 5),
        pytest.param("ppo", 2, 2, marks=pytest.mark.slow),
        pytest.param("cpo", 1, 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_at_random_moments_ends_with_the_same_metrics(tmp_path, algo, epochs, kills):
    whole = recipe_in(tmp_path / "whole", algo, epochs)
    run(whole)

    broken = recipe_in(tmp_path / "broken", algo, epochs)
    log = tmp_path / "broken" / "run" / "metrics.jsonl"
    rng = random.Random(7)
    was_cut = 0
    for steps in sorted(rng.sample(range(STEPS - 4), kills)):  # some in the warm-up, most in RL
        process = start("train", str(broken))
        wait_for_lines(process, log, steps)
        time.sleep(rng.uniform(0.0, 0.1))  # a step, its log and its checkpoint take about as long
        was_cut += process.poll() is None
        process.kill()
        process.wait()
    assert was_cut == kills
    run(broken)

    assert len(metrics(tmp_path / "whole" / "run")) == STEPS
    assert metrics(tmp_path / "broken" / "run") == metrics(tmp_path / "whole" / "run")
    assert scores(tmp_path / "broken" / "run") == scores(tmp_path / "whole" / "run")
    assert not list((tmp_path / "broken" / "run" / "checkpoints").glob(".*"))


@pytest.mark.timeout(200)
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path):
    recipe = recipe_in(tmp_path / "run_a")
    folder = tmp_path / "run_a" / "run"
    process = start("train", str(recipe), "train.steps=100000", "run.save_every=0")
    log = folder / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if log.exists() and '"phase": "rl", "step": 2,' in log.read_text():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    done = process.wait(60)
    assert done.returncode == 130, done.stderr
    last = metrics(folder)[-1]["step"]
    saved = sorted(path.name for path in folder.glob("checkpoints/rl-*"))
    assert saved[-1] == f"rl-{last:06d}"
    run(recipe, f"train.steps={last + 1}", "run.save_every=0")
    steps = [line["step"] for line in metrics(folder) if line["phase"] == "rl"]
    assert steps == list(range(1, last + 2))

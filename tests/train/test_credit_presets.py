"""Short runs with each preset of a published credit: they train, and continue where they were stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from graft.models.tree.forest import Forest
from graft.models.truncation import Truncation
from graft.replay.replay import replay
from graft.rollout.batching import to_batch, trajectories_of
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.train.collisions import collisions
from tests.replay.test_replay import assert_same
from tests.rollout.test_episode_builder import TASKS, Echo, make_setup
from tests.training import metrics_of as metrics
from tests.training import train_recipe

TINY = "{width: 32, layers: 1, heads: 2, kv_heads: 1, head_dim: 16, ff: 32, max_positions: 128}"
GAME = [
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg", "maxrl"),
    *("pass_at_k", "grpo_passk", "gdpo", "gigpo", "treerpo", "optimal_token_baseline"),
]
"""On guess the number, a game of several turns whose states are known."""


def right(task: Any, trajectory: Any) -> float:
    return float(len(trajectory.tokens) % 4 == 0)  # some attempts of an untrained policy, not many


def brief(task: Any, trajectory: Any) -> float:
    return 1.0 / len(trajectory.tokens)


def train(folder: Path, recipe: str, name: str, *overrides: str) -> list[dict[str, Any]]:
    settings = [
        f"run.dir={folder}", f"run.name={name}", "run.save_every=1", "run.keep_last=9",
        "run.eval_every=0", "run.eval_tasks=2", "run.trackers=[]", "run.log_episodes=1",
        f"model.shape={TINY}", "rollout.tasks=3", "rollout.samples=6", "algo.credit=[]",
        "train.steps=2", "train.warmup=0", "sft.steps=3", "sft.batch=4", "sft.stop_at=0",
    ]  # fmt: skip
    train_recipe(recipe, *settings, *overrides)
    return [line for line in metrics(folder / name) if line.get("phase", "rl") == "rl"]


@pytest.mark.slow
@pytest.mark.parametrize("name", GAME)
def test_a_run_with_each_preset(tmp_path: Path, name: str):
    own = "tests.train.test_credit_presets"
    rewards = f"[{{{own}:right: {{}}}}, {{{own}:brief: {{}}, weight: 0.5}}]"
    overrides = [f"task.reward={rewards}", f"algo.name={name}"]
    steps = train(tmp_path, "gem/guess-the-number-toy", "run", *overrides)
    assert any(line["advantages/std"] > 0 and line["grad_norm"] > 0 for line in steps)
    assert {"reward/right", "reward/brief"} <= steps[-1].keys()
    assert_same(replay(tmp_path / "run", 2))


@pytest.mark.slow
def test_role_baselines_survive_a_stop(tmp_path: Path):
    recipe, algo = "selfplay/tictactoe-toy", "algo.name=spiral"
    train(tmp_path, recipe, "whole", algo, "train.steps=3")
    for steps in (2, 3):
        train(tmp_path, recipe, "broken", algo, f"train.steps={steps}")
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")
    saved = (tmp_path / "whole" / "checkpoints").glob("rl-000003/*.json")
    states = [json.loads(path.read_text()) for path in saved]
    found = [state["credits"] for state in states if isinstance(state, dict) and "credits" in state]
    assert found and len(found[0][0]["baselines"]) == 2  # X and O
    assert_same(replay(tmp_path / "whole", 3))


def test_sums_of_p2_are_those_over_every_token():
    setup = make_setup(Echo)
    rows = trajectories_of(collect(TASKS[:2], setup, independent(2)))
    batch, decoder = to_batch(rows), setup.engine.decoder
    forest = Forest(rows, batch.mask, torch.device("cpu"))

    class Alone:
        scoring = (decoder, 0.7, None, None)

        def over_micros(self, batch: Any, compute: Any) -> torch.Tensor:
            return compute(forest)

    with torch.no_grad():
        got = collisions(Alone(), batch, None)
        logp = forest.logprobs(decoder, 0.7)[0]
        known = collisions(Alone(), batch, logp)
        want = torch.zeros_like(got)
        for token in range(decoder.shape.vocab_size):
            forest.actions.fill_(token)
            want += (2 * forest.logprobs(decoder, 0.7)[0]).exp() * batch.mask
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert torch.equal(known, got) and 0.05 < float(got[batch.mask].min()) < 1
    Alone.scoring = (decoder, 0.7, None, Truncation(top_p=0.9))  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"rollout\.top_p=1"):
        collisions(Alone(), batch, None)

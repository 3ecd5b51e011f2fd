"""PPO with a critic of turns learns a small game whose turns are rewarded."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, median

import pytest

from graft.envs.base import BaseEnv
from graft.types import Turn
from tests.training import metrics_of, train_recipe

SIZES = {"width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "ff": 64}


class SayB(BaseEnv):
    """Three turns; each shows a letter and earns 1 for an answer that begins with "b"."""

    alphabet = "abcd "
    max_turns = 3

    def pose(self) -> str:
        return self.rng.choice("acd")

    def respond(self, action: str) -> Turn:
        return Turn(self.rng.choice("acd"), reward=float(action.startswith("b")))


@pytest.mark.slow
def test_a_toy_run_learns(tmp_path: Path) -> None:
    """From nearly 0 to nearly 3; the critic follows: its returns are 1 + 0.9 + 0.81, 1.9 and 1."""
    train_recipe(
        {
            "run": {"dir": str(tmp_path), "name": "run", "eval_tasks": 0, "trackers": []},
            "model": {"shape": SIZES},
            "task": {"env": "tests.train.test_turn_critic:SayB"},
            "rollout": {"tasks": 16, "samples": 4, "max_tokens": 4, "max_turns": 3},
            "algo": {
                "name": "ppo_turn",
                "credit": [{"gae": {"per": "turn", "gamma": 0.9, "lam": 1.0}}, "rebn"],
                "critic_lr": 1e-2,
            },
            "train": {"steps": 40, "lr": 5e-3, "epochs": 2},
        }
    )
    steps = metrics_of(tmp_path / "run")
    rewards, errors = ([step[key] for step in steps] for key in ("reward", "loss/value"))
    assert fmean(rewards[:3]) < 1.5 and fmean(rewards[-5:]) > 2.5
    assert median(errors[-5:]) < 0.5 * max(errors)  # one late batch may surprise the critic

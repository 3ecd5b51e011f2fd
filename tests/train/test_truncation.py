"""Training under top-k, top-p and min-p: the learner's log-probs are those of what was drawn from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graft.config import Config, ConfigError, check
from graft.models.truncation import Truncation
from graft.train.rollouts.truncation import refuse_truncation, truncation_of
from graft.train.step_totals import SAMPLING_GAP
from tests.training import metrics_of, train_recipe

SIZES = {"width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "ff": 32}


def recipe(folder: Path, **rollout: Any) -> Config:
    sizes = {"tasks": 2, "samples": 4, "max_tokens": 8, "max_turns": 2, "max_context": 64}
    return check(
        {
            "run": {"dir": str(folder), "name": "run", "eval_tasks": 0, "trackers": []},
            "model": {"shape": SIZES},
            "task": {"env": "calculator", "reward": "tests.train.test_truncation:num_tokens"},
            "rollout": {**sizes, "temperature": 1.2, **rollout},
            "algo": {"name": "grpo", "kl_coef": 0.1},
            "train": {"steps": 2, "lr": 1e-2},
        }
    )


def num_tokens(task: Any, row: Any) -> float:
    return float(len(row.tokens))


def test_engine_and_learner_agree_in_a_run(tmp_path: Path) -> None:
    """In the second step with other weights than in the first."""
    train_recipe(recipe(tmp_path, top_p=0.6, top_k=20))
    first, second = metrics_of(tmp_path / "run")
    assert first[f"{SAMPLING_GAP}/max"] < 1e-5 and second[f"{SAMPLING_GAP}/max"] < 1e-5
    assert second["kl"] > first["kl"] > 0  # of a truncated distribution to a whole one


def test_a_recipe_without_truncation_has_none(tmp_path: Path) -> None:
    assert truncation_of(recipe(tmp_path)) is None
    assert truncation_of(recipe(tmp_path, min_p=0.1)) == Truncation(min_p=0.1)


@pytest.mark.parametrize(
    "engine, branch, rollout, why",
    [
        ("native", "counterfactual", {"top_p": 0.9}, r"rollout.top_p=0.9: the branch"),
        ("sglang", "independent", {"top_k": 5}, r"rollout.top_k=5: SGLang reports"),
        ("vllm", "independent", {"top_p": 0.9, "min_p": 0.1}, "vLLM applies min_p first"),
    ],
)
def test_what_has_no_log_prob_is_refused(
    tmp_path: Path, engine: str, branch: str, rollout: dict[str, Any], why: str
) -> None:
    config = recipe(tmp_path, **rollout)
    with pytest.raises(ConfigError, match=why):
        refuse_truncation(config.changed({"engine.name": engine}), branch)
    refuse_truncation(recipe(tmp_path, top_p=0.9).changed({"engine.name": "vllm"}), "arpo")

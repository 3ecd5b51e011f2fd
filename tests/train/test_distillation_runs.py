"""Whole runs with a teacher: what is learned, what a resumption repeats, what a replay recomputes."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from graft.config import ConfigError, load_config
from graft.engine.errors import EngineError
from graft.models.io.gguf_read import open_tokenizer
from graft.models.io.load import ModelFileError, load_model
from graft.models.io.save import save_model
from graft.replay.replay import replay
from graft.rollout.outcomes import is_unsampled
from graft.types import Episode
from tests.train.test_teachers import vllm_like
from tests.training import metrics_of as metrics
from tests.training import train_recipe
from tests.web_server import Reply, Seen

pytestmark = pytest.mark.slow
SHAPE = {"layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "max_positions": 96}


def recipe_in(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder), "name": name, "save_every": 2, "eval_tasks": 0, "trackers": []},
        "model": {"shape": {**SHAPE, "width": 32, "ff": 32}},
        "task": {"env": "calculator"},
        "rollout": {"tasks": 4, "samples": 2, "max_tokens": 6, "max_turns": 2, "max_context": 64},
        "train": {"steps": 4, "lr": 3e-3},
        **sections,
    }


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another shape than the student's, after a short warm-up."""
    folder = tmp_path_factory.mktemp("teacher")
    model = {"shape": {**SHAPE, "width": 48, "ff": 64}}
    sft = {"steps": 20, "batch": 32, "lr": 3e-3, "warmup": 5}
    train_recipe(recipe_in(folder, "big", model=model, sft=sft, train={"steps": 0}))
    return folder / "big"


@pytest.mark.parametrize("name, seen", [("opd", "distill/kl"), ("gkd", "distill/divergence")])
def test_the_student_comes_closer_and_a_resumed_run_is_the_same(tmp_path, teacher, name, seen):
    own = {"algo": {"name": name}, "distill": {"teacher": str(teacher)}}
    recipe = recipe_in(tmp_path, "whole", **own)
    train_recipe(recipe, "train.steps=20")
    distances = [line[seen] for line in metrics(tmp_path / "whole")]
    assert sum(distances[-5:]) < 0.8 * sum(distances[:5])
    train_recipe(recipe, "run.name=parts", "train.steps=3")
    train_recipe(recipe, "run.name=parts", "train.steps=4")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")[:4]
    found = replay(tmp_path / "parts", 4)
    assert all(finding.verdict == "PASS" for finding in found.findings), found.findings


def test_a_resumed_run_keeps_the_checkpoint_of_a_teacher_that_trains_on(tmp_path, teacher):
    big = tmp_path / "big"
    shutil.copytree(teacher, big)
    own = {"algo": {"name": "opd"}, "distill": {"teacher": str(big)}}
    recipe = recipe_in(tmp_path, "whole", **own)
    train_recipe(recipe)
    train_recipe(recipe, "run.name=parts", "train.steps=2")
    newest = max((big / "checkpoints").iterdir())
    shutil.copytree(newest, big / "checkpoints" / "sft-000999")
    save_model(load_model(newest).initialise(9), big / "checkpoints" / "sft-000999")
    train_recipe(recipe, "run.name=parts")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def test_rows_of_data_are_mixed_in_and_replayed(tmp_path, teacher):
    row = {
        "messages": [{"role": "user", "content": "2+3="}],
        "spans": [{"author": "policy", "text": "[2+3]"}, {"author": "env", "text": "5;"},
                  {"author": "policy", "text": "5"}],
    }  # fmt: skip
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(3)))
    distill = {"teacher": str(teacher), "data": str(data), "on_policy": 0.5}
    train_recipe(recipe_in(tmp_path, "mixed", algo={"name": "gkd"}, distill=distill))
    last = metrics(tmp_path / "mixed")[-1]
    assert last["sampling/sampling_logp_difference/max"] < 1e-4  # rows have the learner's own
    assert last["staleness/max"] == 0
    lines = (tmp_path / "mixed" / "episodes" / "step_000004.jsonl").read_text().splitlines()
    episodes = [Episode.loads(line) for line in lines]
    assert [is_unsampled(one) for one in episodes] == [False] * 2 + [True] * 4
    found = replay(tmp_path / "mixed", 4)
    assert all(finding.verdict == "PASS" for finding in found.findings), found.findings


def test_a_teacher_beside_rewards_two_teachers_and_adapters(tmp_path, teacher):
    distill = {"teacher": {"default": str(teacher), "other": "reference"}}
    train_recipe(recipe_in(tmp_path, "mopd", algo={"name": "mopd"}, distill=distill))
    assert math.isfinite(metrics(tmp_path / "mopd")[-1]["distill/kl"])
    distill = {"teacher": "reference", "divergence": "reverse", "coef": 0.5}
    own = {"lora": {"rank": 4}, "distill": distill, "model": {"path": str(teacher)}}
    train_recipe(recipe_in(tmp_path, "lora", algo={"name": "grpo"}, **own))
    first, *_, last = metrics(tmp_path / "lora")
    assert first["distill/divergence"] == pytest.approx(0, abs=1e-6)
    assert 0 < last["distill/divergence"] < 1


def test_the_policy_teaches_itself_behind_another_prompt(tmp_path):
    distill = {"teacher": "policy", "context": "{prompt}{answer}"}
    own = {"algo": {"name": "sdpo"}, "distill": distill, "sft": {"steps": 5, "batch": 8}}
    train_recipe(recipe_in(tmp_path, "self", **own))
    steps = [line for line in metrics(tmp_path / "self") if line["phase"] == "rl"]
    assert all(line["distill/rows"] == 1 and line["distill/divergence"] > 0 for line in steps)


def test_a_teacher_that_follows_the_policy_is_resumed_and_replayed(tmp_path):
    """The reference moves after every step, and a KL to it may stand beside the divergence."""
    distill = {"teacher": "reference", "context": "{prompt}{answer}"}
    own = {
        "algo": {"name": "sdpo", "reference_sync": [1, 0.1], "kl_coef": 0.01},
        "distill": distill,
    }
    recipe = recipe_in(tmp_path, "whole", **own)
    train_recipe(recipe)
    still = {**own, "algo": {"name": "sdpo", "kl_coef": 0.01}}
    train_recipe(recipe_in(tmp_path, "still", **still))
    whole = metrics(tmp_path / "whole")
    assert whole[0]["distill/divergence"] == metrics(tmp_path / "still")[0]["distill/divergence"]
    assert whole[1]["distill/divergence"] != metrics(tmp_path / "still")[1]["distill/divergence"]
    train_recipe(recipe, "run.name=parts", "train.steps=3")
    train_recipe(recipe, "run.name=parts", "train.steps=4")
    assert metrics(tmp_path / "parts") == whole
    found = replay(tmp_path / "parts", 4)
    assert all(finding.verdict == "PASS" for finding in found.findings), found.findings


def test_a_server_that_dies_stops_the_run_by_its_name_and_a_resumed_run_is_the_same(
    tmp_path, teacher, monkeypatch
):
    monkeypatch.setattr("graft.http.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("graft.engine.remote.endpoint.RETRIES", 1)
    newest = max((teacher / "checkpoints").iterdir())
    left = [10_000]  # answers until it dies

    def spoil(seen: Seen) -> Reply | None:
        left[0] -= seen.path == "/v1/completions"
        return None if left[0] >= 0 else Reply(503, b"gone")

    with vllm_like(load_model(newest), open_tokenizer(newest), spoil) as (url, _):
        own = {"algo": {"name": "opd"}, "distill": {"teacher": url}}
        recipe = recipe_in(tmp_path, "whole", **own)
        train_recipe(recipe)
        left[0] = 1 + 3 * 8  # the check at the start, and the rows of three steps
        with pytest.raises(EngineError, match="503: gone"):
            train_recipe(recipe, "run.name=parts")
        assert len(metrics(tmp_path / "parts")) == 3
        left[0] = 10_000
        train_recipe(recipe, "run.name=parts")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def test_a_student_learns_while_the_engine_is_steps_ahead_and_is_resumed(tmp_path, teacher):
    own = {"algo": {"name": "opd"}, "distill": {"teacher": str(teacher)}}
    recipe = recipe_in(tmp_path, "whole", **own)
    train_recipe(recipe, "rollout.staleness=2", "train.steps=20")
    lines = metrics(tmp_path / "whole")
    assert max(line["staleness/max"] for line in lines) == 2
    distances = [line["distill/kl"] for line in lines]
    assert sum(distances[-5:]) < 0.8 * sum(distances[:5])
    train_recipe(recipe, "rollout.staleness=2", "run.name=parts", "train.steps=3")
    train_recipe(recipe, "rollout.staleness=2", "run.name=parts", "train.steps=5")
    assert len(metrics(tmp_path / "parts")) == 5


def test_a_run_before_its_first_success_waits(tmp_path):
    distill = {"teacher": "policy", "context": "{prompt}{success}"}
    train_recipe(recipe_in(tmp_path, "self", algo={"name": "sdpo"}, distill=distill))
    lines = metrics(tmp_path / "self")
    assert len(lines) == 4
    assert all(line["grad_norm"] == 0 for line in lines if line["distill/rows"] == 0)


def test_a_teacher_with_actions_is_compared_by_its_tokens(tmp_path):
    task = {"env": "calculator", "args": {"syntax": "actions"}}
    shared = {"task": task, "actions": {"file": "compact"}}
    sft = {"steps": 4, "batch": 8}
    train_recipe(recipe_in(tmp_path, "big", sft=sft, train={"steps": 0}, **shared))
    own = {"algo": {"name": "gkd"}, "distill": {"teacher": str(tmp_path / "big")}}
    train_recipe(recipe_in(tmp_path, "small", **shared, **own))
    assert all(0 < line["distill/divergence"] < 1 for line in metrics(tmp_path / "small"))


def test_a_teacher_of_another_alphabet_is_refused(tmp_path, teacher):
    own = {"algo": {"name": "opd"}, "distill": {"teacher": str(teacher)}}
    model = {"shape": {**SHAPE, "width": 32, "ff": 32}, "alphabet": "bytes"}
    with pytest.raises(ConfigError, match="another tokenizer"):
        train_recipe(load_config(recipe_in(tmp_path, "other", **{**own, "model": model}), []))


def test_a_teacher_that_is_not_there_is_called_missing(tmp_path):
    own = {"algo": {"name": "opd"}, "distill": {"teacher": str(tmp_path / "nowhere")}}
    with pytest.raises(ModelFileError, match=r"distill.teacher: there is no folder '.*nowhere'"):
        train_recipe(load_config(recipe_in(tmp_path, "other", **own), []))

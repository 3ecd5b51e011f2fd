"""Agents in runs of several processes: torchrun, one engine that two processes hold, Ray workers.

Each makes the attempts of one process: the same rewards, the same tokens.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.test_agent_runs import COMMAND, FUNCTION, attempt_claimed, recipe, started
from tests.training import train_recipe

pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
NUMBERS = ("reward", "num_trained_tokens", "agent/calls", "entropy", "grad_norm")


def written(folder: Path, agent: Any) -> Path:
    """The recipe as a file, with a step whose tasks do not divide evenly."""
    file = folder / "recipe.json"
    given = recipe(folder, agent, tasks=3)
    given["run"] |= {"seed": 3, "eval_tasks": 2, "trackers": []}
    file.write_text(json.dumps(given))
    return file


def steps_of(folder: Path, name: str) -> list[list[float]]:
    rows = [json.loads(one) for one in (folder / name / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(row["rollout/failed"] == 0.0 for row in rows)
    return [[row[number] for number in NUMBERS] for row in rows]


@pytest.fixture(scope="module", params=[FUNCTION, COMMAND], ids=["function", "command"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process; its recipe is beside it."""
    folder = tmp_path_factory.mktemp("agents")
    train_recipe(str(written(folder, request.param)))
    return folder


def check_same(alone: Path, name: str, *words: str) -> None:
    """A run of these processes makes the attempts of the run of one process."""
    recipe = str(alone / "recipe.json")
    with started(
        *words[:-1], "train", recipe, "--trust", f"run.name={name}", *words[-1].split()
    ) as run:
        screen, _ = run.communicate(timeout=300)
    assert run.returncode == 0, screen
    for ours, theirs in zip(steps_of(alone, name), steps_of(alone, "agents"), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize(
    ("alone", "layout"),
    [(FUNCTION, "engine.tp=1"), (FUNCTION, "engine.tp=2"), (COMMAND, "engine.tp=1")],
    ids=["function-1", "function-2", "command-1"],
    indirect=["alone"],
)
def test_torchrun_makes_the_attempts_of_one_process(alone: Path, layout: str):
    check_same(alone, f"two-{layout[-1]}", *TORCHRUN, "-m", "graft", layout)


@pytest.mark.parametrize("alone", [FUNCTION], ids=["function"], indirect=True)
def test_ray_workers_make_the_attempts_of_one_process(alone: Path):
    pytest.importorskip("ray")
    cluster = "cluster.address=local cluster.workers=2 cluster.cpus=0.25"
    check_same(alone, "ray", "-m", "graft", cluster)


def test_agents_elsewhere_claim_from_two_processes_that_hold_one_engine(tmp_path: Path):
    file = written(tmp_path, "external")
    words = ["-m", "graft", "serve", "agent", str(file), "engine.tp=2", "run.eval_tasks=0"]
    with started(*TORCHRUN, *words, "train.steps=1", GRAFT_AGENT_TOKEN="tok") as run:
        assert run.stdout is not None
        found, seen = None, ""
        while "reinforce: " not in seen:
            line = run.stdout.readline()
            assert line, seen
            seen += line
            found = found or re.search(r"POST (\S+)/graft/sessions\?token=tok", line)
        assert found is not None
        for number in range(12):
            attempt_claimed(found[1], "tok", number % 2)
        screen = run.stdout.read()
        assert run.wait(100) == 0, screen
    (row,) = map(json.loads, (tmp_path / "agents" / "metrics.jsonl").read_text().splitlines())
    assert row["reward"] == 0.5 and row["rollout/failed"] == 0.0

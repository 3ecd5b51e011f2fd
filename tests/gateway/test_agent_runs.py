"""Whole runs whose attempts agents make: trained, evaluated, rolled out, and claimed from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from graft.config import ConfigError
from graft.datagen.single_task import attempt
from graft.evaluate.model_source import ModelSource
from graft.rollout.options import RolloutOptions
from graft.types import Episode
from tests.gateway.run_agents import post
from tests.model_calls import evaluate_model
from tests.training import train_recipe

pytest.importorskip("uvicorn")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
FUNCTION = "tests.gateway.run_agents:agent"
COMMAND = [sys.executable, str(Path(__file__).with_name("run_agents.py")), "{task.prompt}"]
SHAPE = {
    "width": 32, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 16, "ff": 64, "max_positions": 256,
}  # fmt: skip


def recipe(folder: Path, agent: Any, **rollout: Any) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder), "name": "agents", "eval_tasks": 2, "save_every": 0},
        "model": {"shape": SHAPE, "alphabet": "bytes", "chat_template": "chatml"},
        "task": {"env": "arithmetic", "agent": agent},
        "rollout": {"tasks": 2, "samples": 4, "max_tokens": 8, "max_context": 250, **rollout},
        "train": {"steps": 2, "lr": 1e-3},
    }


@pytest.mark.parametrize(
    ("agent", "rollout"),
    [
        (FUNCTION, {}),
        (FUNCTION, {"staleness": 1}),
        (COMMAND, {"staleness": 1}),
        (FUNCTION, {"branch": {"arpo": {"branch_probability": 1.0}}}),
    ],
)
def test_a_run_trains_on_attempts_of_agents(tmp_path: Path, agent: Any, rollout: Any):
    summary = train_recipe(recipe(tmp_path, agent, **rollout))
    assert "after" in summary
    rows = [
        json.loads(line)
        for line in (tmp_path / "agents" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [row for row in rows if "num_trained_tokens" in row]
    assert len(steps) == 2 and all(row["rollout/failed"] == 0.0 for row in steps)
    assert all(row["agent/calls"] == 1.0 and row["num_trained_tokens"] > 0 for row in steps)
    made = attempt(
        ModelSource(str(tmp_path / "agents"), trust=True), RolloutOptions(samples=2)
    )  # as `graft rollout`
    assert len(made.episode.leaves) == 2 and not made.errors


@contextmanager
def started(*words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """`python ...` while the block lasts."""
    with subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


SERVE = ("-m", "graft", "serve", "agent")


def found_in(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """The first line of the output that has the pattern."""
    assert process.stdout is not None
    seen: list[str] = []
    while line := process.stdout.readline():
        seen.append(line)
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"no {pattern!r} in:\n{''.join(seen)}")


def attempt_claimed(url: str, token: str, reward: float) -> str:
    """Claim an attempt, make a call, end it; the id of its task."""
    opened = post(f"{url}/graft/sessions", token, {})
    body = {"model": "x", "messages": opened["task"]["prompt"], "max_tokens": 6}
    post(f"{opened['base_url']}/v1/messages", opened["key"], body)
    end = f"{url}/graft/sessions/{opened['id']}/end"
    assert post(end, opened["key"], {"reward": reward})["status"] == "done"
    return opened["task"]["id"]


def test_agents_elsewhere_claim_the_attempts_of_a_run(tmp_path: Path):
    file = tmp_path / "recipe.json"
    given = recipe(tmp_path, "external")
    del given["run"]["eval_tasks"]
    file.write_text(json.dumps(given))
    with started(*SERVE, str(file), "train.steps=1", GRAFT_AGENT_TOKEN="") as run:
        url, token = found_in(run, r"POST (\S+)/graft/sessions\?token=(\S+)").groups()
        found_in(run, "agents claim")
        tasks = [attempt_claimed(url, token, number % 2) for number in range(8)]
        assert run.stdout is not None
        rest = run.stdout.read()
        assert run.wait(60) == 0, rest
    assert "reward 0.500" in rest
    assert len(set(tasks)) == 2 and all(":train:" in id for id in tasks)  # nothing is held out


def test_a_run_is_evaluated_by_its_agent_and_served_to_others(tmp_path: Path):
    """`graft eval RUN` and `graft serve agent RUN`, on one short run."""
    short = {**recipe(tmp_path, FUNCTION), "train": {"steps": 1, "lr": 1e-3}}
    short["run"]["eval_tasks"] = 0
    train_recipe(short)
    folder = tmp_path / "agents"
    table, *_ = evaluate_model(str(folder), tasks=3, samples=2, trust=True)
    (result,) = table.rows["rl-000001"].values()
    assert [len(one) for one in result.rewards] == [2, 2, 2] and result.failed == 0.0
    assert {one for pair in result.rewards for one in pair} <= {0.0, 1.0}  # the agent's own reward
    with pytest.raises(ConfigError, match="brings its own"):
        evaluate_model(str(folder), tasks=1, tools=False, trust=True)

    out = tmp_path / "episodes.jsonl"
    options = ["--out", str(out), "--max-tokens", "5"]
    with started(*SERVE, str(folder), *options, GRAFT_AGENT_TOKEN="") as served:
        key = found_in(served, r"OPENAI_BASE_URL=(\S+) OPENAI_API_KEY=(\S+)").groups()
        anthropic, own = found_in(served, r"BASE_URL=(\S+) ANTHROPIC_API_KEY=(\S+)").groups()
        url, token = found_in(served, r"'(\S+)/graft/sessions\?token=(\S+)'").groups()
        found_in(served, "end with Ctrl-C")
        hello = [{"role": "user", "content": "hello"}]
        said = post(f"{key[0]}/chat/completions", key[1], {"messages": hello, "model": "x"})
        assert said["usage"]["completion_tokens"] <= 5
        post(f"{anthropic}/v1/messages", own, {"messages": hello, "model": "x", "max_tokens": 3})
        mine = {"task": {"id": "mine", "prompt": "2+2?"}, "metadata": {"who": "me"}}
        opened = post(f"{url}/graft/sessions", token, mine)
        post(
            f"{opened['base_url']}/v1/messages", opened["key"], {"messages": hello, "max_tokens": 3}
        )
        post(f"{url}/graft/sessions/{opened['id']}/end", opened["key"], {"reward": 0.5})
        until(out.exists, "the episode of a session that has ended")
        served.send_signal(signal.SIGINT)
        served.wait(60)
    first, last = [Episode.loads(line) for line in out.read_text().splitlines()]
    assert first.task.id == "mine" and first.leaves[0].reward == 0.5
    assert first.leaves[0].info["metadata"] == {"who": "me"}
    # the session that was printed: two calls in two dialects, at the same prompt, with other limits
    assert last.leaves[0].metrics["agent/calls"] == 2.0 and last.leaves[0].status == "done"


def until(holds: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.05)

"""Agents that other people wrote, from PyPI and as they are, against the gateway: one by one and all at once.

Each program is a process of `.venv/agents`, where graft is not installed. What the policy says is written for
it (`written_policy`); the engine, the gateway, HTTP and the programs are real.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from graft.gateway.dialects.dialect import DIALECTS
from graft.gateway.http import caller
from graft.types import Episode
from tests.docs.pages import write_files
from tests.gateway.client_bench import HOMES, Bench
from tests.gateway.client_trials import PAGE, RULES, TRIALS, Trial
from tests.gateway.written_policy import check_episodes
from tests.training import train_recipe

PYTHON = HOMES["agents"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason=f"needs a Python with the agents of constraints-agents.txt: {PYTHON} (`make test-slow` "
        "installs it; elsewhere: GRAFT_AGENTS)",
    ),
]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    return Bench(monkeypatch, tmp_path, RULES)


ALONE = [trial for trial in TRIALS if trial.is_dropped]
"""A client that gives up after seconds would give up on every answer if all the others ran beside it."""
TOGETHER = [trial for trial in TRIALS if trial not in ALONE]


@pytest.mark.parametrize("trial", [*ALONE, *PAGE], ids=lambda trial: trial.name)
def test_an_agent_from_pypi_is_recorded_exactly(bench: Bench, trial: Trial):
    session = bench.open(trial)
    (printed,) = asyncio.run(bench.run([(trial, session)]))
    check_episodes(bench.policy, [bench.check(trial, session, printed)])
    bench.check_branches(trial, session)


STREAMED = [one for one in TRIALS if "--stream" in one.arguments or one.name == "claude-code"]


def test_streaming_clients_wait_through_pings(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(caller, "FIRST_SECONDS", 0.0)  # every stream begins with a ping
    monkeypatch.setattr(caller, "PING_SECONDS", 0.02)
    sessions = [bench.open(trial) for trial in STREAMED]
    printed = asyncio.run(bench.run([*zip(STREAMED, sessions, strict=True)]))
    pings = tuple(dialect.ping() for dialect in DIALECTS.values())
    for trial, session, line in zip(STREAMED, sessions, printed, strict=True):
        bench.check(trial, session, line)
        bench.check_branches(trial, session)
        answers = [one.answer for one in bench.wire.of(session.id).exchanges]
        assert all(one.startswith(pings) for one in answers)
    assert len(STREAMED) == 5


@pytest.mark.timeout(600)  # two dozen programs that start at the same time
def test_all_agents_at_once_are_recorded_exactly(bench: Bench):
    sessions = [bench.open(trial) for trial in TOGETHER]
    printed = asyncio.run(bench.run([*zip(TOGETHER, sessions, strict=True)]))
    episodes = [bench.check(*one) for one in zip(TOGETHER, sessions, printed, strict=True)]
    check_episodes(bench.policy, episodes)
    for trial, session in zip(TOGETHER, sessions, strict=True):
        bench.check_branches(trial, session)


def test_attempts_at_one_task_are_leaves_of_one_episode_with_one_prompt(bench: Bench):
    trials = [*TRIALS[:2], *TRIALS[:1]]
    first = bench.open(trials[0])
    sessions = [first, *(bench.open(one, n + 1, first.forest) for n, one in enumerate(trials[1:]))]
    printed = asyncio.run(bench.run([*zip(trials, sessions, strict=True)]))
    for one in zip(trials, sessions, printed, strict=True):
        episode = bench.check(*one)
    assert [span.author for span in episode.spans if span.parent is None] == ["task"]
    # the same words three times are three samples of three answers, each of them trained
    assert sum(span.author == "policy" for span in episode.spans) == 9
    check_episodes(bench.policy, [episode])


def test_the_recipe_of_the_page_trains_its_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    monkeypatch.setenv("PATH", f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}")
    shape = (
        "{width: 16, layers: 1, heads: 2, kv_heads: 1, head_dim: 8, ff: 16, max_positions: 4096}"
    )
    scratch = (
        "model.path=",
        f"model.shape={shape}",
        "model.alphabet=bytes",
        "model.chat_template=chatml",
    )
    small = ("rollout.tasks=2", "rollout.samples=2", "rollout.max_tokens=16", "train.steps=1")
    train_recipe("agent.yaml", *scratch, *small, "run.log_episodes=1", "run.name=page")
    (file,) = tmp_path.rglob("episodes/step_*.jsonl")
    episodes = [Episode.loads(line) for line in file.read_text().splitlines()]
    leaves = [leaf for episode in episodes for leaf in episode.leaves]
    assert [leaf.status for leaf in leaves] == ["done"] * 4
    assert all(leaf.info["contexts"][0]["reason"] == "first" for leaf in leaves)

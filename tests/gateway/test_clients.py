"""Agents that other people wrote, from PyPI and as they are, against the gateway: one by one and all at once.

Each program is a process of `.venv/agents`, where graft is not installed. What the policy says is written for
it (`written_policy`); the engine, the gateway, HTTP and the programs are real.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from copy import copy
from pathlib import Path

import pytest

from graft.gateway.address import GatewayAddress
from graft.gateway.client import AgentClient
from graft.gateway.dialects.dialect import DIALECTS
from graft.gateway.forest import CallForest
from graft.gateway.gateway import Gateway
from graft.gateway.http import caller
from graft.gateway.programs import CommandAgent
from graft.gateway.roots import SUB_AGENT
from graft.gateway.session import AgentSession
from graft.types import Episode, Task
from tests.docs.pages import write_files
from tests.gateway.client_trials import PAGE, RULES, TRIALS, Trial
from tests.gateway.wire import Wire, branches
from tests.gateway.written_policy import MAX_CONTEXT, WrittenPolicy, check_episodes
from tests.training import train_recipe

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("clients")
PYTHON = Path(os.environ.get("GRAFT_AGENTS_PYTHON") or ROOT / ".venv" / "agents" / "bin" / "python")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason=f"needs a Python with the agents of constraints-agents.txt: {PYTHON} (`make test-slow` "
        "installs it; another one: GRAFT_AGENTS_PYTHON)",
    ),
]

VARIABLES = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER")
"""The variables of Claude Code, which a recipe names in agent.variables."""


class Bench:
    """A gateway with a written policy, and programs that attempt a task against it."""

    def __init__(self, patch: pytest.MonkeyPatch, home: Path) -> None:
        patch.setenv("HOME", str(home))  # Claude Code keeps its sessions there
        patch.chdir(home)
        write_files(home)
        for name in VARIABLES:
            patch.setenv(name, "1")
        self.policy = WrittenPolicy(patch, RULES)
        self.gateway: Gateway = self.policy.gateway()
        self.address = GatewayAddress()
        self.address.app = self.wire = Wire(self.address.app)

    def open(self, trial: Trial, number: int = 0, forest: CallForest | None = None) -> AgentSession:
        prompt = ({"role": "user", "content": trial.question},)
        task = Task(trial.name, "none", prompt)
        session = self.gateway.open(task, forest=forest, number=number)
        wire = self.wire.of(session.id)
        wire.lost = () if trial.lost is None else (trial.lost,)
        policy = session.policy = copy(session.policy)  # its own limit

        def limit(number: int) -> None:
            policy.max_context = 10 if number == trial.too_long else MAX_CONTEXT

        wire.before = limit
        return session

    async def attempt(self, trial: Trial, session: AgentSession) -> str:
        """The last line that the program prints."""
        file = trial.program if trial in PAGE else str(PROGRAMS / trial.program)
        program = CommandAgent([str(PYTHON), file, "{task.prompt}", *trial.arguments], VARIABLES)
        client = AgentClient(session, *self.address.urls(session))
        outcome = await program(session.task, client)
        session.end()
        return outcome.info["output"].strip().splitlines()[-1]

    async def run(self, trials: Sequence[tuple[Trial, AgentSession]]) -> list[str]:
        async with self.address.serving(self.gateway):
            return await asyncio.gather(*(self.attempt(*one) for one in trials))

    def check(self, trial: Trial, session: AgentSession, printed: str) -> Episode:
        """What is recorded has the branches that the traffic had."""
        episode, exchanges = session.forest.episode(), self.wire.of(session.id).exchanges
        leaf = episode.leaves[session.number]
        dropped = int(leaf.metrics.get("agent/dropped", 0))
        assert (printed, leaf.status) == (trial.output, "done"), trial
        reasons = [one.role if one.role == SUB_AGENT else one.reason for one in session.contexts]
        assert set(reasons) == set(trial.contexts)
        assert dropped or sorted(reasons) == sorted(trial.contexts)
        assert 0 <= len(session.history.answers) - trial.answers <= trial.extra
        assert dropped or leaf.metrics.get("agent/retries", 0) == (trial.lost is not None)
        assert leaf.metrics.get("agent/refused", 0) == (trial.too_long is not None)
        assert bool(dropped) == trial.is_dropped
        assert len(leaf.tips) == trial.tips + dropped
        assert branches(exchanges) == (trial.in_verifiers or trial.tips)
        return episode


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    return Bench(monkeypatch, tmp_path)


ALONE = [trial for trial in TRIALS if trial.is_dropped]
"""A client that gives up after seconds would give up on every answer if all the others ran beside it."""
TOGETHER = [trial for trial in TRIALS if trial not in ALONE]


@pytest.mark.parametrize("trial", [*ALONE, *PAGE], ids=lambda trial: trial.name)
def test_an_agent_from_pypi_is_recorded_exactly(bench: Bench, trial: Trial):
    session = bench.open(trial)
    (printed,) = asyncio.run(bench.run([(trial, session)]))
    check_episodes(bench.policy, [bench.check(trial, session, printed)])


STREAMED = [one for one in TRIALS if "--stream" in one.arguments or one.name == "claude-code"]


def test_streaming_clients_wait_through_pings(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(caller, "FIRST_SECONDS", 0.0)  # every stream begins with a ping
    monkeypatch.setattr(caller, "PING_SECONDS", 0.02)
    sessions = [bench.open(trial) for trial in STREAMED]
    printed = asyncio.run(bench.run([*zip(STREAMED, sessions, strict=True)]))
    pings = tuple(dialect.ping() for dialect in DIALECTS.values())
    for trial, session, line in zip(STREAMED, sessions, printed, strict=True):
        bench.check(trial, session, line)
        answers = [one.answer for one in bench.wire.of(session.id).exchanges]
        assert all(one.startswith(pings) for one in answers)
    assert len(STREAMED) == 5


@pytest.mark.timeout(600)  # two dozen programs that start at the same time
def test_all_agents_at_once_are_recorded_exactly(bench: Bench):
    sessions = [bench.open(trial) for trial in TOGETHER]
    printed = asyncio.run(bench.run([*zip(TOGETHER, sessions, strict=True)]))
    episodes = [bench.check(*one) for one in zip(TOGETHER, sessions, printed, strict=True)]
    check_episodes(bench.policy, episodes)


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

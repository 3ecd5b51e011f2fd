"""A gateway with a written policy, and other people's programs that attempt a task against it.

Each program is a process of an environment of its own (`HOMES`), where graft is not installed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Sequence
from copy import copy
from pathlib import Path

import pytest

from graft.gateway.address import GatewayAddress
from graft.gateway.client import AgentClient
from graft.gateway.forest import CallForest
from graft.gateway.gateway import Gateway
from graft.gateway.programs import CommandAgent
from graft.gateway.roots import SUB_AGENT
from graft.gateway.session import AgentSession
from graft.types import Episode, Task
from tests.docs.pages import write_files
from tests.gateway.client_trials import PAGE, Trial
from tests.gateway.wire import Wire, branches
from tests.gateway.written_policy import MAX_CONTEXT, Rule, WrittenPolicy

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("clients")
ENVIRONMENTS = Path(os.environ.get("GRAFT_AGENTS") or ROOT / ".venv")
"""The folder with the environments that `make layers` installs."""
HOMES = {
    "agents": ENVIRONMENTS / "agents" / "bin" / "python",
    "programs": ENVIRONMENTS / "programs" / "bin" / "python",
    "openhands": ENVIRONMENTS / "openhands" / "bin" / "python",
    "node": ENVIRONMENTS / "node" / "node_modules" / ".bin",
}
"""What runs a program: a Python, or the folder of a command."""
OPENCODE = {
    "model": "graft/policy",
    "provider": {
        "graft": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
            "models": {"policy": {}},
        }
    },
}
VARIABLES = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "OPENCODE_CONFIG_CONTENT": json.dumps(OPENCODE),
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}
"""The variables of Claude Code and opencode, which a recipe names in agent.variables."""


class Bench:
    """A gateway with a written policy, and programs that attempt a task against it."""

    def __init__(self, patch: pytest.MonkeyPatch, home: Path, rules: Sequence[Rule]) -> None:
        patch.setenv("HOME", str(home))  # Claude Code keeps its sessions there
        patch.chdir(home)
        write_files(home)
        (home / "node_modules").symlink_to(
            HOMES["node"].parent
        )  # modules are looked for beside a file
        for file in PROGRAMS.glob("*.mjs"):
            shutil.copy(file, home)
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        self.policy = WrittenPolicy(patch, rules)
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
        """The line that the program should print; its last one if it does not."""
        program = CommandAgent(command_of(trial), tuple(VARIABLES))
        client = AgentClient(session, *self.address.urls(session))
        try:
            outcome = await program(session.task, client)
        finally:
            session.end()
        lines = outcome.info["output"].strip().splitlines()
        return trial.output if trial.output in lines else lines[-1]

    async def run(self, trials: Sequence[tuple[Trial, AgentSession]]) -> list[str]:
        async with self.address.serving(self.gateway):
            return await asyncio.gather(*(self.attempt(*one) for one in trials))

    def check(self, trial: Trial, session: AgentSession, printed: str) -> Episode:
        """What is recorded has the branches that the traffic had."""
        episode = session.forest.episode()
        leaf = episode.leaves[session.number]
        dropped = int(leaf.metrics.get("agent/dropped", 0))
        assert (printed, leaf.status) == (trial.output, "done"), (trial, leaf.info)
        reasons = [one.role if one.role == SUB_AGENT else one.reason for one in session.contexts]
        assert set(reasons) == set(trial.contexts)
        assert dropped or sorted(reasons) == sorted(trial.contexts)
        assert 0 <= len(session.history.answers) - trial.answers <= trial.extra
        assert dropped or leaf.metrics.get("agent/retries", 0) == (trial.lost is not None)
        assert leaf.metrics.get("agent/refused", 0) == (trial.too_long is not None)
        assert bool(dropped) == trial.is_dropped
        assert len(leaf.tips) == trial.tips + dropped
        return episode

    def check_branches(self, trial: Trial, session: AgentSession) -> None:
        """verifiers' message graph has as many branches over the same traffic as is known."""
        exchanges = self.wire.of(session.id).exchanges
        assert branches(exchanges) == (trial.in_verifiers or trial.tips), trial


def command_of(trial: Trial) -> list[str]:
    """The words of a trial's command; a program of node is a command with its first arguments."""
    home = HOMES[trial.home]
    if trial.home == "node":
        name, *first = trial.program.split()
        start = ["node", name] if name.endswith(".mjs") else [str(home / name)]
        return [*start, *first, "{task.prompt}", *trial.arguments]
    file = trial.program if trial in PAGE else str(PROGRAMS / trial.program)
    return [str(home), file, "{task.prompt}", *trial.arguments]

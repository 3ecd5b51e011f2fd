"""Agents inside the container of their attempt: recorded exactly, graded by the task's tests."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from graft.envs import make
from graft.gateway.address import GatewayAddress
from graft.gateway.attempts import AgentAttempts
from graft.gateway.programs import make_program
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.types import Episode, Sampling, Status, Task
from tests.gateway.written_policy import MAX_CONTEXT, WrittenPolicy, check_episodes
from tests.graft_envs.terminal.terminal_kit import AGENT, HARBOR, SOLVING

pytest.importorskip("uvicorn")

COMMAND = ["sh", "/agent/run.sh", "{task.prompt}"]
LOOK = "ls"


def rules(task: str) -> list[tuple[str, str, str | list[str]]]:
    """A policy that looks around, solves the task in half of its attempts, and says that it is done."""
    return [
        ("", r"user\nWrite", LOOK),
        ("", r"user\ndata\.txt", [SOLVING[task], "true"]),
        ("", r"", "done"),
    ]


def attempted(
    policy: WrittenPolicy, command: Any = COMMAND, samples: int = 2, **options: Any
) -> Episode:
    setup = RolloutSetup(
        policy.engine,
        Chat(policy.tokenizer),
        lambda task: make("terminal", agent_folder=AGENT, **options),
        Sampling(max_tokens=512),
        max_context=MAX_CONTEXT,
        deadline=60.0,
        samples=samples,
        agent=AgentAttempts(make_program(command), GatewayAddress(), concurrency=1),
    )
    try:
        [episode] = collect([Task("t", "terminal", seed=0)], setup, independent(samples))
        return episode
    finally:
        setup.close()


@pytest.mark.slow
def test_an_agent_in_a_container_without_network_is_recorded_and_graded(podman, monkeypatch):
    policy = WrittenPolicy(monkeypatch, rules("count-lines"))
    episode = attempted(policy, data=HARBOR / "count-lines", **podman)
    assert [(leaf.status, leaf.reward) for leaf in episode.leaves] == [
        (Status.DONE, 1.0),
        (Status.DONE, 0.0),
    ]
    assert [leaf.info["rewards"] for leaf in episode.leaves] == [{"reward": 1.0}, {"reward": 0.0}]
    assert len(policy.samples) == 6
    check_episodes(policy, [episode])


FORGED = """
wget -q -O - --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \
    --post-data '{"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}' \
    "$OPENAI_BASE_URL/chat/completions"
wget -q -O - --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \
    --post-data '{"value": 1.0}' "${GRAFT_BASE_URL%/s/*}/graft/sessions/$GRAFT_SESSION/reward" && exit 9
wget -q -T 2 -O - http://10.88.0.1/ && exit 8
echo 1 > /logs/verifier/reward.txt
"""


@pytest.mark.slow
def test_an_agent_in_a_container_cannot_give_itself_a_reward(podman, monkeypatch):
    policy = WrittenPolicy(monkeypatch, [("", "", "done")])
    command = ["sh", "-c", f"{FORGED}exit 0"]
    episode = attempted(policy, command, samples=1, data=HARBOR / "count-lines", **podman)
    assert [(leaf.status, leaf.reward) for leaf in episode.leaves] == [(Status.DONE, 0.0)]


@pytest.mark.slow
def test_an_agent_that_is_not_in_the_container_is_an_error(podman, monkeypatch):
    policy = WrittenPolicy(monkeypatch, [])
    episode = attempted(policy, ["no-such-agent"], samples=1, data=HARBOR / "count-lines", **podman)
    [leaf] = episode.leaves
    assert leaf.status is Status.ENV_ERROR and "no-such-agent" in leaf.info["error"]


@pytest.mark.slow
def test_tests_that_cannot_run_are_an_env_error_of_the_attempt(podman, monkeypatch, tmp_path):
    folder = shutil.copytree(HARBOR / "count-lines", tmp_path / "untested")
    (folder / "tests" / "test.sh").write_text("#!/bin/sh\npytest -q\n")
    policy = WrittenPolicy(monkeypatch, rules("count-lines"))
    episode = attempted(policy, samples=1, data=folder, **podman)
    [leaf] = episode.leaves
    assert leaf.status is Status.ENV_ERROR and "pytest: not found" in leaf.info["error"]


@pytest.mark.slow
def test_the_limit_of_the_task_ends_the_agent_and_not_the_attempt(podman, monkeypatch, tmp_path):
    folder = shutil.copytree(HARBOR / "count-lines", tmp_path / "limited")
    file = folder / "task.toml"
    file.write_text(file.read_text().replace("timeout_sec = 60.0", "timeout_sec = 3.0"))
    policy = WrittenPolicy(monkeypatch, rules("count-lines"))
    command = ["sh", "-c", f"sh {COMMAND[1]} '{COMMAND[2]}'; sleep 60"]
    episode = attempted(policy, command, samples=1, data=folder, **podman)
    assert [(leaf.status, leaf.reward) for leaf in episode.leaves] == [(Status.DONE, 1.0)]

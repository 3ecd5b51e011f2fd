"""Agents from Python: functions for `graft.collect`, and `graft.agent` for any client."""

from __future__ import annotations

import functools
import json
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

import graft
from graft.config import ConfigError, check
from graft.train.rollouts.agents import make_agents
from graft.user_code import UserCodeError

pytest.importorskip("uvicorn")

SHAPE = {
    "width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "ff": 16, "max_positions": 512,
}  # fmt: skip


@pytest.fixture
def engine() -> Iterator[graft.Engine]:
    policy = graft.load(shape=SHAPE, alphabet="bytes", chat_template="chatml")
    with graft.Engine(policy) as engine:
        yield engine


@graft.rollout(seconds=20)
async def vowels(task: graft.Task, client: Any) -> float:
    """Earns 1 for an answer with an e."""
    said = await client.chat(task.prompt, max_tokens=4)
    return float("e" in said["content"])


def test_a_function_collects_and_its_episodes_are_learned(engine: graft.Engine):
    assert vowels.__doc__ and vowels.options["seconds"] == 20
    episodes = graft.collect(engine, tasks=["hello", "bye"], samples=4, agent=vowels)
    assert [len(episode.leaves) for episode in episodes] == [4, 4]
    same = vowels.collect(engine, tasks=["hello", "bye"], samples=4, seed=0)
    assert len(same) == 2
    learner = graft.Learner(engine.policy, algo="rebn", lr=1e-3)
    assert learner.step(episodes)["num_trained_tokens"] == 32
    assert engine.version == 1
    with pytest.raises(UserCodeError, match="has no reward"):
        graft.collect(
            engine, tasks=["hello"], samples=1, agent=lambda task, client: client.chat("x") and None
        )


def logged(function: Any) -> Any:
    """A decorator of somebody else's, which is not async itself."""

    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


@logged
async def wrapped(task: graft.Task, client: Any) -> float:
    return float("e" in (await client.chat(task.prompt, max_tokens=4))["content"])


@pytest.mark.parametrize("name", ["vowels", "wrapped"])
def test_a_decorated_async_function_can_be_named(engine: graft.Engine, name: str):
    (episode,) = graft.collect(engine, tasks=["hi"], samples=2, agent=f"{__name__}:{name}")
    assert {leaf.status for leaf in episode.leaves} == {"done"}


def test_a_program_that_runs_on_a_machine_of_the_environment_need_not_be_here():
    task = {"agent": "no-such-program {task.prompt}"}
    with pytest.raises(ConfigError):
        make_agents(check({"model": {"shape": SHAPE}, "task": {"env": "arithmetic", **task}}))
    inside = {"env": "terminal", "args": {"data": "anywhere"}, **task}
    agents = make_agents(check({"model": {"shape": SHAPE}, "task": inside}))
    assert agents is not None and str(agents.program).startswith("the agent 'no-such-program")
    agents.close()


def test_a_recipe_that_names_a_decorated_function_gets_its_limits_or_sets_its_own():
    def limits(**section: Any) -> tuple[float, tuple[str, ...]]:
        task = {"env": "arithmetic", "agent": f"{__name__}:vowels"}
        given = {"model": {"shape": SHAPE}, "task": task, "agent": section}
        agents = make_agents(check(given))
        assert agents is not None
        return agents.seconds, agents.trained_roles

    assert limits() == (20, ("main", "sub-agent", "summary"))
    assert limits(seconds=9, roles=["main"]) == (9, ("main",))


def post(url: str, key: str, body: dict[str, Any]) -> Any:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked) as reply:
        return json.load(reply)


def test_any_client_can_call_a_policy_and_be_learned_from(engine: graft.Engine):
    learner = graft.Learner(engine.policy, algo="rebn", lr=1e-3)
    with graft.agent(engine, max_tokens=6) as gateway:
        for number in range(2):
            with gateway.session("What is 2+3?") as session:
                body = {"model": "x", "messages": [*session.task.prompt]}
                said = post(f"{session.base_url}/chat/completions", session.key, body)
                session.reward(number, said["id"])
                with pytest.raises(UserCodeError, match="sampling in another thread"):
                    engine.check_idle()  # as learner.step does
        opened = post(f"{gateway.url}/graft/sessions", gateway.token, {"task": {"id": "mine"}})
        assert opened["task"]["id"] == "mine"
        at = f"{gateway.url}/graft/sessions/{opened['id']}"
        post(f"{opened['openai_base_url']}/chat/completions", opened["key"], body)
        assert [len(e.leaves) for e in gateway.episodes()] == [2]  # that of "mine" has not ended
        post(f"{at}/end", opened["key"], {"reward": 0.5})
        (mine,) = gateway.episodes()
        assert [leaf.reward for leaf in mine.leaves] == [0.5] and gateway.episodes() == []
        assert learner.step([mine])["num_trained_tokens"] == 6
        # the engine has the new weights, and serves them
        with gateway.session("What is 2+3?") as session:
            post(f"{session.base_url}/chat/completions", session.key, body)
        (again,) = gateway.episodes()
        assert [span.version for span in again.spans if span.author == "policy"] == [1]
    with pytest.raises(UserCodeError, match="closed"):
        gateway.session("late")


def judged(task: graft.Task, client: Any) -> float:
    """Asks its policy, then a judge by another name."""
    said = client.chat(task.prompt, max_tokens=4)
    body = {"model": "a-judge", "messages": [{"role": "user", "content": said["content"]}]}
    keys = {"Authorization": f"Bearer {client.api_key}"}
    url = f"{client.base_url}/chat/completions"
    with urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(body).encode(), keys)
    ) as reply:
        return float(bool(json.load(reply)["choices"]))


def test_the_rules_of_a_recipe_hold_from_python(engine: graft.Engine):
    policy = graft.load(shape=SHAPE, alphabet="bytes", chat_template="chatml")
    with graft.Engine(policy, seed=1) as judge:
        agent = graft.rollout(judged, models={"*judge*": judge}, main={"model": "graft"})
        (episode,) = graft.collect(engine, tasks=["hello"], samples=2, agent=agent)
    for leaf in episode.leaves:
        assert leaf.metrics["agent/frozen_calls"] == 1 and leaf.metrics["turns"] == 1
    with graft.agent(engine, main={"tools": "none"}) as gateway:
        assert gateway.gateway.policy.main.tools == "none"


@pytest.mark.parametrize(
    ("rules", "value"),
    [({"models": {"judge": "frozen"}}, "reference"), ({"models": {"a": {"frozen": "x"}}}, "'x'")],
)
def test_a_frozen_model_is_an_engine_in_python(rules: dict[str, Any], value: str):
    with pytest.raises(UserCodeError, match=value):
        graft.rollout(judged, **rules)


def test_a_command_has_the_options_of_a_function(engine: graft.Engine):
    agent = graft.rollout(f"{sys.executable} -c 'raise SystemExit(0)'", seconds=30, on_crash="drop")
    assert agent.options["on_crash"] == "drop"
    with pytest.warns(UserWarning, match="without a call"):
        (episode,) = agent.collect(engine, tasks=["hello"], samples=1)
    assert episode.leaves[0].status == "env_error"

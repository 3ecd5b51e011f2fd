"""Agents from Python: functions for `graft.collect`, and `graft.agent` for any client."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

import graft
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

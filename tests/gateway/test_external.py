"""Attempts that agents elsewhere claim over HTTP: `task.agent: external`, `graft serve agent`."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from graft.gateway import external
from graft.gateway.external import ExternalAgents
from graft.gateway.request import RefusedRequest
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect_async
from graft.types import Episode, Status, Task
from tests.gateway.test_attempts import setup_with

pytest.importorskip("uvicorn")

HELLO = {"model": "x", "messages": [{"role": "user", "content": "hello"}]}


@asynccontextmanager
async def offered(
    tasks: int = 2, samples: int = 2, program: ExternalAgents | None = None
) -> AsyncIterator[tuple[Any, asyncio.Future[list[Episode]]]]:
    """`post(path, body, key)` to a step whose attempts are offered, and its episodes when all are made."""
    program = program or ExternalAgents()
    setup = replace(setup_with(program), samples=samples)
    agents: Any = setup.agent
    address = agents.address
    address.app.source = program
    posed = [Task(f"question:{seed}", "question", seed=seed) for seed in range(tasks)]
    collecting = asyncio.ensure_future(collect_async(posed, setup, independent(samples)))
    async with httpx.AsyncClient(base_url=address.url) as client:

        async def post(
            path: str, body: Any = None, key: str = address.token, headers: Any = None
        ) -> Any:
            headers = {"authorization": f"Bearer {key}", **(headers or {})}
            reply = await client.post(path, content=json.dumps(body or {}), headers=headers)
            return reply.json() if reply.status_code == 200 else reply

        try:
            yield post, collecting
            await collecting
        finally:
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)
            setup.close()


async def attempt(post: Any, task: Any = None, **end: Any) -> dict[str, Any]:
    """Claim an attempt, make one call, end it."""
    opened = await post("/graft/sessions", {"task": task, "metadata": {"host": "b"}})
    await post(f"/s/{opened['id']}/v1/chat/completions", HELLO, opened["key"])
    ended = await post(f"/graft/sessions/{opened['id']}/end", end, opened["key"])
    return {**opened, "ended": ended}


async def test_attempts_of_a_step_are_claimed_one_after_the_other():
    claimed: list[str] = []

    async with offered() as (post, collected):
        for reward in (1.0, 0.0, None, 0.5):
            opened = await attempt(post, reward=reward)
            claimed.append(opened["task"]["id"])
            assert opened["task"]["answer"] == "4" and opened["task"]["prompt"]
    episodes = await collected
    assert claimed == ["question:0", "question:0", "question:1", "question:1"]
    # without a reward of the client's the environment grades its own task
    assert [[x.reward for x in e.leaves] for e in episodes] == [[1.0, 0.0], [0.5, 0.5]]
    assert episodes[0].leaves[0].info["metadata"] == {"host": "b"}


async def test_a_session_is_at_the_address_by_which_its_client_reached_the_server():
    async with offered(tasks=1) as (post, _):
        first = await attempt(post, reward=1.0)
        port = int(first["base_url"].split(":")[2].partition("/")[0])
        here = {"host": f"localhost:{port}"}
        second = await attempt(lambda path, *rest: post(path, *rest, headers=here), reward=0.0)
        assert first["base_url"] == f"http://127.0.0.1:{port}/s/{first['id']}"
        assert second["openai_base_url"] == f"http://localhost:{port}/s/{second['id']}/v1"


async def test_a_client_may_bring_its_own_task_and_equal_ids_are_one_group():
    async with offered() as (post, collected):
        mine = {"id": "mine", "prompt": "2+2?", "answer": "4"}
        refused = await attempt(post, mine)
        assert "is your own" in refused["ended"].json()["error"]["message"]
        at = f"/graft/sessions/{refused['id']}"
        await post(f"{at}/end", {"reward": 0.25}, refused["key"])
        await attempt(post, reward=1.0)  # of the step's own task
        await attempt(post, mine, reward=0.75)
        await attempt(post, reward=1.0)
    first, second = await collected
    assert (first.task.id, second.task.id) == ("mine", "question:1")
    assert [x.reward for x in first.leaves] == [0.25, 0.75]
    assert [x.reward for x in second.leaves] == [1.0, 1.0]


async def test_a_session_that_is_not_ended_times_out_and_one_that_fails_is_a_status():
    program = ExternalAgents()

    async with offered(tasks=1, program=program) as (post, collected):
        await attempt(post, status="env_error")
        program.seconds = 0.2
        opened = await post("/graft/sessions")
        await post(f"/s/{opened['id']}/v1/chat/completions", HELLO, opened["key"])
    (episode,) = await collected
    assert [x.status for x in episode.leaves] == [Status.ENV_ERROR, Status.TIMEOUT]
    assert "0.2 s" in episode.leaves[1].info["error"]


async def test_a_client_learns_what_became_of_its_attempt_and_what_is_wrong_with_its_request():
    async with offered(tasks=1) as (post, collected):
        refused = await post("/graft/sessions", {}, "wrong")
        assert refused.status_code == 401 and "takes the token of this gateway" in refused.text
        for task in (
            {"id": "a", "prompt": 5},
            {"id": "a", "prompt": [{}]},
            {"id": "a", "prompt": [{"role": "user", "content": {"text": "?"}}]},
            {"id": "a", "prompt": "?", "env": {}},
            {"id": "a", "prompt": "?", "answer": math.nan},
            {"id": "a", "prompt": "?", "meta": {"deep": [math.nan]}},
        ):
            refused = await post("/graft/sessions", {"task": task})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "task"
        refused = await post("/graft/sessions", {"metadata": {"a": math.nan}})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "metadata"
        opened = await post("/graft/sessions")
        at = f"/graft/sessions/{opened['id']}"
        ended = await post(f"{at}/end", {"status": "done"}, opened["key"])
        assert ended["status"] == "env_error"  # nothing was answered, so nothing can be trained
        late = await post(f"{at}/reward", {"value": 1.0}, opened["key"])
        assert late.status_code in (401, 404) and "may have ended" in late.text
        assert (await attempt(post, reward=1.0))["ended"]["status"] == "done"
    (episode,) = await collected
    assert [leaf.status for leaf in episode.leaves] == [Status.ENV_ERROR, Status.DONE]
    assert "without a call" in episode.leaves[0].info["error"]


async def test_without_a_free_attempt_a_client_waits_and_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(external, "CLAIM_SECONDS", 0.05)

    async with offered(tasks=1, samples=1) as (post, collected):
        opened = await post("/graft/sessions")
        late = await post("/graft/sessions")
        assert late.status_code == 503 and "no attempt was free" in late.text
        await post(f"/s/{opened['id']}/v1/chat/completions", HELLO, opened["key"])
        await post(f"/graft/sessions/{opened['id']}/end", {"reward": 1}, opened["key"])
    (episode,) = await collected
    assert episode.leaves[0].reward == 1.0


async def test_claims_that_wait_when_a_step_is_complete_are_asked_to_come_again():
    agents = ExternalAgents()
    waiting = asyncio.ensure_future(agents.open(None, {}))
    await asyncio.sleep(0)
    agents.release()
    for claim in (waiting, agents.open(None, {})):  # one that came before, one after
        with pytest.raises(RefusedRequest, match="ask again") as refused:
            await claim
        assert refused.value.kind == "overloaded"

"""A program that crashes on an answer: what becomes of its attempt, and of a step in which all crash."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from graft.rollout.batching import to_batch, trajectories_of
from graft.train.errors import RunStopped
from graft.train.step_metrics import is_dead, refuse_unusable
from graft.types import Status, Task
from graft.user_code import UserCodeError
from tests.gateway.test_attempts import attempts

pytest.importorskip("uvicorn")

PROGRAM = """
import json, os, sys, urllib.request
body = json.dumps({"model": "x", "messages": [{"role": "user", "content": "hi"}], **json.loads(sys.argv[1])})
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
def post(body):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, body.encode(), key))
post(json.dumps({"messages": [{"role": "user", "content": "first"}]}))
post(body)
print("reading the answer", file=sys.stderr)
raise ValueError("no JSON in it")
"""


async def rewarded(task: Task, client: Any) -> float:
    said = await client.chat(task.prompt)
    client.reward(0.5, said["id"])
    client.reward(0.25)
    raise KeyError("no such tool")


def num_trained(episode: Any) -> int:
    return int(to_batch(trajectories_of([episode])).mask.sum())


def test_a_crash_on_an_answer_earns_nothing_and_is_trained():
    (episode,), _ = attempts(rewarded)
    for leaf in episode.leaves:
        assert (leaf.status, leaf.reward, leaf.metrics["agent/crashes"]) == (
            Status.CRASHED,
            0.0,
            1.0,
        )
        assert "no such tool" in leaf.info["error"] and "KeyError" in leaf.info["output"]
    assert [span.reward for span in episode.spans] == [0.0] * len(episode.spans)
    assert num_trained(episode) > 0


def test_a_recipe_may_drop_crashes():
    (episode,), _ = attempts(rewarded, agents={"on_crash": "drop"})
    assert [leaf.status for leaf in episode.leaves] == [Status.ENV_ERROR] * 2
    assert episode.leaves[0].metrics["agent/crashes"] == 1.0 and not trajectories_of([episode])


def test_a_step_in_which_all_programs_crash_ends_the_run_with_their_last_lines():
    (episode,), _ = attempts([sys.executable, "-c", PROGRAM, "{}"], samples=1)
    assert episode.leaves[0].status is Status.CRASHED
    with pytest.raises(RunStopped) as told:
        refuse_unusable([episode], trajectories_of([episode]))
    assert "exit code 1" in str(told.value)
    assert str(told.value).splitlines()[-1] == "  | ValueError: no JSON in it"
    assert "reading the answer" in str(told.value)


def test_a_refused_request_is_no_crash_of_the_policys_making():
    refused = '{"logit_bias": {"1": 2}}'
    (episode,), _ = attempts([sys.executable, "-c", PROGRAM, refused], samples=1)
    (leaf,) = episode.leaves
    assert leaf.status is Status.ENV_ERROR and "had refused its last request" in leaf.info["error"]
    assert "logit_bias" in leaf.info["error"]

    async def asks_too_much(task: Task, client: Any) -> float:
        await client.chat(task.prompt)
        await client.chat(task.prompt, logit_bias={"1": 2})
        return 1.0

    (episode,), _ = attempts(asks_too_much, samples=1)
    assert episode.leaves[0].status is Status.ENV_ERROR


def test_a_refused_first_request_is_told_where_the_run_ends():
    at_once = PROGRAM.replace('{"messages": [{"role": "user", "content": "first"}]}', "{}")
    (episode,), _ = attempts([sys.executable, "-c", at_once, "{}"], samples=1)
    assert episode.leaves[0].status is Status.ENV_ERROR and at_once != PROGRAM
    with pytest.raises(RunStopped) as told:
        refuse_unusable([episode], trajectories_of([episode]))
    assert "messages" in str(told.value) and "exit code 1" in str(told.value)


def test_crashes_beside_good_attempts_go_on():
    assert not is_dead(["done", "crashed", "crashed"])
    assert not is_dead(["truncated", "crashed"])
    assert is_dead(["crashed", "env_error"]) and is_dead(["truncated", "env_error"])


def test_the_word_is_checked():
    import graft

    with pytest.raises(UserCodeError, match="zero and drop"):
        graft.rollout(on_crash="ignore")(rewarded)

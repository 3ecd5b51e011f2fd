"""Forks of agents by replayed prefixes: the branches arpo and aepo over attempts that programs make."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from graft.config import ConfigError, load_config
from graft.models.tree.forest import Forest
from graft.rollout.batching import to_batch, trajectories_of
from graft.rollout.branches.entropy import aepo, arpo
from graft.rollout.collect import collect
from graft.train.rollouts.agents import refuse_forks
from graft.train.step_metrics import describe
from graft.types import Author, Episode, Status, Task
from tests.gateway.test_attempts import setup_with

pytest.importorskip("uvicorn")


async def three_calls(task: Task, client: Any) -> float:
    messages = [*task.prompt]
    for number in range(3):
        messages.append(await client.chat(messages))
        client.reward(0.125, messages[-1]["id"])
        messages.append({"role": "user", "content": f"step {number}"})
    return 1.0


COUNTER = count()


async def never_the_same(task: Task, client: Any) -> float:
    for _ in range(3):
        await client.chat(f"request {next(COUNTER)}")
    return 1.0


def grown(program: Any, branch: Any) -> tuple[Episode, Any]:
    setup = replace(setup_with(program), samples=6)
    try:
        (episode,) = collect([Task("question:0", "question")], setup, branch)
    finally:
        setup.close()
    return episode, setup


@pytest.mark.parametrize("make", [arpo, pytest.param(aepo, marks=pytest.mark.slow)])
def test_forks_repeat_the_first_calls_and_share_their_spans(make: Any):
    how = {"dynamic": False} if make is aepo else {}
    branch = make(6, initial_rollouts=2, branch_probability=1.0, entropy_weight=0.0, **how)
    episode, setup = grown(three_calls, branch)
    replayed = [leaf.metrics.get("agent/replayed", 0.0) for leaf in episode.leaves]
    # two from the start; both fork at call 1, then at call 2
    assert replayed == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert all(leaf.status is Status.DONE for leaf in episode.leaves)
    rows = [row.spans for row in episode.trajectories()]
    turns = [[s for s in spans if s.author is Author.POLICY] for spans in rows]
    for fork, at in zip(turns[2:], replayed[2:], strict=True):
        (source,) = [root for root in turns[:2] if root[0] is fork[0]]
        assert [a is b for a, b in zip(fork, source, strict=True)] == [n < at for n in range(3)]
    # a fork has its own reward, and rewards of shared answers are counted once
    assert [leaf.reward for leaf in episode.leaves] == [1.375] * 6
    assert [sum(s.reward for s in spans) for spans in rows] == [1.375] * 6
    batch = to_batch(trajectories_of([episode]))
    with torch.no_grad():
        forest = Forest(trajectories_of([episode]), batch.mask, torch.device("cpu"))
        logp, _ = forest.logprobs(setup.engine.decoder)
    torch.testing.assert_close(logp[batch.mask], batch.logprobs[batch.mask], atol=1e-5, rtol=0)
    told = describe([episode])
    assert (told["branch/roots"], told["branch/forks"]) == (2.0, 4.0)
    assert told["branch/shared_tokens"] > 0


def test_a_fork_whose_agent_does_not_repeat_itself_is_given_up_and_counted():
    episode, _ = grown(never_the_same, arpo(6, initial_rollouts=2, branch_probability=1.0))
    assert len(episode.leaves) == 6 and all(leaf.status is Status.DONE for leaf in episode.leaves)
    assert sum(leaf.metrics.get("agent/forks_given_up", 0.0) for leaf in episode.leaves) == 4.0
    assert all(leaf.metrics.get("agent/replayed", 0.0) == 0.0 for leaf in episode.leaves)
    assert not [span for span in episode.spans if "error" in span.info]


def test_an_agent_that_ends_early_in_a_fork_is_given_up():
    seen = count()

    async def shorter(task: Task, client: Any) -> float:
        messages = [*task.prompt]
        for _ in range(3 if next(seen) < 1 else 1):
            messages += [await client.chat(messages), {"role": "user", "content": "and?"}]
        return 1.0

    branch = arpo(3, initial_rollouts=1, branch_probability=1.0)
    setup = replace(setup_with(shorter), samples=3)
    (episode,) = collect([Task("question:0", "question")], setup, branch)
    setup.close()
    assert sum(leaf.metrics.get("agent/forks_given_up", 0.0) for leaf in episode.leaves) == 2.0
    assert [leaf.metrics["turns"] for leaf in episode.leaves] == [3.0, 1.0, 1.0]


def test_branches_that_fork_inside_the_engine_are_refused():
    task = {"env": "arithmetic", "agent": "json:dumps"}
    config = load_config({"model": {"shape": {"width": 8}}, "task": task})
    refuse_forks(config, arpo(4))
    with pytest.raises(ConfigError, match="forks attempts inside the engine"):
        refuse_forks(config, arpo(4, faithful=True))

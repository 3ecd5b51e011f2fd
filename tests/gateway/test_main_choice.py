"""Which conversation of an attempt is the agent's: what the reward reads, and whose answers are trained."""

from __future__ import annotations

import json
from typing import Any

import pytest

from graft.config import ConfigError, check
from graft.gateway.request import AgentRequest
from graft.gateway.roots import Conversation
from graft.gateway.speakers.main_choice import MainPattern, choose_main
from graft.rollout.batching import to_batch, trajectories_of
from graft.train.monitor.check import FAIL, PASS, WARN
from graft.types import Sampling, Task, Trajectory
from tests.gateway.test_agent_doctor import checks_of
from tests.gateway.test_attempts import Question, attempts
from tests.gateway.test_script import scripted
from tests.gateway.tiny import CALCULATOR, asks, said, tiny_gateway

PROMPT = "What is 2+2?"
TASK = Task("t", "none", ({"role": "user", "content": PROMPT},), seed=1)
TITLER = {"role": "system", "content": "You write titles."}
CODER = {"role": "system", "content": "You are a coding agent."}


def thread(number: int, *requests: AgentRequest, answer: str = "ok") -> list[Conversation]:
    message = {"role": "assistant", "content": answer}
    return [
        Conversation(one, ["tools"], "", message, f"{number}.{place}", number)
        for place, one in enumerate(requests)
    ]


def chosen(*threads: list[Conversation], **pattern: str) -> tuple[int | None, str, list[str]]:
    choice = choose_main([s for one in threads for s in one], TASK, MainPattern(**pattern))
    return choice.thread, choice.why, [*choice.roles.values()]


TITLE = thread(0, asks(TITLER, f"Title: {PROMPT}", model="small"))
CODE = thread(1, *[asks(CODER, PROMPT, tools=(CALCULATOR,), model="large")] * 2)
PLAIN = thread(1, *[asks(CODER, PROMPT)] * 2)


def test_the_prompt_then_tools_then_the_length_tell_the_agent():
    sub = ["sub-agent", "main"]
    assert chosen(TITLE, CODE) == (1, "it has tools", sub)
    assert chosen(TITLE, PLAIN) == (1, "it is the longest", sub)
    helper = thread(0, *[asks(TITLER, "look", tools=(CALCULATOR,))] * 3)
    assert chosen(helper, PLAIN) == (1, "it has the task's prompt", sub)
    assert chosen(PLAIN[:1], thread(2, asks(CODER, PROMPT)))[:2] == (2, "it began last")
    assert chosen(PLAIN[:1], thread(2, asks(TITLER, PROMPT)))[:2] == (1, "its agent asked first")
    assert chosen(CODE) == (1, "it is the only one", ["main"])
    assert choose_main([], TASK).thread is None


@pytest.mark.parametrize(
    ("pattern", "main"),
    [
        ({"model": "sm*"}, 0),
        ({"system": "titles"}, 0),
        ({"tools": "a*"}, 1),
        ({"tools": "x"}, None),
    ],
)
def test_a_pattern_chooses_before_all_else(pattern: dict[str, str], main: int | None):
    thread, why, roles = chosen(TITLE, CODE, **pattern)
    assert thread == main and roles.count("main") == (main is not None)
    assert why == ("" if main is None else "it fits agent.main")


def test_what_could_be_the_agent_as_well_is_named():
    assert choose_main([*TITLE, *PLAIN], TASK).rivals == (0,)
    assert choose_main([*TITLE, *CODE], TASK).rivals == ()
    pattern = MainPattern(system="agent")
    assert choose_main([*TITLE, *PLAIN], TASK, pattern).rivals == ()


def test_a_simulated_user_is_known_by_what_the_agent_reads():
    agent, user = asks(CODER, PROMPT, tools=(CALCULATOR,)), asks(TITLER, PROMPT)
    turns = [{"role": "assistant", "content": "which?"}, {"role": "user", "content": "red"}]
    more = AgentRequest((*agent.messages, *turns), (CALCULATOR,))
    told = thread(0, *[user] * 5, answer="red")  # the task's prompt, and longer
    assert chosen(told, thread(1, agent, more)) == (
        1,
        "the other one plays its user",
        ["user", "main"],
    )
    assert chosen(told, thread(1, agent, more), system="titles")[2] == ["main", "sub-agent"]
    assert chosen(thread(0, user, answer="blue"), thread(1, agent, more))[2] == [
        "sub-agent",
        "main",
    ]


async def title_then_agent(task: Task, client: Any) -> None:
    """opencode's shape."""
    await client.chat([TITLER, *task.prompt])
    messages: list[Any] = [CODER, *task.prompt]
    for _ in range(2):
        messages.append(await client.chat(messages, [CALCULATOR], max_tokens=4))
        messages.append({"role": "user", "content": "go on"})


def test_the_reward_reads_the_agent_and_not_the_title_before_it():
    read: list[str] = []

    def reward(task: Task, trajectory: Trajectory) -> float:
        read.append(trajectory.spans[0].text + trajectory.spans[1].text)
        return 1.0

    (episode,), _ = attempts(title_then_agent, reward=reward)
    assert len(read) == 2 and all("coding agent" in text for text in read)
    for leaf in episode.leaves:
        contexts = leaf.info["contexts"]
        assert [(one["role"], one["reason"]) for one in contexts] == [
            ("sub-agent", "sub-agent"),
            ("main", "first"),
        ]
        assert leaf.reward == 1.0 and leaf.metrics["agent/no_main"] == 0
    attempts(title_then_agent, reward=reward, agents={"main": MainPattern(system="titles")})
    assert "titles" in read[-1]
    (episode,), _ = attempts(title_then_agent, agents={"main": MainPattern(model="x")})
    leaf = episode.leaves[0]
    assert leaf.status == "env_error" and "'You write titles.', no tools" in leaf.info["error"]
    assert leaf.metrics["agent/no_main"] == 1


async def test_only_the_agent_is_trained_if_so_asked_and_a_simulated_user_never_unless_asked():
    for roles, trained in (
        (("main",), {"agent"}),
        (("main", "sub-agent", "summary"), {"agent"}),
        (("main", "user"), {"agent", "user"}),
    ):
        gateway = tiny_gateway(trained_roles=roles, sampling=Sampling(max_tokens=8))
        session = gateway.open(TASK)
        (asked,) = await session.answer(asks(TITLER, PROMPT))  # it plays the user
        first = [CODER, {"role": "user", "content": PROMPT}]
        (a,) = await session.answer(asks(*first, tools=(CALCULATOR,)))
        more = [*first, said(a), {"role": "user", "content": asked.content}]
        (b,) = await session.answer(asks(*more, tools=(CALCULATOR,)))
        leaf = session.end()
        assert leaf.metrics["agent/user_answers"] == 1
        sizes = {"agent": len(a.tokens) + len(b.tokens), "user": len(asked.tokens)}
        mask = to_batch(trajectories_of([session.forest.episode()])).mask
        assert int(mask.sum()) == sum(sizes[name] for name in trained)
        gateway.policy.engine.close()


def test_doctor_shows_the_choice_and_warns_where_two_could_be():
    async def two_agents(task: Task, client: Any) -> float:
        for system in (TITLER, CODER):
            await client.chat([system, *task.prompt])
        return 1.0

    found = checks_of(title_then_agent)["agent main"]
    assert found.verdict == PASS and found.data is not None
    assert (found.data["main"], found.data["why"]) == (1, "it has tools")
    assert "conversation 2 of 2" in found.seen.splitlines()[0]
    found = checks_of(two_agents)["agent main"]
    assert found.verdict == WARN and "agent.main" in found.remedy
    assert checks_of(two_agents, agents={"main": MainPattern(system="titles")})[
        "agent main"
    ].data == {
        "main": 0,
        "why": "it fits agent.main",
        "rivals": [],
        "roles": {0: "main", 1: "sub-agent"},
    }
    found = checks_of(two_agents, agents={"main": MainPattern(tools="bash")})["agent main"]
    assert found.verdict == FAIL and "agent.main={tools: 'bash'}" in found.seen


def test_the_recipe_takes_patterns_of_three_things():
    recipe = {"model": {"path": "m"}, "task": {"env": Question.env_id, "agent": "x"}}
    assert check({**recipe, "agent": {"main": {"tools": "bash"}}}).agent.main == {"tools": "bash"}
    with pytest.raises(ConfigError, match=r"agent\.main"):
        check({**recipe, "agent": {"main": {"prompt": "x"}}})


SUMMARY = "The numbers were two and two, and their sum is four."


async def test_a_summary_that_is_asked_for_on_the_side_is_a_compaction():
    session = scripted('"It is four."', '"It is five."', '"six"').open(TASK)
    writer = scripted(json.dumps(SUMMARY)).policy.engine
    (a,) = await session.answer(asks(CODER, PROMPT, tools=(CALCULATOR,)))
    first = [
        CODER,
        {"role": "user", "content": PROMPT},
        said(a),
        {"role": "user", "content": "go on"},
    ]
    await session.answer(asks(*first, tools=(CALCULATOR,)))
    session.forest.engine, engine = writer, session.forest.engine
    await session.answer(asks(TITLER, "Summarise: It is four. It is five."))
    session.forest.engine = engine
    await session.answer(asks(CODER, f"So far: {SUMMARY} Go on.", tools=(CALCULATOR,)))
    leaf = session.end()
    assert [(one.reason, one.role, one.thread) for one in session.contexts] == [
        ("first", "main", 0),
        ("sub-agent", "sub-agent", 1),
        ("compaction", "main", 0),
    ]
    roles = [done.role for done in session.history.answers.values()]
    assert roles == ["main", "main", "summary", "main"]
    assert session.main.thread == 0 and leaf.metrics["agent/roots/compaction"] == 1


async def test_a_helpers_answer_in_a_longer_history_is_no_summary():
    session = scripted(json.dumps(SUMMARY), '"yes"').open(TASK)
    (a,) = await session.answer(asks(CODER, PROMPT))
    first = [CODER, {"role": "user", "content": PROMPT}, said(a)]
    await session.answer(asks(*first, "go on"))
    (b,) = await session.answer(asks(TITLER, "look"))
    other = {**said(a), "content": "rewritten"}
    await session.answer(asks(CODER, PROMPT, other, f"The helper: {b.content}", "go on"))
    assert (
        session.counts["roots/compaction"] == 0 and session.counts["roots/rewritten history"] == 1
    )

"""tool_choice and parallel calls: what a client demands begins the answer, and the rest is sampled."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tiny import CALCULATOR, TASK, asks, said

from graft.gateway.dialects.dialect import DIALECTS
from graft.gateway.gateway import Gateway
from graft.gateway.policy import ServedPolicy
from graft.gateway.reading import read_answer
from graft.gateway.request import AgentRequest, PolicyAnswer, RefusedRequest
from graft.text.chat import Chat
from graft.text.template import TEMPLATES
from graft.types import Completion, Finish, Sampling
from tests.gateway.written_policy import WrittenPolicy, check_episodes

MULTIPLY = {"type": "function", "function": {"name": "mul", "description": "", "parameters": {}}}
TOOLS = (CALCULATOR, MULTIPLY)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
RULES = [
    ("", r'"mul", "arguments":$', ' {"b": 2}}\n</tool_call>'),
    ("", r'\{"name":$', ' "add", "arguments": {"a": 1}}\n</tool_call>'),
    ("nonsense?", r'"arguments":$', " <<<"),
    ("", r'"arguments":$', ' {"a": 1}}\n</tool_call>'),
    ("", r"both\?", f"{CALL}\n{CALL}"),
    ("", r"one\?", CALL),
    ("", r"", "done"),
]


FUNCTION = {"type": "function", "function": {"name": "add"}}
ASK = {"messages": [{"role": "user", "content": "1?"}], "tools": [FUNCTION]}
INPUT = {"input": "1?", "tools": [{"type": "function", "name": "add"}]}
CLAUDE = {**ASK, "max_tokens": 9, "tools": [{"name": "add", "input_schema": {}}]}
SERIAL, ONE_CALL = (
    {"parallel_tool_calls": False},
    {"type": "auto", "disable_parallel_tool_use": True},
)


@pytest.mark.parametrize(
    ("dialect", "body", "choice", "is_parallel"),
    [
        ("openai_chat", ASK, "auto", True),
        ("openai_chat", {**ASK, "parallel_tool_calls": True}, "auto", True),
        ("openai_chat", {**ASK, "tool_choice": "none"}, "none", True),
        ("openai_chat", {**ASK, "tool_choice": "required", **SERIAL}, "required", False),
        ("openai_chat", {**ASK, "tool_choice": FUNCTION}, "add", True),
        ("openai_responses", {**INPUT, **SERIAL}, "auto", False),
        ("openai_responses", {**INPUT, "tool_choice": INPUT["tools"][0]}, "add", True),
        ("anthropic", {**CLAUDE, "tool_choice": {"type": "any"}}, "required", True),
        ("anthropic", {**CLAUDE, "tool_choice": {"type": "tool", "name": "add"}}, "add", True),
        ("anthropic", {**CLAUDE, "tool_choice": {"type": "none"}}, "none", True),
        ("anthropic", {**CLAUDE, "tool_choice": ONE_CALL}, "auto", False),
    ],
)
def test_every_dialect_says_which_calls_it_wants(
    dialect: str, body: dict[str, Any], choice: str, is_parallel: bool
) -> None:
    request = DIALECTS[dialect].read(body, {})
    assert (request.tool_choice, request.parallel_calls) == (choice, is_parallel)


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("openai_chat", {**ASK, "tool_choice": "any"}),
        ("openai_chat", {**ASK, "tool_choice": 1}),
        ("openai_chat", {**ASK, "tool_choice": {"type": "allowed_tools"}}),
        ("openai_chat", {**ASK, "parallel_tool_calls": "no"}),
        ("openai_responses", {**INPUT, "tool_choice": {"type": "function", "name": "sub"}}),
        ("anthropic", {**CLAUDE, "tool_choice": {"type": "required"}}),
        ("anthropic", {**CLAUDE, "tool_choice": "any"}),
    ],
)
def test_other_values_are_refused(dialect: str, body: dict[str, Any]) -> None:
    with pytest.raises(RefusedRequest) as refused:
        DIALECTS[dialect].read(body, {})
    assert str(refused.value.param).startswith(("tool_choice", "parallel_tool_calls"))


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Iterator[WrittenPolicy]:
    made = WrittenPolicy(monkeypatch, RULES, kv_tokens=1 << 14)
    yield made
    made.engine.close()


def talk(
    policy: WrittenPolicy, *requests: Any, history: str = "append"
) -> tuple[Any, list[PolicyAnswer]]:
    """The session and its answers; a request may be a function of the answer before it."""
    chat = Chat(policy.tokenizer, history=history)
    gateway = Gateway(policy.engine, chat, sampling=Sampling(max_tokens=999), max_context=9999)
    session = gateway.open(TASK)

    async def ask() -> list[PolicyAnswer]:
        answers: list[PolicyAnswer] = []
        for request in requests:
            made = request if isinstance(request, AgentRequest) else request(answers[-1])
            answers += await session.answer(made)
        return answers

    answers = asyncio.run(ask())
    session.end()
    check_episodes(policy, [session.forest.episode()])
    return session, answers


def results(answer: PolicyAnswer) -> list[dict[str, Any]]:
    return [{"role": "tool", "content": "3", "tool_call_id": one.id} for one in answer.calls]


@pytest.mark.parametrize(
    ("choice", "opening", "name", "arguments"),
    [
        ("mul", '<tool_call>\n{"name": "mul", "arguments":', "mul", '{"b": 2}'),
        ("add", '<tool_call>\n{"name": "add", "arguments":', "add", '{"a": 1}'),
        ("required", '<tool_call>\n{"name":', "add", '{"a": 1}'),
    ],
)
def test_a_call_is_begun_and_the_rest_is_sampled_and_trained(
    policy: WrittenPolicy, choice: str, opening: str, name: str, arguments: str
) -> None:
    session, (first, second) = talk(
        policy,
        asks("1+2?", tools=TOOLS, tool_choice=choice),
        lambda one: asks("1+2?", said(one), *results(one), tools=TOOLS),
    )
    (call,) = first.calls
    assert (call.name, call.arguments, first.content) == (name, arguments, "")
    assert (first.finish, second.content) == ("tool_calls", "done")
    (row,) = session.forest.episode().trajectories()
    decode = policy.tokenizer.decode
    assert decode(row.spans[0].tokens).endswith(f"assistant\n{opening}")
    assert opening + decode(row.spans[1].tokens).removesuffix("<|im_end|>") == CALL.replace(
        '"add", "arguments": {"a": 1}', f'"{name}", "arguments": {arguments}'
    )
    assert first.prompt_tokens == len(row.spans[0].tokens)
    assert [any(span.mask) for span in row.spans] == [False, True, False, True]


def test_one_tool_that_is_required_is_named(policy: WrittenPolicy) -> None:
    talk(policy, asks("1+2?", tools=(MULTIPLY,), tool_choice="required"))
    assert policy.tokenizer.decode(policy.samples[0].prompt).endswith('"mul", "arguments":')


def test_a_call_in_the_middle_of_a_conversation_is_begun_in_its_context(
    policy: WrittenPolicy,
) -> None:
    session, (_, second) = talk(
        policy,
        asks("hi", tools=TOOLS),
        lambda one: asks("hi", said(one), "1+2?", tools=TOOLS, tool_choice="add"),
    )
    assert second.calls and len(session.contexts) == 1
    span = session.forest.episode().spans[2]
    assert span.text.endswith('1+2?\n<tool_call>\n{"name": "add", "arguments":')


def test_a_template_that_is_followed_exactly_writes_the_begun_call_as_it_is(
    policy: WrittenPolicy,
) -> None:
    session, (first, second) = talk(
        policy,
        asks("1+2?", tools=TOOLS, tool_choice="add"),
        lambda one: asks("1+2?", said(one), *results(one), tools=TOOLS),
        history="template",
    )
    assert first.calls and second.content == "done" and len(session.contexts) == 1


def test_what_is_no_call_after_all_is_text(policy: WrittenPolicy) -> None:
    session, (answer,) = talk(policy, asks("nonsense?", tools=TOOLS, tool_choice="add"))
    assert answer.content == '<tool_call>\n{"name": "add", "arguments": <<<'
    assert not answer.calls and session.counts["malformed_calls"] == 1


def test_with_none_a_call_is_text_and_the_tools_stay_in_the_context(policy: WrittenPolicy) -> None:
    session, (first, second) = talk(
        policy,
        asks("one?", tools=TOOLS, tool_choice="none"),
        lambda one: asks("one?", said(one), "one? please", tools=TOOLS),
    )
    assert first.content == CALL and not first.calls and first.finish == "stop"
    assert second.calls and len(session.contexts) == 1
    assert '"mul"' in policy.tokenizer.decode(policy.samples[0].prompt)


def test_an_answer_with_one_call_ends_with_it(policy: WrittenPolicy) -> None:
    one_call = {"tools": TOOLS, "parallel_calls": False}
    session, (first, second) = talk(
        policy,
        asks("both?", **one_call),
        lambda one: asks("both?", said(one), *results(one), **one_call),
    )
    assert len(first.calls) == 1 and second.content == "done" and len(session.contexts) == 1
    sampled = policy.tokenizer.decode(list(first.tokens))
    assert sampled.startswith(CALL) and sampled.count("<tool_call>") == 1
    policy.samples.clear()
    assert len(talk(policy, asks("both?", tools=TOOLS))[1][0].calls) == 2


LIST = TEMPLATES["chatml"].replace("</tool_call>", "").replace("<tool_call>", "")


def test_of_a_list_of_calls_the_first_is_answered(policy: WrittenPolicy) -> None:
    """A template whose calls have no end of their own."""
    chat, sampling = Chat(policy.tokenizer, LIST), Sampling(max_tokens=8)
    served = ServedPolicy(policy.engine, chat, sampling=sampling)
    request = asks("both?", tools=TOOLS, parallel_calls=False)
    assert served.syntax.close == "" and served.sampling_for(request, 4)[0].stop == ()
    bare = re.sub(r"</?tool_call>\n?", "", CALL)
    part = Completion([1], [1], [0.0], [0.0], [0], Finish.STOP, 0)
    answer, message = read_answer(served, request, f"{bare}{bare}", [part], "7f", (4, 0))
    assert len(answer.calls) == len(message["tool_calls"]) == 1


BEGUN = {"role": "assistant", "content": "It"}
ODD = {"type": "function", "function": {"name": 'a"b'}}


@pytest.mark.parametrize(
    "request_",
    [
        asks("1?", BEGUN, tools=TOOLS, tool_choice="add"),  # the answer is begun already
        asks("1?", tools=(ODD,), tool_choice="required"),  # the start of such a call is not known
    ],
)
def test_a_choice_that_cannot_be_enforced_is_refused(
    policy: WrittenPolicy, request_: AgentRequest
) -> None:
    with pytest.raises(RefusedRequest) as refused:
        talk(policy, request_)
    assert refused.value.param == "tool_choice"

"""Tools that programs offer by default, and the fields around them: what is shown, dropped, refused."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from graft.gateway.dialects import anthropic, openai_chat, openai_responses
from graft.gateway.dialects.response_store import ResponseStore
from graft.gateway.request import AnsweredCall, PolicyAnswer, RefusedRequest
from graft.train.monitor.check import PASS, WARN
from graft.types import Task
from tests.gateway.dialect_kit import TOOL, data_of
from tests.gateway.test_agent_doctor import checks_of
from tests.gateway.test_attempts import attempts
from tests.gateway.test_script import scripted
from tests.gateway.test_server import HELLO, bearer, served
from tests.gateway.tiny import CALCULATOR, TASK, asks, tiny_gateway

ASK = {"role": "user", "content": "1+2?"}
FLAT = {"type": "function", "name": "add", "parameters": {"type": "object"}}
FILES = {"type": "namespace", "name": "files", "tools": [{**FLAT, "name": "read"}]}


def responses(*tools: Any, items: Any = "1+2?", **more: Any) -> Any:
    body = {"model": "m", "input": items, "tools": [*tools], **more}
    return openai_responses.read(body, {})


def names(request: Any) -> list[str]:
    return [tool["function"]["name"] for tool in request.tools]


def test_what_a_provider_would_run_is_left_out_and_the_rest_is_shown():
    request = responses(FLAT, {"type": "web_search"}, FILES, {"type": "local_shell"})
    assert names(request) == ["add", "files__read"]
    assert request.dropped_tools == ("web_search", "local_shell")
    chat = openai_chat.read(
        {"messages": [ASK], "tools": [TOOL, {"type": "web_search"}], "web_search_options": {}}, {}
    )
    assert names(chat) == ["add"] and chat.dropped_tools == ("web_search", "web_search_options")


def test_a_function_of_a_namespace_is_called_by_both_names():
    item = {"type": "function_call", "call_id": "c", "namespace": "files", "name": "read"}
    output = {"type": "function_call_output", "call_id": "c", "output": "x"}
    request = responses(FILES, items=[ASK, {**item, "arguments": "{}"}, output])
    assert request.messages[1]["tool_calls"][0]["function"]["name"] == "files__read"
    assert request.messages[2]["name"] == "files__read"
    called = PolicyAnswer("7f", "", calls=(AnsweredCall("c", "files__read", "{}"),))
    (made,) = openai_responses.answer(request, [called])["output"]
    assert (made["namespace"], made["name"]) == ("files", "read")
    events = data_of(b"".join(openai_responses.events(request, [called])))
    assert events[0]["item"]["namespace"] == "files"
    assert responses({**FILES, "name": "mcp__git__"}).namespaces == {
        "mcp__git__read": ("mcp__git__", "read")
    }


@pytest.mark.parametrize(
    ("kind", "name", "fields"),
    [
        ("bash_20250124", "bash", {"command", "restart"}),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"command", "path", "old_str"}),
        ("memory_20250818", "memory", {"command", "old_path", "new_path"}),
    ],
)
def test_anthropics_tools_that_run_in_the_agent_are_functions(
    kind: str, name: str, fields: set[str]
):
    tools = [{"type": kind, "name": name}, {"type": "web_search_20250305", "name": "web_search"}]
    body = {"messages": [ASK], "max_tokens": 5, "tools": tools}
    request = anthropic.read(body, {})
    assert names(request) == [name] and request.dropped_tools == ("web_search_20250305",)
    assert fields <= {*request.tools[0]["function"]["parameters"]["properties"]}


def test_a_redacted_thought_is_left_out():
    blocks = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "3"}]
    turns = [ASK, {"role": "assistant", "content": blocks}, ASK]
    request = anthropic.read({"messages": turns, "max_tokens": 5}, {})
    assert request.messages[1] == {"role": "assistant", "content": "3"}


def allowed(mode: str, *tools: str) -> tuple[str, tuple[str, ...]]:
    """What both of OpenAI's dialects make of allowed_tools."""
    listed = [{"type": "function", "name": name} for name in tools]
    flat = {"type": "allowed_tools", "mode": mode, "tools": listed}
    request = responses(FLAT, FILES, tool_choice=flat)
    inner = [{"type": "function", "function": {"name": name}} for name in tools]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": inner}}
    offered = [TOOL, {"type": "function", "function": {"name": "files__read"}}]
    chat = openai_chat.read({"messages": [ASK], "tools": offered, "tool_choice": choice}, {})
    assert (chat.tool_choice, chat.allowed) == (request.tool_choice, request.allowed)
    return request.tool_choice, request.allowed


def test_allowed_tools_are_a_choice_among_some():
    assert allowed("auto", "add") == ("auto", ("add",))
    assert allowed("required", "add") == ("add", ("add",))
    assert allowed("required", "add", "files__read") == ("required", ("add", "files__read"))
    assert allowed("auto") == ("none", ())
    for mode, name in (("any", "add"), ("auto", "lost")):
        with pytest.raises(RefusedRequest):
            allowed(mode, name)


async def test_a_call_that_is_not_allowed_is_text():
    call = '{"tool_calls": [{"name": "add", "arguments": {}}]}'
    session = scripted(call, call).open(TASK)
    (barred,) = await session.answer(asks("1+2?", tools=(CALCULATOR,), allowed=("other",)))
    assert (barred.calls, barred.finish) == ((), "stop") and "<tool_call>" in barred.content
    (free,) = await session.answer(asks("1+2?", tools=(CALCULATOR,), allowed=("add",)))
    assert [one.name for one in free.calls] == ["add"]
    assert session.counts["malformed_calls"] == 1


async def test_tools_of_a_provider_are_named_once_counted_or_refused(caplog):
    gateway = tiny_gateway()
    session = gateway.open(TASK)
    for text in ("a", "b"):
        await session.answer(asks(text, dropped_tools=("web_search",), max_tokens=1))
    assert session.end().metrics["agent/provider_tools"] == 2
    assert caplog.text.count("'web_search'") == 1
    gateway.policy.provider_tools = "refuse"
    with pytest.raises(RefusedRequest, match=r"web_search.*agent\.provider_tools=drop") as refused:
        await gateway.open(TASK).answer(asks("a", dropped_tools=("web_search",)))
    assert refused.value.param == "tools"
    gateway.policy.engine.close()


def test_the_tokens_and_the_likeliest_of_them_are_told_if_asked():
    body = {"messages": [ASK], "return_token_ids": True, "logprobs": True, "top_logprobs": 5}
    request = openai_chat.read(body, {})
    done = PolicyAnswer("7f", "x", tokens=(3,), token_texts=("x",), logprobs=(-0.5,), prompt=(1, 2))
    whole = openai_chat.answer(request, [done])
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == ([1, 2], [3])
    (token,) = whole["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in token["top_logprobs"]] == [-0.5]
    events = data_of(b"".join(openai_chat.events(request, [done])))
    assert events[0]["prompt_token_ids"] == [1, 2]
    assert events[-2]["choices"][0]["token_ids"] == [3]
    plain = openai_chat.answer(openai_chat.read({"messages": [ASK]}, {}), [done])
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]


@served()
async def test_ids_of_tokens_come_over_http_and_responses_are_shown_and_forgotten(
    address, gateway, client
):
    session = gateway.open(TASK)
    key = bearer(session.key)
    ask = {**HELLO, "return_token_ids": True, "max_tokens": 2}
    done = (await client.post("/v1/chat/completions", json=ask, headers=key)).json()
    (answer,) = session.history.answers.values()
    assert done["choices"][0]["token_ids"] == list(answer.answer.tokens)
    assert done["prompt_token_ids"] == answer.tokens[: -len(answer.answer.tokens)]
    asked = {"model": "m", "input": "hello", "max_output_tokens": 2}
    made = (await client.post("/v1/responses", json=asked, headers=key)).json()
    url = f"/v1/responses/{made['id']}"
    assert (await client.get(url, headers=key)).json() == made
    assert (await client.delete(url, headers=key)).json()["deleted"] is True
    assert (await client.get(url, headers=key)).status_code == 404
    assert (await client.delete(url, headers=key)).status_code == 404
    more = {**asked, "previous_response_id": made["id"]}
    assert (await client.post("/v1/responses", json=more, headers=key)).status_code == 400


def test_a_store_forgets_the_items_too():
    store, response = ResponseStore(), {"id": "resp_a", "output": [{"id": "msg_a"}]}
    store.keep({"input": "x"}, response)
    assert store.get("resp_a") == response and store.delete("resp_a")["id"] == "resp_a"
    with pytest.raises(RefusedRequest):
        store.resolve({"input": "y", "previous_response_id": "resp_a"})


async def refusing(task: Task, client: Any) -> float:
    await client.chat(task.prompt)
    for more in (
        {"logit_bias": {"1": 2}},
        {"tools": [{"type": "function", "function": {}}]},
        {"logit_bias": {"1": 1}},
    ):
        with pytest.raises(RefusedRequest):
            await client.chat(task.prompt, **more)
    await client.chat([*task.prompt, ASK], [{"type": "web_search"}])
    return 1.0


def test_refused_fields_are_counted_by_name_and_shown_by_doctor(caplog):
    caplog.set_level(logging.ERROR, "graft")
    (episode,), _ = attempts(refusing, samples=1)
    (leaf,) = episode.leaves
    counted = {name: n for name, n in leaf.metrics.items() if "refused_fields" in name}
    assert leaf.status == "done"
    assert counted == {
        "agent/refused_fields/logit_bias": 2.0,
        "agent/refused_fields/tools.function.name": 1.0,
    }
    found = checks_of(refusing)
    assert found["agent fields"].verdict == WARN
    assert found["agent fields"].data == {"refused": {"logit_bias": 2, "tools.function.name": 1}}
    assert found["agent provider tools"].verdict == PASS
    assert found["agent provider tools"].data == {"dropped_tools": ["web_search"]}
    assert json.dumps(found["agent fields"].data)


PATCH = {"name": "patch", "description": "Edits.", "format": {"type": "text"}}


@pytest.mark.parametrize("dialect", [openai_chat, openai_responses])
def test_a_custom_tool_takes_a_text_and_its_call_is_read_again(dialect: Any):
    is_chat = dialect is openai_chat
    name, tool = ("messages", {"custom": PATCH}) if is_chat else ("input", PATCH)
    user = {"role": "user", "content": "x"}
    choice = {"type": "custom", **({"custom": {"name": "patch"}} if is_chat else {"name": "patch"})}
    body = {"model": "m", name: [user], "tools": [{"type": "custom", **tool}]}
    request = dialect.read({**body, "tool_choice": choice}, {})
    (shown,) = request.tools
    assert shown["function"]["parameters"]["required"] == ["input"]
    assert (request.text_tools, request.tool_choice) == (("patch",), "patch")
    call = AnsweredCall("call_1", "patch", json.dumps({"input": "*** a\n+b"}))
    given = [PolicyAnswer("7f", "", calls=(call,), finish="tool_calls")]
    whole = dialect.answer(request, given)
    said = [whole["choices"][0]["message"]] if is_chat else whole["output"]
    made = said[0]["tool_calls"][0]["custom"] if is_chat else said[0]
    assert (made["name"], made["input"]) == ("patch", "*** a\n+b")
    result = {"role": "tool", "tool_call_id": "call_1", "content": "done"}
    if not is_chat:
        result = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"}
    again = dialect.read({**body, name: [user, *said, result]}, {})
    _, turn, told = again.messages
    assert turn["tool_calls"][0]["function"]["arguments"] == {"input": "*** a\n+b"}
    assert (told["role"], told["content"], told["name"]) == ("tool", "done", "patch")
    events = data_of(b"".join(dialect.events(request, given)))
    texts = [event.get("input") for event in events if event.get("type", "").endswith("input.done")]
    assert is_chat or texts == ["*** a\n+b"]

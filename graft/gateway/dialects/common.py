"""What the dialects share: messages, tools and calls in the form of a request, whatever the API is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graft.gateway.dialects.fields import RequestFields, check_json, describe_value
from graft.gateway.dialects.tools import OfferedTools
from graft.gateway.request import AgentRequest, RefusedRequest
from graft.types import Message


def request_of(
    fields: RequestFields,
    headers: Mapping[str, str],
    *,
    messages: Sequence[Message],
    tools: OfferedTools,
    choice: str,
    hottest: float,
    **own: Any,
) -> AgentRequest:
    """The request, with the fields that have the same name in every dialect.

    hottest   the highest temperature of the dialect
    own       what it has read itself
    """
    names = [tool["function"]["name"] for tool in tools.functions]
    if unknown := [name for name in own.get("allowed", ()) if name not in names]:
        raise RefusedRequest(
            f"tool_choice allows {describe_value(unknown)}, and the tools are {describe_value(names)}",
            param="tool_choice",
        )
    return AgentRequest(
        messages=_with_tool_names(messages),
        tools=tuple(tools.functions),
        strict_tools=tuple(tools.strict),
        dropped_tools=tuple(tools.dropped),
        namespaces=tools.namespaces,
        model=fields.text("model"),
        stream=fields.flag("stream"),
        tool_choice=_checked_choice(choice, tools.functions),
        agent=_agent_of(headers),
        **_sampling_of(fields, hottest),
        **own,
    )


def read_messages(
    fields: RequestFields, name: str, read: Callable[[RequestFields], list[Message]]
) -> list[Message]:
    """The messages of a list. Most have a role and a text alone, the same in every dialect."""
    made: list[Message] = []
    for number, value in enumerate(fields.items(name)):
        if (plain := _plain_message(value)) is not None:
            made.append(plain)
        else:
            made += read(RequestFields(value, f"{fields.place(name)}.{number}"))
    return made


def _plain_message(value: Any) -> Message | None:
    if type(value) is not dict or type(value.get("content")) is not str:
        return None
    role = value.get("role")
    if role not in ("user", "assistant", "system") or len(value) - _count_none(value) != 2:
        return None
    return {"role": role, "content": value["content"]}


def _count_none(value: dict[str, Any]) -> int:
    return [*value.values()].count(None)


def arguments_of(text: str) -> dict[str, Any] | str:
    """The arguments of a call: an object; what is no JSON object stays the text that it was.

    '{"a": 1}' -> {"a": 1};  "" -> {};  "[1]" -> "[1]";  '{"a": ' -> '{"a": '
    """
    try:
        value = json.loads(text) if text.strip() else {}
        if isinstance(value, dict):
            check_json(value)
            return value
    except (ValueError, RecursionError, RefusedRequest):
        pass
    return text


def function_call(id: str, name: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant_message(content: str, reasoning: str, calls: Sequence[Any]) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def _with_tool_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Tool messages with the name of the call that they answer, which some templates write."""
    names: dict[str, str] = {}
    named: list[Message] = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message = {**message, "name": names[message["tool_call_id"]]}
        named.append(message)
    if not named:
        raise RefusedRequest("there are no messages; send at least one", param="messages")
    return tuple(named)


def _checked_choice(choice: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """A choice of tools that can be made among these."""
    names = [tool["function"]["name"] for tool in tools]
    if choice in ("auto", "none") or choice in names or (choice == "required" and names):
        return choice
    raise RefusedRequest(
        f"tool_choice asks for {describe_value(choice)}, and the tools are {describe_value(names)}",
        param="tool_choice",
    )


def _agent_of(headers: Mapping[str, str]) -> str:
    """The sub-agent that asks, as Claude Code names it."""
    known = {name.lower(): value for name, value in headers.items()}
    return known.get("x-claude-code-agent-id", "")


def _sampling_of(fields: RequestFields, hottest: float) -> dict[str, Any]:
    """How the client wants tokens to be drawn; `hottest` is the highest temperature of its dialect."""
    share, most = fields.number("top_p", 0, 1), fields.whole("top_k", -1)
    return {
        "temperature": fields.number("temperature", 0, hottest),
        # of a share of 0 the most probable token is left, as of a very small one
        "top_p": share if share is None else max(share, 1e-6),
        "top_k": most if most is None else max(most, 0),
    }

"""Chat messages between the policy and a harness: its text as a message; what a request adds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from graft.text.calls import tool_calls
from graft.types import Message
from graft_interop.model_server import ModelRequest


def as_assistant(action: str, style: str, request: ModelRequest) -> Message:
    """The policy's text as a message, with the calls that it contains as `tool_calls`.

    The calls are cut out of the text, or a prompt that repeats the message would show them twice. A
    call that cannot be parsed stays text: the harness sees an answer without calls.
    """
    message: Message = {"role": "assistant", "content": action}
    names = [tool["function"]["name"] for tool in request.tools if "function" in tool]
    calls = [call for call in tool_calls(action, style, names) if not call.error] if names else []
    if calls:
        for call in reversed(calls):
            action = action[: call.start] + action[call.end :]
        message["content"] = action.strip()
        message["tool_calls"] = [
            {
                "id": f"call_{len(request.messages)}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(calls)
        ]
    return message


def added(last: ModelRequest, answer: Message, request: ModelRequest) -> list[Message] | None:
    """The messages that a request adds to the last one and its answer; None if it is not an extension.

    [user], answer "4", [user, assistant "4", tool, tool]    [tool, tool]
    [user], answer "4", [user "summary"]                     None: the history was rewritten

    Only what one turn can append: tool results, or one user message.
    """
    past = [*last.messages, answer]
    fresh = request.messages[len(past) :]
    is_same = len(request.messages) > len(past) and all(map(are_same, past, request.messages))
    if not is_same or request.tools != last.tools:
        return None
    roles = [message.get("role") for message in fresh]
    return fresh if set(roles) == {"tool"} or roles == ["user"] else None


def are_same(sent: Message, repeated: Message) -> bool:
    """Whether a request repeats a message; harnesses trim it, or drop the text beside calls."""
    calls = [calls_of(message) for message in (sent, repeated)]
    texts = [text_of(message).strip() for message in (sent, repeated)]
    is_same_text = texts[0] == texts[1] or (bool(calls[1]) and not texts[1])
    return sent.get("role") == repeated.get("role") and calls[0] == calls[1] and is_same_text


def calls_of(message: Message) -> list[tuple[Any, Any]]:
    """The calls of a message as names and parsed arguments; ids and JSON spelling may differ."""
    functions = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    return [(one.get("name"), parsed(one.get("arguments"))) for one in functions]


def parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def text_of(message: Message) -> str:
    """The text of a message, whether its content is a text or a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")

"""Chat messages between the policy and a harness: the policy's text as a message, and what is new."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from graft.envs.interop.model_server import Question
from graft.text.parse import tool_calls
from graft.types import Message


def as_assistant(action: str, style: str, question: Question) -> Message:
    """The policy's text as a message: calls it contains are written out for the harness.

    Their text is left out, or a prompt that repeats the message would show them twice. A call that
    cannot be read stays text: the harness sees an answer without calls.
    """
    message: Message = {"role": "assistant", "content": action}
    names = [tool["function"]["name"] for tool in question.tools if "function" in tool]
    calls = [call for call in tool_calls(action, style, names) if not call.error] if names else []
    if calls:
        for call in reversed(calls):
            action = action[: call.start] + action[call.end :]
        message["content"] = action.strip()
        message["tool_calls"] = [
            {
                "id": f"call_{len(question.messages)}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(calls)
        ]
    return message


def added(asked: Question, answer: Message, question: Question) -> list[Message] | None:
    """What a request adds to the last one and its answer; None if it does not go on from them.

    [user], answer "4", [user, assistant "4", tool, tool]    [tool, tool]
    [user], answer "4", [user "summary"]                     None: the history was rewritten

    Only what one turn can append: results of tools, or one message of the user's.
    """
    past = [*asked.messages, answer]
    fresh = question.messages[len(past) :]
    is_same = len(question.messages) > len(past) and all(map(are_same, past, question.messages))
    if not is_same or question.tools != asked.tools:
        return None
    roles = [message.get("role") for message in fresh]
    return fresh if set(roles) == {"tool"} or roles == ["user"] else None


def are_same(sent: Message, heard: Message) -> bool:
    """Whether a message came back as it was; harnesses trim it, or leave out words beside calls."""
    calls = [called(message) for message in (sent, heard)]
    texts = [text_of(message).strip() for message in (sent, heard)]
    is_said = texts[0] == texts[1] or (bool(calls[1]) and not texts[1])
    return sent.get("role") == heard.get("role") and calls[0] == calls[1] and is_said


def called(message: Message) -> list[tuple[Any, Any]]:
    """The calls of a message as names and arguments; ids and spelling are the harness's own."""
    functions = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    return [(one.get("name"), opened(one.get("arguments"))) for one in functions]


def opened(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def text_of(message: Message) -> str:
    """What a message says, be its content a text or parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")

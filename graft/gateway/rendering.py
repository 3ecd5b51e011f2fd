"""The messages of a request as a chat template reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graft.gateway.canonical import reasoning_of, text_of
from graft.gateway.roots import system_of
from graft.types import Message


def template_messages(
    messages: Sequence[Message], inner_system: str, has_channels: bool, first: int = 0
) -> list[Message]:
    """
    inner_system   the role of system messages inside the conversation
    has_channels   the template reads thoughts as `thinking`, as gpt-oss does
    first          the messages before this one are left out; their calls are counted

    Ids of calls differ from client to client, and some templates write them: here they are numbers.
    """
    start = len(system_of(messages))
    ids: dict[Any, str] = {}
    made: list[Message] = []
    for place, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        for call in calls:  # Mistral's templates want nine characters
            ids[call.get("id")] = f"call{len(ids):05d}"
        if place < first:
            continue
        role, content = message["role"], text_of(message)
        one: Message = {"role": role, "content": content}
        if role == "system" and place >= start:
            one["role"] = inner_system
        elif role == "tool":
            if message.get("name"):
                one["name"] = message["name"]
            one["tool_call_id"] = ids.get(message.get("tool_call_id"), "call00000")
        elif role == "assistant":
            thought = reasoning_of(message)
            if thought:
                one["reasoning_content"] = thought
            if thought and has_channels and not (content and calls):  # which gpt-oss refuses
                one["thinking"] = thought
            if calls:
                one["tool_calls"] = [
                    {"id": ids[call.get("id")], "type": "function", "function": call["function"]}
                    for call in calls
                ]
        made.append(one)
    return made

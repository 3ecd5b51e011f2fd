"""Conversations in a canonical form: what a client changes without meaning to is equal.

A client sends its whole history with every request, and rarely as it got it: arguments are serialised
again, `null` becomes "", ids are new, reasoning is dropped. Two messages are the same if their keys are:

    {"role": "assistant", "content": null, "tool_calls": [{"id": "a", ... "arguments": '{"b":2.0,"a":1}'}]}
    {"role": "assistant", "content": "", "tool_calls": [{"id": "b", ... "arguments": {"a": 1, "b": 2}}]}

A conversation is named by a chain of hashes, so that every prefix of it has a name of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from pydantic_core import to_json

from graft.text.calls import read_arguments
from graft.types import Message


def normalised(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with neighbouring ones of the assistant joined: some dialects split text and calls."""
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is None or not message["role"] == last["role"] == "assistant":
            joined.append(message)
            continue
        both: Message = {"role": "assistant"}
        both["content"] = text_of(last) + text_of(message)
        if thought := reasoning_of(last) + reasoning_of(message):
            both["reasoning_content"] = thought
        if calls := [*_calls(last), *_calls(message)]:
            both["tool_calls"] = calls
        joined[-1] = both
    return tuple(joined)


def text_of(message: Message) -> str:
    return message.get("content") or ""


def reasoning_of(message: Message) -> str:
    return message.get("reasoning_content") or ""


def key_of(message: Message) -> str:
    """A text that is equal for messages that a model should take for the same; without reasoning."""
    role, text = message["role"], text_of(message)
    if role != "assistant":
        ids = [message["tokens"]] if "tokens" in message else []
        return json.dumps([role, text, *ids], ensure_ascii=True)
    calls = [
        [call["function"]["name"], _plain(arguments_of(call["function"].get("arguments")))]
        for call in _calls(message)
    ]
    # clients strip an answer; the model's own tokens stay in its context either way
    return json.dumps([role, text.strip(), calls], ensure_ascii=True, sort_keys=True)


def names_of(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    known: Sequence[str] = (),
) -> list[str]:
    """The names of a conversation's prefixes: the one of no message, of the first, of the first two ...

    known: the first of them, of a conversation that begins with the same tools and messages.
    """
    names = [*known] or [name_of_tools(tools)]
    for message in messages[len(names) - 1 :]:
        names.append(name_after(names[-1], message))
    return names


def name_of_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The name of a conversation without a message."""
    return _name_of_tools(to_json(tools))


def num_shared(messages: Sequence[Message], others: Sequence[Message]) -> int:
    """How many messages at the start are the same to the letter, so that their names are."""
    count = 0
    for a, b in zip(messages, others, strict=False):
        # 1 == True == 1.0, but they are different arguments
        if a != b or ("tool_calls" in a and repr(a["tool_calls"]) != repr(b["tool_calls"])):
            break
        count += 1
    return count


def name_after(name: str, message: Message) -> str:
    """The name of a conversation with one more message."""
    return blake2b(f"{name} {key_of(message)}".encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=256)  # an agent sends the same tools with every request
def _name_of_tools(written: bytes) -> str:
    tools = sorted(json.dumps(_plain(tool), sort_keys=True) for tool in json.loads(written))
    return blake2b(json.dumps(tools).encode(), digest_size=16).hexdigest()


def arguments_of(given: Any) -> Any:
    """The arguments of a call: the text of a JSON object is read; any other stays a text."""
    if not isinstance(given, str):
        return {} if given is None else given
    value, why = read_arguments(given)
    return given if why else value


def _calls(message: Message) -> list[Any]:
    return list(message.get("tool_calls") or ())


def _plain(value: Any) -> Any:
    """The value with every number as a float: a client in JavaScript writes 2.0 as 2."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else str(value)

"""Chats in three published forms, read as the messages of a chat template.

    {"messages": [{"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"}]}
    {"conversations": [{"from": "human", "value": "2+3="}, {"from": "gpt", "value": "5"}]}
    {"instruction": "Add.", "input": "2+3=", "output": "5"}

The first is OpenAI's form, the others are ShareGPT's and Alpaca's, as LLaMA-Factory reads them; these
two may have a column `system`. A content in parts, [{"type": "text", "text": "5"}], is the text of its
parts. Errors name the entry and the field; the caller adds the file and the row.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from graft.data.pictures import TEXT_ONLY
from graft.types import Message

ROLES = ("system", "user", "assistant", "tool")
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
"""`from` of a ShareGPT entry -> the role of the message."""


def chat_of(row: Mapping[str, Any]) -> list[Message]:
    """The messages of a row in any of the three forms, with an assistant turn to learn."""
    # a parquet file has every column in every row: absent ones come as None
    if row.get("messages") is None and row.get("conversations") is not None:
        messages = from_sharegpt(row)
    elif row.get("messages") is None and row.get("instruction") is not None:
        messages = from_alpaca(row)
    elif isinstance(given := parsed_list(row.get("messages")), list):
        messages = read_messages(given)
    else:
        raise ValueError(
            f"no list `messages` (found: {', '.join(map(str, row))}); a chat is a list `messages` of "
            "{role, content}, a list `conversations` of {from, value}, or `instruction` and `output`"
        )
    return with_turns(messages)


def with_turns(messages: list[Message]) -> list[Message]:
    """These messages, if there is an assistant turn to learn and no two of them in a row."""
    turns = [number for number, one in enumerate(messages, 1) if one["role"] == "assistant"]
    if not turns:
        raise ValueError("no assistant message, so there is nothing to learn")
    for first, second in pairwise(turns):
        if second == first + 1:
            raise ValueError(
                f"messages {first} and {second} are both from the assistant; join them into one, or "
                "put what came between them back"
            )
    return messages


def from_sharegpt(row: Mapping[str, Any]) -> list[Message]:
    """{"from": "human", "value": "Hi"} is {"role": "user", "content": "Hi"}, and so on."""
    entries = parsed_list(row["conversations"])
    if not isinstance(entries, list):
        raise ValueError(
            f"`conversations` holds {describe_value(entries)}, not a list of {{from, value}}"
        )
    messages = [_entry(entry, f"entry {number}") for number, entry in enumerate(entries, 1)]
    # a conversation with its own system message keeps it, as in LLaMA-Factory
    opening = [] if messages and messages[0]["role"] == "system" else _system(row)
    return read_messages([*opening, *messages])


def from_alpaca(row: Mapping[str, Any]) -> list[Message]:
    """The question is the instruction, then the input, if there is one, on its own line."""
    question = "\n".join(_text(row, key) for key in ("instruction", "input") if row.get(key))
    if not question:
        raise ValueError("`instruction` and `input` are empty; there must be something to answer")
    if row.get("history"):
        raise ValueError("`history` is not read; write the earlier turns as `conversations`")
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": _text(row, "output")},
    ]
    return read_messages([*_system(row), *turns])


def read_messages(value: Any) -> list[Message]:
    """A list of {role, content}: contents become texts, and keys that parquet fills with None are left out.

    The first message is not the assistant's; a content may be missing only beside thoughts or calls.
    """
    value = [value] if isinstance(value, Mapping) else unwrapped(value)
    if not isinstance(value, list):
        raise ValueError(f"holds {describe_value(value)}, not a list of messages {{role, content}}")
    messages = [_message(one, f"message {number}") for number, one in enumerate(value, 1)]
    if not messages:
        raise ValueError("the list of messages is empty; there must be something to answer")
    if messages[0]["role"] == "assistant":
        raise ValueError("starts with the assistant; there must be something to answer")
    return messages


def messages_in(text: str) -> list[Any] | None:
    """The messages in a text that is JSON, or a list as Python prints it; None for any other text.

    >>> messages_in('[{"role": "user", "content": "Hi"}]')
    [{'role': 'user', 'content': 'Hi'}]
    """
    if not _LISTED.match(text) or text.rstrip()[-1] not in "]}":
        return None
    try:
        found = read_literal(text)
    except ValueError as error:
        raise ValueError(
            f"begins and ends like a list of messages, but is neither JSON nor a Python list: {error}; "
            "write the column as JSON: json.dumps(messages)"
        ) from error
    several = [found] if isinstance(found, Mapping) else found
    are_messages = all(isinstance(one, Mapping) and "role" in one for one in several)
    return several if are_messages else None


_LISTED = re.compile(r"""\s*(?:\[\s*)?\{\s*["'](?:role|content|name|tool_calls)["']\s*:""")


def read_literal(text: str) -> Any:
    """The value of a text in JSON, or as Python prints it: pandas writes it so into csv files.

    >>> read_literal("{'role': None}"), read_literal('[null]')
    ({'role': None}, [None])
    """
    try:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            if "'" not in text[: text.find(":")]:
                raise
            return ast.literal_eval(text.strip())
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from error


def parsed_list(value: Any) -> Any:
    """A list that is JSON text, or as Python prints it, as a list; any other value unchanged."""
    if not isinstance(value, str):
        return unwrapped(value)
    return read_literal(value) if value.lstrip()[:1] == "[" else value


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} is {describe_value(message)}; a message is {{role, content}}")
    role, content = message.get("role"), unwrapped(message.get("content"))
    if role not in ROLES:
        raise ValueError(f"{where}: role {role!r} is none of {', '.join(ROLES)}")
    if isinstance(content, list):
        content = _joined(content, f"{where}: `content`: ")
    has_more = message.get("tool_calls") or message.get("reasoning_content")
    if not (isinstance(content, str) or (content is None and has_more)):
        raise ValueError(
            f"{where}: `content` holds {describe_value(content)}, not text; write it, or leave "
            "the message out"
        )
    # parquet fills every struct with every key: absent ones come as None
    given = {**message, "content": content}
    made = {key: value for key, value in given.items() if value is not None}
    for key, value in made.items():
        refuse_surrogates(value, f"{where}: `{key}`: ")
    return made


def _joined(parts: list[Any], where: str) -> str:
    """[{"type": "text", "text": "2+"}, {"type": "text", "text": "3="}] -> "2+3="."""
    texts: list[str] = []
    for number, part in enumerate(parts, 1):
        kind = part.get("type") or "text" if isinstance(part, Mapping) else describe_value(part)
        if kind != "text":
            raise ValueError(f"{where}part {number} is {kind}; {TEXT_ONLY}")
        texts.append(_text(part, "text", f"{where}part {number}: "))
    return "".join(texts)


def refuse_surrogates(value: Any, where: str) -> None:
    """ValueError if a text in `value` holds a lone surrogate, which tokenizers and files refuse.

    JSON writes a character beyond 65,535 as two halves, "\\ud83d\\ude00"; a text that was cut between
    them has one.
    """
    value = unwrapped(value)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(value[error.start]):04x}"
            raise ValueError(
                f"{where}character {error.start + 1} is {half}, half of a character (a lone "
                "surrogate); write the whole character, or leave it out"
            ) from error
    elif isinstance(value, Mapping):
        refuse_surrogates([*value, *value.values()], where)
    elif isinstance(value, list | tuple):
        for one in value:
            refuse_surrogates(one, where)


def _entry(entry: Any, where: str) -> Message:
    if not isinstance(entry, Mapping) or "from" not in entry:
        found = ", ".join(map(str, entry)) if isinstance(entry, Mapping) else describe_value(entry)
        raise ValueError(f"{where} has no `from` (found: {found}); an entry is {{from, value}}")
    speaker = entry["from"]
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise ValueError(f"{where}: `from` is {speaker!r}, which is none of {', '.join(SPEAKERS)}")
    value = _text(entry, "value", f"{where}: ")
    if speaker == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _calls(value, where)}
    return {"role": SPEAKERS[speaker], "content": value}


def _calls(text: str, where: str) -> list[dict[str, Any]]:
    """'{"name": "f", "arguments": {"x": 1}}', or a list of such, in OpenAI's form."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: `value` of a function_call is not JSON: {error}") from error
    calls: list[dict[str, Any]] = []
    for call in given if isinstance(given, list) else [given]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError(
                f"{where}: {describe_value(call)} is no call: it must be {{name, arguments}}"
            )
        function = {"name": call["name"], "arguments": call.get("arguments", {})}
        calls.append({"type": "function", "function": function})
    return calls


def _system(row: Mapping[str, Any]) -> list[Message]:
    return [{"role": "system", "content": _text(row, "system")}] if row.get("system") else []


def _text(entry: Mapping[str, Any], key: str, where: str = "") -> str:
    value = entry.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{where}`{key}` holds {describe_value(value)}, not text")
    return value


def unwrapped(value: Any) -> Any:
    """A numpy array, which pandas makes of a list in a parquet file, as a list; any other value unchanged."""
    if getattr(getattr(value, "dtype", None), "kind", "") == "f" and value.itemsize < 8:
        value = value.astype(str).astype(float)  # 0.1, not the 0.10000000149011612 of 32 bits
    return value.tolist() if hasattr(value, "tolist") else value


def describe_value(value: Any) -> str:
    """A value as error messages print it: "nothing", or its type and its first characters."""
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"

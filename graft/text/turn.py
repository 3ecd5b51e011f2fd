"""The policy's turn, a text, as thought, content and tool calls.

    <think>add them</think>So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>

has the thought "add them", the content "So:" and one call. The syntax of calls is the one in which the
chat template writes them (`graft.text.syntax_probe`). A malformed call is content, and is counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from graft.text.call_readers import READERS
from graft.text.call_syntax import CallSyntax, Schemas
from graft.text.calls import ToolCall, read_arguments
from graft.text.template import Tools
from graft.types import Message

_MARK = re.compile(r"<\|(start|channel|message|constrain|end|return|call)\|>")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]{1,256})")


class ReadTurn(NamedTuple):
    """A turn in its parts."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]
    malformed: int
    """Calls that could not be read; their text is in `content`."""

    def message(self) -> Message:
        """The turn as a message of a conversation."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": f"call{number:05d}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(self.calls)
            ]
        return message


def read_turn(text: str, syntax: CallSyntax, tools: Tools | None = None) -> ReadTurn:
    """The parts of a turn. `tools` give the types of arguments where the syntax does not write them.

    >>> syntax = CallSyntax("json", "<tool_call>", "</tool_call>")
    >>> read_turn('<think>hm</think>So <tool_call>{"name": "f"}</tool_call>', syntax)[:2]
    ('hm', 'So ')
    """
    if syntax.has_channels and "<|channel|>" in text:
        return _read_channels(text, syntax)
    thought, content = _split_thought(text, syntax)
    find = READERS.get(syntax.name)
    found = find(content, syntax, _schemas(tools)) if find else []
    calls = tuple(call for call in found if not call.error)
    return ReadTurn(thought, _outside(content, calls, syntax), calls, len(found) - len(calls))


def readings(text: str, syntax: CallSyntax, tools: Tools | None = None) -> Iterator[Message]:
    """A turn as messages: thought, content and calls; thought and content; all of it as content.

    A template may render one of them as the policy wrote it and another one differently.
    """
    whole = read_turn(text, syntax, tools)
    if whole.calls:
        yield _for_templates(whole.message(), syntax)
    plain = read_turn(text, replace(syntax, name=""))
    for content in dict.fromkeys([plain.content, plain.content.strip()]):
        yield _for_templates(plain._replace(content=content).message(), syntax)
    for content in dict.fromkeys([text, text.strip()]):
        yield {"role": "assistant", "content": content}


def _for_templates(message: Message, syntax: CallSyntax) -> Message:
    if syntax.has_channels and "reasoning_content" in message:
        return {
            **message,
            "thinking": message["reasoning_content"],
        }  # gpt-oss has its own name for it
    return message


def _split_thought(text: str, syntax: CallSyntax) -> tuple[str, str]:
    """A thought that is not closed, in a turn that was cut off, is all that there is."""
    before, closed, rest = text.partition(syntax.thought[1])
    head, opened, thought = before.partition(syntax.thought[0])
    if closed:
        return (thought if opened else head).strip("\n"), rest.lstrip("\n")
    if opened and not head.strip():
        return thought.strip("\n"), ""
    return (text.strip("\n"), "") if syntax.is_thinking else ("", text)


def start_of_content(text: str, syntax: CallSyntax) -> int:
    """Find the beginning of a turn's content, behind its thought; the end of the text inside one."""
    if (end := text.find(syntax.thought[1])) >= 0:
        return end + len(syntax.thought[1])
    head, opened, _ = text.partition(syntax.thought[0])
    is_inside = (opened and not head.strip()) or syntax.is_thinking
    return len(text) if is_inside else 0


def _outside(content: str, calls: Sequence[ToolCall], syntax: CallSyntax) -> str:
    """The content without its calls; blanks between and behind them are dropped."""
    if not calls:
        return content
    first = content[: calls[0].start].removesuffix(syntax.before)
    starts = [call.start for call in calls[1:]] + [len(content)]
    parts = [content[call.end : start] for call, start in zip(calls, starts, strict=True)]
    return "".join([first, *(part for part in parts if part.strip())])


def _read_channels(text: str, syntax: CallSyntax) -> ReadTurn:
    """gpt-oss: thoughts in the channel analysis, calls to functions.NAME, content in the others."""
    thoughts: list[str] = []
    contents: list[str] = []
    calls: list[ToolCall] = []
    malformed = 0
    for start, end, head, content in _channels(text):
        called = _RECIPIENT.search(head) if syntax.name else None
        arguments, why = read_arguments(content) if called else ({}, "")
        if called and not why:
            calls.append(ToolCall(called[1], content, arguments, start=start, end=end))
        elif called:
            contents.append(text[start:end])
            malformed += 1
        elif head.partition("<|channel|>")[2].strip().startswith("analysis"):
            thoughts.append(content)
        else:
            contents.append(content)
    return ReadTurn("\n".join(thoughts), "".join(contents), tuple(calls), malformed)


def _channels(text: str) -> Iterator[tuple[int, int, str, str]]:
    """The start and end of each message of a turn, what is before its <|message|>, and its text."""
    start, body = 0, None
    for mark in _MARK.finditer(text):
        is_end = mark[1] in ("end", "return", "call", "start")
        if mark[1] == "message" and body is None:
            body = mark
        elif is_end:
            if body is not None:
                yield start, mark.end(), text[start : body.start()], text[body.end() : mark.start()]
            start, body = (mark.start() if mark[1] == "start" else mark.end()), None
    if body is not None:
        yield start, len(text), text[start : body.start()], text[body.end() :]
    elif text[start:].strip():
        yield start, len(text), "", text[start:]


def _schemas(tools: Tools | None) -> Schemas:
    """The parameters of each tool; what is no schema is left out."""
    if isinstance(tools, str):
        tools = json.loads(tools)
    found: dict[str, Any] = {}
    for tool in tools or ():
        described = json.loads(tool) if isinstance(tool, str) else tool
        function = described.get("function", described)
        found[str(function.get("name"))] = function.get("parameters") or {}
    return found

"""Check that a chat template only appends, with conversations that templates tend to rewrite.

A template that drops old thoughts, moves the tools to the last question or hides old results changes
the beginning of a conversation when it grows; sampled tokens cannot change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from graft.text.template import TemplateError
from graft.types import Message

HOW_TO_APPEND = (
    "Tokens that were sampled cannot be rewritten. Use model.chat_template=chatml, or a path to a "
    "template that only appends."
)


class TemplateRewrites(ValueError):
    """The template changes earlier turns when later ones arrive; the message shows where."""


def check_growth(render: Callable[..., str], closing: str, end_text: str) -> None:
    """Raise TemplateRewrites where `render` changes an earlier turn; a turn ends with `end_text`."""
    for number, (messages, tools) in enumerate(_probes()):
        try:
            _check_one(render, messages, tools, closing, end_text)
        except TemplateError:
            if number == 0:
                raise  # plain user and assistant turns must work
            # a template without tools or a system role cannot rewrite them either


def _check_one(
    render: Callable[..., str],
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    closing: str,
    end_text: str,
) -> None:
    prompts = {  # number of messages -> what the policy would continue
        n: render(messages[:n], tools, add_generation_prompt=True)
        for n in range(1, len(messages) + 1)
        if messages[n - 1]["role"] in ("user", "tool")
    }
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened = prompts[turn]
        kept = render(messages[: turn + 1], tools)
        if kept.endswith(closing):  # a newline after the end may be left out later
            kept = kept[: len(kept) - len(closing)] + end_text
        sampled = "" if message.get("tool_calls") else message["content"]
        for n, later in prompts.items():
            if n <= turn:
                continue
            rest = later[len(opened) :]
            # some templates put blanks before the text
            blank = rest[: len(rest) - len(rest.lstrip())]
            for expected in (kept, opened + blank + sampled):
                if not later.startswith(expected):
                    raise _rewrites(messages, expected, later, n)


def _rewrites(messages: list[Message], first: str, later: str, length: int) -> TemplateRewrites:
    at = first_difference(first, later)
    shown = [i for i, message in enumerate(messages) if message["mark"] in first]
    after = [i for i in shown if first.find(messages[i]["mark"]) + len(messages[i]["mark"]) > at]
    turn = after[0] if after else shown[-1]
    near = slice(max(0, at - 30), at + 50)
    return TemplateRewrites(
        f"the chat template rewrites turn {turn} ({messages[turn]['role']}) of a conversation "
        f"when it has grown to {length} messages:\n  first: {first[near]!r}\n"
        f"  later: {later[near]!r}"
    )


def first_difference(one: str, other: str) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def _probes() -> Iterator[tuple[list[Message], list[dict[str, Any]] | None]]:
    """Conversations that templates tend to rewrite; `mark` is the text that ends each turn."""

    def turn(role: str, text: str, **more: Any) -> Message:
        return {"role": role, "content": text, "mark": text, **more}

    def think(text: str) -> Message:
        return turn("assistant", f"<think>\nthought of {text}\n</think>\n\n{text}", mark=text)

    def call(text: str, query: str) -> Message:
        function = {"name": "search", "arguments": {"query": query}}
        calls = [{"id": "call00001", "type": "function", "function": function}]
        return turn("assistant", text, mark=query, tool_calls=calls)

    def answer(text: str) -> Message:
        return turn("tool", text, name="search", tool_call_id="call00001")

    plain = [turn("user", "ask-0"), turn("assistant", "reply-1"), turn("user", "ask-2")]
    yield [*plain, turn("assistant", "reply-3"), turn("user", "ask-4")], None
    yield (
        [*plain, think("reply-3"), turn("user", "ask-4"), think("reply-5"), turn("user", "x-6")],
        None,
    )
    yield [turn("system", "rules-0"), *plain, turn("assistant", "r-4"), turn("user", "ask-5")], None
    schema = {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
    used = [turn("user", "ask-0"), call("", "query-1"), answer("found-2"), think("reply-3")]
    again = [turn("user", "ask-4"), call("let-me", "query-5"), answer("found-6"), answer("found-7")]
    yield [*used, *again, turn("assistant", "reply-8"), turn("user", "ask-9")], [schema]

"""Conversations as tokens that only grow: a prompt, then what the policy wrote, then a bridge.

What was sampled is never rendered or encoded again. The text between two policy turns is found by
rendering a probe conversation with a sentinel in the assistant's place and cutting after it:

    [user probe, assistant SENTINEL, user "and 4?"] in chatml, a line per part:

        <|im_start|>user⏎probe<|im_end|>⏎<|im_start|>assistant⏎SENTINEL
        <|im_end|>⏎                                                        closes the turn
        <|im_start|>user⏎and 4?<|im_end|>⏎<|im_start|>assistant⏎           says it, opens the next
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from graft.text.template import TEMPLATES, TemplateError, find_template, render
from graft.text.tokenizer import Tokenizer
from graft.types import Message

Tools = Sequence[Any] | str
"""Tool schemas in OpenAI's form; the list or its entries may be JSON strings."""

SENTINEL = "graft.sentinel.7c1e"
NOTHING: Mapping[str, str] = MappingProxyType({})
_ASK: Message = {"role": "user", "content": "graft.question"}
_HOW_TO_APPEND = (
    "Tokens that were sampled cannot be rewritten. Use model.chat_template=chatml, or a path to a "
    "template that only appends."
)


class Piece(NamedTuple):
    """A part of a finished conversation, and whether the assistant wrote it (it is trained)."""

    text: str
    tokens: list[int]
    is_trained: bool


class TemplateRewrites(ValueError):
    """A template that changes earlier turns when later ones arrive; the text shows where."""


class Chat:
    """Renders with one template; `options` are extra template variables such as enable_thinking.

    `end_ids` are the tokens that end an assistant turn: stop there, and at eos. `end_text` is what
    the turn ends with; where no token stands for it, `end_ids` is empty and it is a stop string.

    >>> chat = Chat(Tokenizer.characters("0123456789+="))
    >>> chat.prompt([{"role": "user", "content": "2+3="}])
    [5, 13, 6, 14]
    >>> chat.extend([{"role": "user", "content": "4+4="}], closed=False)  # the eos, then the text
    [1, 7, 13, 7, 14]
    >>> chat.extend([{"role": "user", "content": "4+4="}], closed=True)  # the eos was sampled
    [7, 13, 7, 14]
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None = None, **options: Any) -> None:
        self.tokenizer = tokenizer
        self.options = options
        if template is not None:
            self.template = find_template(template, tokenizer.chat_templates)
        elif tokenizer.chat_template is not None:
            self.template = tokenizer.chat_template
        else:
            known = ", ".join([*TEMPLATES, *tokenizer.chat_templates])
            raise TemplateError(
                f"the tokenizer has no default chat template; pass model.chat_template=NAME "
                f"(one of {known}) or model.chat_template=PATH of a .jinja file"
            )
        self._shown: set[str] = set()  # roles whose messages the template was seen to write
        self._opened = ""  # what stands before an assistant's turn, without tools
        self._closing = ""
        self._closing = self._after_turn([], opened=False)
        self.end_text, self.end_ids = _turn_end(self._closing, tokenizer)

    def render(self, messages: Sequence[Message], tools: Tools | None = None, **how: bool) -> str:
        """The text of `messages`; `how` is add_generation_prompt or continue_final_message."""
        variables = {**self.tokenizer.special_tokens, **self.options}
        return render(self.template, messages, tools=tools, **how, **variables)

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Tokens from which the policy goes on: a new turn, or the assistant message at the end."""
        return self.tokenizer.encode(self._prompt_text(messages, tools))

    def _prompt_text(self, messages: Sequence[Message], tools: Tools | None) -> str:
        if not messages:
            raise ValueError("a prompt needs at least one message")
        continued = messages[-1]["role"] == "assistant"
        if continued and messages[-1].get("tool_calls"):
            raise ValueError(
                "the prompt ends with an assistant message that calls tools, which cannot be "
                "continued; add the tool results, or write the call as content"
            )
        how = {"continue_final_message": continued, "add_generation_prompt": not continued}
        text = self.render(messages, tools, **how)
        if tools and text == self.render(messages, **how):
            raise TemplateError(
                "the chat template does not show tools, so the policy would never hear of them; "
                "use model.chat_template=chatml, or describe the tools in the system message"
            )
        return text

    def extend(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        """Tokens to append after a policy turn: its closing, `messages`, the next turn's opening.

        `closed` says that the policy already wrote the end of its turn (see `is_closed`). What the
        messages say is text: "<|im_end|>" in a search result ends nobody's turn.
        """
        if not messages:
            raise ValueError("nothing to extend with: pass the new user or tool messages")
        if any(message["role"] == "assistant" for message in messages):
            raise ValueError(
                "extend() takes what others say; an assistant message here would be the policy's "
                "own turn, whose sampled tokens are appended as they are"
            )
        hidden: dict[str, str] = {}
        shown = [self._hide_control_tokens(message, hidden) for message in messages]
        return self._encode_after_turn(self._after_turn(shown, opened=True), closed, hidden)

    def is_closed(self, tokens: Sequence[int]) -> bool:
        """Whether a policy turn with these tokens ended itself as the template would end it."""
        if self.end_ids:
            return bool(tokens) and tokens[-1] in self.end_ids
        if not self.end_text:
            return False
        longest = len(self.end_text.encode())  # a token may be a single byte
        return self.tokenizer.decode(tokens[-longest:]).endswith(self.end_text)

    def conversation(
        self, messages: Sequence[Message], tools: Tools | None = None
    ) -> list[tuple[list[int], bool]]:
        """A finished conversation in pieces, each with whether the assistant wrote it (is trained).

        [user "2+3=", assistant "5"], plain: [("2+3=", False), ("5<eos>", True)]; the end of a turn
        is trained, what the template puts after it (chatml: a newline) is not.
        """
        pieces = self.pieces(messages, tools)
        return [(piece.tokens, piece.is_trained) for piece in pieces if piece.tokens]

    def pieces(self, messages: Sequence[Message], tools: Tools | None = None) -> list[Piece]:
        """The same with the text of each piece; together they are the text of the conversation."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        _refuse_gaps(messages, turns)
        encode = self.tokenizer.encode
        if not turns:
            text = self.render(messages, tools)
            return [Piece(text, encode(text), is_trained=False)]
        text = self._prompt_text(messages[: turns[0]], tools)
        pieces = [Piece(text, encode(text), is_trained=False)]
        for start, end in zip(turns, [*turns[1:], None], strict=True):
            text = self._turn_text(messages[start], tools)
            pieces.append(Piece(text, encode(text), is_trained=True))
            after = self._after_turn(messages[start + 1 : end], opened=end is not None)
            tokens = self._encode_after_turn(after, closed=True)
            pieces.append(Piece(after.removeprefix(self.end_text), tokens, is_trained=False))
        return pieces

    def check_conversation(
        self, messages: Sequence[Message], pieces: Sequence[Piece], tools: Tools | None = None
    ) -> None:
        """Raise TemplateRewrites if the template itself would write these pieces otherwise.

        Such as one that drops what an assistant thought before the last question: a model that is
        sampled from turn by turn still sees its thoughts, so the two would not be the same text.
        """
        built, whole = "".join(piece.text for piece in pieces), self.render(messages, tools)
        if built == whole:
            return
        at = _first_difference(built, whole)
        near = slice(max(0, at - 30), at + 50)
        raise TemplateRewrites(
            f"the chat template rewrites this conversation of {len(messages)} messages as it grows:"
            f"\n  turn by turn: {built[near]!r}\n  as a whole:   {whole[near]!r}\n{_HOW_TO_APPEND}"
        )

    def check_append_only(self) -> None:
        """Raise TemplateRewrites unless growing conversations keep every earlier turn as it was."""
        for number, (messages, tools) in enumerate(_probes()):
            try:
                self._check_growth(messages, tools)
            except TemplateError:
                if number == 0:
                    raise  # plain user and assistant turns must work
                # a template without tools or a system role cannot rewrite them either

    def _after_turn(self, messages: Sequence[Message], *, opened: bool) -> str:
        """What the template writes after an assistant's words when `messages` follow."""
        if not messages and not opened and self._closing:
            return self._closing
        for role in {message["role"] for message in messages} - self._shown:
            self._require(role)
        probe = [_ASK, {"role": "assistant", "content": SENTINEL}, *messages]
        text = self.render(probe, add_generation_prompt=opened)
        before, found, after = text.partition(SENTINEL)
        if not found:
            raise TemplateRewrites(
                f"the chat template drops an assistant turn; it wrote {before[:120]!r}. "
                f"{_HOW_TO_APPEND}"
            )
        return after

    def _require(self, role: str) -> None:
        """Some templates skip the roles they do not know: a tool result would vanish unseen."""
        self._shown.add(role)
        if "graft.shown" not in self._after_turn(
            [{"role": role, "content": "graft.shown"}], opened=False
        ):
            self._shown.discard(role)
            raise TemplateError(
                f"the chat template does not write messages of role {role!r}; "
                f"use model.chat_template=chatml, or send them as another role"
            )

    def _hide_control_tokens(self, message: Message, hidden: dict[str, str]) -> Message:
        """The message with names in place of control tokens; `hidden` gets name -> token."""
        content = message.get("content")
        if not isinstance(content, str):
            return message
        for token in self.tokenizer.control_tokens:
            if token in content:
                name = f"{SENTINEL}.{len(hidden)}."
                content, hidden[name] = content.replace(token, name), token
        return {**message, "content": content}

    def _encode(self, text: str, hidden: Mapping[str, str]) -> list[int]:
        """The tokens of a text; what was hidden in it comes back as letters."""
        if not hidden:
            return self.tokenizer.encode(text)
        names = "|".join(map(re.escape, hidden))
        return [
            token
            for piece in re.split(f"({names})", text)
            for token in (
                self.tokenizer.encode_plain(hidden[piece])
                if piece in hidden
                else self.tokenizer.encode(piece)
            )
        ]

    def _encode_after_turn(
        self, after: str, closed: bool, hidden: Mapping[str, str] = NOTHING
    ) -> list[int]:
        if not closed or not after.startswith(self.end_text):
            return self._encode(after, hidden)
        if not self.end_ids:
            return self._encode(after[len(self.end_text) :], hidden)
        # encoded together with the end token: some tokens swallow the blanks that follow them
        ids = self._encode(after, hidden)
        return ids[1 + next(i for i, token in enumerate(ids) if token in self.end_ids) :]

    def _turn_text(self, message: Message, tools: Tools | None) -> str:
        """An assistant message as the policy would have written it, with its end."""
        whole = self.render([_ASK, message], tools)
        opened = self._opened
        if tools or not opened or not whole.startswith(opened):  # such as a date that has changed
            opened = self.render([_ASK], tools, add_generation_prompt=True)
            if not tools:
                self._opened = opened
        turn = _squeeze(whole[len(opened) :])
        is_kept = all(said in turn for said in _said(message))
        if not (is_kept and whole.startswith(opened) and whole.endswith(self._closing)):
            raise TemplateRewrites(
                f"the chat template does not write an assistant message as a policy would have to "
                f"write it: opened {opened[-40:]!r}, rendered {whole[-120:]!r}. {_HOW_TO_APPEND}"
            )
        return whole[len(opened) : len(whole) - len(self._closing)] + self.end_text

    def _check_growth(self, messages: list[Message], tools: Tools | None) -> None:
        prompts = {  # number of messages -> what the policy would continue
            n: self.render(messages[:n], tools, add_generation_prompt=True)
            for n in range(1, len(messages) + 1)
            if messages[n - 1]["role"] in ("user", "tool")
        }
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            opened = prompts[turn]
            kept = self.render(messages[: turn + 1], tools)
            if kept.endswith(self._closing):  # a newline after the end may come and go
                kept = kept[: len(kept) - len(self._closing)] + self.end_text
            sampled = "" if message.get("tool_calls") else message["content"]
            for n, later in prompts.items():
                if n <= turn:
                    continue
                rest = later[len(opened) :]
                blank = rest[: len(rest) - len(rest.lstrip())]  # some put one before the words
                for expected in (kept, opened + blank + sampled):
                    if not later.startswith(expected):
                        raise self._rewrites(messages, expected, later, n)

    def _rewrites(
        self, messages: list[Message], first: str, later: str, length: int
    ) -> TemplateRewrites:
        at = _first_difference(first, later)
        shown = [i for i, message in enumerate(messages) if message["mark"] in first]
        after = [
            i for i in shown if first.find(messages[i]["mark"]) + len(messages[i]["mark"]) > at
        ]
        turn = after[0] if after else shown[-1]
        near = slice(max(0, at - 30), at + 50)
        return TemplateRewrites(
            f"the chat template rewrites turn {turn} ({messages[turn]['role']}) of a conversation "
            f"when it has grown to {length} messages:\n  first: {first[near]!r}\n"
            f"  later: {later[near]!r}\n{_HOW_TO_APPEND}"
        )


def _turn_end(closing: str, tokenizer: Tokenizer) -> tuple[str, frozenset[int]]:
    """Where in the closing text a turn is over: after its first special token, or its last word.

    "<|im_end|>\\n" -> "<|im_end|>"; as one token its id too, as several no id.
    """
    found = [(closing.find(token), -len(token), token) for token in tokenizer.added_tokens]
    found = sorted(place for place in found if place[0] >= 0)
    if not found:
        return closing.rstrip(), frozenset()
    at, _, token = found[0]
    return closing[: at + len(token)], frozenset({tokenizer.added_tokens[token]})


def _first_difference(one: str, other: str) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def _refuse_gaps(messages: Sequence[Message], turns: Sequence[int]) -> None:
    if not messages or messages[0]["role"] == "assistant":
        raise ValueError("a conversation starts with a system or user message, this one does not")
    for first, second in pairwise(turns):
        if second == first + 1:
            raise ValueError(
                f"messages {first} and {second} are both from the assistant; join them into one, "
                f"or put what came between them back"
            )


def _probes() -> Iterator[tuple[list[Message], list[dict[str, Any]] | None]]:
    """Conversations that templates like to rewrite; `mark` is the text that ends each turn."""

    def say(role: str, text: str, **more: Any) -> Message:
        return {"role": role, "content": text, "mark": text, **more}

    def think(text: str) -> Message:
        return say("assistant", f"<think>\nthought of {text}\n</think>\n\n{text}", mark=text)

    def call(text: str, query: str) -> Message:
        function = {"name": "search", "arguments": {"query": query}}
        calls = [{"id": "call00001", "type": "function", "function": function}]
        return say("assistant", text, mark=query, tool_calls=calls)

    def answer(text: str) -> Message:
        return say("tool", text, name="search", tool_call_id="call00001")

    plain = [say("user", "ask-0"), say("assistant", "reply-1"), say("user", "ask-2")]
    yield [*plain, say("assistant", "reply-3"), say("user", "ask-4")], None
    yield (
        [*plain, think("reply-3"), say("user", "ask-4"), think("reply-5"), say("user", "x-6")],
        None,
    )
    yield [say("system", "rules-0"), *plain, say("assistant", "r-4"), say("user", "ask-5")], None
    schema = {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
    used = [say("user", "ask-0"), call("", "query-1"), answer("found-2"), think("reply-3")]
    again = [say("user", "ask-4"), call("let-me", "query-5"), answer("found-6"), answer("found-7")]
    yield [*used, *again, say("assistant", "reply-8"), say("user", "ask-9")], [schema]


def _said(message: Message) -> list[str]:
    """What a rendered assistant message must still hold, without blanks."""
    calls = [call.get("function") or call for call in message.get("tool_calls") or []]
    parts = [message.get("content"), message.get("reasoning_content")]
    return [_squeeze(part) for part in [*parts, *(call.get("name") for call in calls)]]


def _squeeze(content: Any) -> str:
    """The text without blanks; templates may format around what was said, not drop it."""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    return "".join((content or "").split())

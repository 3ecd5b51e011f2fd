"""Conversations as tokens that only grow: a prompt, the policy's turn, the text between, and so on.

Sampled tokens are never rendered or encoded again. The text between two policy turns is found by
rendering a probe conversation with a sentinel as the assistant's text and cutting after it:

    [user probe, assistant SENTINEL, user "and 4?"] in chatml, a line per part:

        <|im_start|>user⏎probe<|im_end|>⏎<|im_start|>assistant⏎SENTINEL
        <|im_end|>⏎                                                        closes the turn
        <|im_start|>user⏎and 4?<|im_end|>⏎<|im_start|>assistant⏎           the message; opens the next turn

Some templates rewrite earlier turns when later ones arrive: Qwen3's drops thoughts from before the
last question. `history` selects what happens then:

    append      sampled tokens stay; only new messages are rendered, as above
    template    every turn follows the template's rendering of the whole conversation; where that
                differs from the context, a new context begins (`graft.text.transcript`)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

from graft.text.append_only import HOW_TO_APPEND, TemplateRewrites, check_growth
from graft.text.template import (
    TEMPLATES,
    TemplateError,
    check_variables,
    find_template,
    render,
)
from graft.text.tokenizer import FastTokenizer
from graft.types import Message

Tools = Sequence[Any] | str
"""Tool schemas in OpenAI's form; the list or its entries may be JSON strings."""

APPEND, TEMPLATE = "append", "template"
HISTORIES = {
    APPEND: "model.history=append: sampled tokens stay in the context, also those that the template "
    "would drop, and only new messages are rendered; an attempt is one context",
    TEMPLATE: "model.history=template: each turn follows the template's rendering of the whole "
    "conversation; where it rewrites earlier turns, a new context begins, which is a row of its own",
}
"""What each value does with a template that rewrites."""
MOST_EXTENDED, LONGEST_EXTENDED = 1024, 2048
"""Texts between two turns whose tokens are kept, and the characters of their messages: environments and
agents send the same few lines again and again."""
SENTINEL = "graft.sentinel.7c1e"
_SHOWN = "graft.shown"
_ASK: Message = {"role": "user", "content": "graft.question"}
_CALL_ID = "call00001"  # nine characters: Mistral's templates count them


class Piece(NamedTuple):
    """A part of a finished conversation, and whether the assistant wrote it (it is trained)."""

    text: str
    tokens: list[int]
    is_trained: bool


class Chat:
    """Renders with one template; `options` are extra template variables such as enable_thinking.

    `end_ids` are the tokens that end an assistant turn: sampling stops there, and at eos. `end_text`
    is the text of that end; if it is not one token, `end_ids` is empty and it is a stop string.

    >>> chat = Chat(FastTokenizer.characters("0123456789+="))
    >>> chat.prompt([{"role": "user", "content": "2+3="}])
    [5, 13, 6, 14]
    >>> chat.extend([{"role": "user", "content": "4+4="}], closed=False)  # the eos, then the text
    [1, 7, 13, 7, 14]
    >>> chat.extend([{"role": "user", "content": "4+4="}], closed=True)  # the eos was sampled
    [7, 13, 7, 14]
    """

    def __init__(
        self,
        tokenizer: FastTokenizer,
        template: str | None = None,
        *,
        history: str = APPEND,
        **options: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.history, self.options = history, options
        if history not in HISTORIES:
            raise ValueError(f"history={history!r} is none of {', '.join(HISTORIES)}")
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
        check_variables(self.template, options)
        self._extended: dict[Any, list[int]] = {}
        self._shown: set[str] = set()  # roles whose messages the template writes
        self._opened = ""  # the text before an assistant's turn, without tools
        self._names = {  # placeholders for control tokens that are only text
            f"{SENTINEL}.{number}.": token for number, token in enumerate(tokenizer.control_tokens)
        }
        self._name = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._closing = self._written_after([], opened=False)
        self.end_text, ids = _turn_end(self._closing, tokenizer)
        self.ends: dict[int, str] = dict.fromkeys(ids, self.end_text)
        """The tokens that end a turn, each with the text that it completes."""
        self._past_end = ""  # the end of a turn that is not the last, where that differs
        if self.end_text:
            self._find_other_ends()
        else:
            self._find_ends_in_what_follows()
        self.end_ids = frozenset(self.ends)

    def render(self, messages: Sequence[Message], tools: Tools | None = None, **how: bool) -> str:
        """The text of `messages`; `how` is add_generation_prompt or continue_final_message."""
        variables = {**self.tokenizer.special_tokens, **self.options}
        return render(self.template, messages, tools=tools, **how, **variables)

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Tokens that the policy continues: before a new turn, or the final assistant message.

        Contents are plain text, as in `extend`: "<|im_end|>" in a question does not end a message.
        """
        hidden = [self.hide(message) for message in messages]
        return self.encode(self.prompt_text(hidden, tools), is_start=True)

    @staticmethod
    def due_prefill(messages: Sequence[Message], prefill: str) -> str:
        """The prefill; "" if the last message is the assistant's and already ends with it."""
        last = messages[-1] if messages else {}
        is_there = last.get("role") == "assistant" and str(last.get("content")).endswith(prefill)
        return "" if is_there else prefill

    def prefilled(self, prompt: list[int], prefill: str) -> list[int]:
        """A prompt and the text that the answer begins with."""
        return prompt + self.tokenizer.encode_after(prefill, prompt[-1] if prompt else None)

    def prompt_text(self, messages: Sequence[Message], tools: Tools | None) -> str:
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
                "the chat template does not show tools, so the policy would not see them; "
                "use model.chat_template=chatml, or describe the tools in the system message"
            )
        return text

    def extend(
        self,
        messages: Sequence[Message],
        *,
        closed: bool,
        last: int | None = None,
        tool: str = "tool",
    ) -> list[int]:
        """Tokens to append after a policy turn: its closing, `messages`, the next turn's opening.

        closed  the policy already wrote the end of its turn (see `is_closed`)
        last    the last token of the context
        tool    the name of the tool in messages of the role "tool"

        Contents are plain text: "<|im_end|>" in a search result does not end a turn.
        """
        key = _remembered(messages, closed, last, tool)
        if key is None or key not in self._extended:
            tokens = self._extend(messages, closed, last, tool)
            if key is None:
                return tokens
            if len(self._extended) >= MOST_EXTENDED:
                del self._extended[next(iter(self._extended))]
            self._extended[key] = tokens
        return [*self._extended[key]]

    def _extend(
        self, messages: Sequence[Message], closed: bool, last: int | None, tool: str
    ) -> list[int]:
        if not messages:
            raise ValueError("nothing to extend with: pass the new user or tool messages")
        if any(message["role"] == "assistant" for message in messages):
            raise ValueError(
                "extend() takes messages of other roles; an assistant message here would be the "
                "policy's own turn, whose sampled tokens are appended as they are"
            )
        after = self._written_after([self.hide(one) for one in messages], opened=True, tool=tool)
        if not closed:
            return self.encode(after, last)
        if last not in self.ends and self.ends:
            last = next(iter(self.ends))
        end = self.end_text if last is None else self.ends.get(last, self.end_text)
        return self.encode(self._behind_end(after, end), last)

    def is_closed(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens of a policy turn end as the template ends a turn."""
        if self.end_ids:
            return bool(tokens) and tokens[-1] in self.end_ids
        if not self.end_text:
            return False
        longest = len(self.end_text.encode())  # a token may be a single byte
        return self.tokenizer.decode(tokens[-longest:]).endswith(self.end_text)

    def turn_text(self, tokens: Sequence[int], last: int | None = None) -> str:
        """The text of a turn after token `last`, without its end, the template's or plain eos."""
        end = self.end_text if self.is_closed(tokens) else ""
        if end and self.ends:
            end = self.ends[tokens[-1]]
        elif not end and tokens and tokens[-1] in self.tokenizer.eos_ids:
            tokens = tokens[:-1]
        return self.tokenizer.decode_after(tokens, last).removesuffix(end)

    def pieces(self, messages: Sequence[Message], tools: Tools | None = None) -> list[Piece]:
        """A finished conversation in pieces; for one that grows by appending only.

        [user "2+3=", assistant "5"], plain: "2+3=" is not trained, "5<eos>" is; the end of a turn is
        trained, the text that the template puts after it (chatml: a newline) is not.
        """
        turns = turns_of(messages)
        if not turns:
            return self.encode_pieces([self.render([*map(self.hide, messages)], tools)])
        texts = [self.prompt_text([*map(self.hide, messages[: turns[0]])], tools)]
        for start, stop in zip(turns, [*turns[1:], None], strict=True):
            message, others = messages[start], [*map(self.hide, messages[start + 1 : stop])]
            after = self._written_after(others, opened=stop is not None, tool=_tool_of(message))
            text, end = self._turn_text(message, tools)
            if not self._closing:  # the start of the next message ends the turn
                end = next((end for end in self.ends.values() if after.startswith(end)), end)
            texts += [text + end, self._behind_end(after, end)]
        return self.encode_pieces(texts)

    def encode_pieces(self, texts: Sequence[str]) -> list[Piece]:
        """Pieces with the tokens of a rollout; every second text is the assistant's."""
        first = self.encode(texts[0], is_start=True)
        pieces = [Piece(self.visible(texts[0]), first, is_trained=False)]
        last = pieces[0].tokens[-1] if pieces[0].tokens else None
        for number, text in enumerate(texts[1:], 1):
            tokens = self.encode(text, last)
            pieces.append(Piece(self.visible(text), tokens, is_trained=number % 2 == 1))
            last = tokens[-1] if tokens else last
        return pieces

    def check_append_only(self) -> None:
        """Raise TemplateRewrites unless growing conversations keep every earlier turn as it was."""
        check_growth(self.render, self._closing, self.end_text if self._closing else "")

    def history_note(self) -> str:
        """How a conversation that the template rewrites is handled; "" if it only appends."""
        try:
            self.check_append_only()
        except TemplateRewrites as error:
            where = str(error).split(":\n")[0]
            return f"{where}; {HISTORIES[self.history]}"
        return ""

    def hide(self, message: Message) -> Message:
        """The message with placeholders for control tokens; `encode` writes these as plain text."""
        texts = ("content", "reasoning_content", "thinking")
        hidden: dict[str, Any] = {
            key: self.hidden(message[key]) for key in texts if isinstance(message.get(key), str)
        }
        if isinstance(parts := message.get("content"), list):
            hidden["content"] = [
                {**part, "text": self.hidden(part["text"])}
                if isinstance(part, dict) and isinstance(part.get("text"), str)
                else part
                for part in parts
            ]
        if calls := message.get("tool_calls"):
            hidden["tool_calls"] = self._hidden_within(calls)
        return {**message, **hidden}

    def _hidden_within(self, value: Any) -> Any:
        """Plain data with placeholders in all of its texts."""
        if isinstance(value, str):
            return self.hidden(value)
        if isinstance(value, Mapping):
            return {self.hidden(str(key)): self._hidden_within(one) for key, one in value.items()}
        return [self._hidden_within(one) for one in value] if isinstance(value, list) else value

    def visible(self, text: str) -> str:
        """The text with control tokens in place of the placeholders of `hide`."""
        return self._name.sub(lambda found: self._names[found[0]], text)

    def rest_of(self, text: str, shown: str) -> str | None:
        """The rest of `text` after `shown`; None if it does not start with it."""
        if not self.visible(text).startswith(shown):
            return None
        at = seen = 0  # characters of the text, and of its visible form
        for found in self._name.finditer(text):
            if seen + found.start() - at >= len(shown):
                break
            seen += found.start() - at + len(self._names[found[0]])
            at = found.end()
        return text[at + len(shown) - seen :] if seen <= len(shown) else None

    def encode(self, text: str, last: int | None = None, *, is_start: bool = False) -> list[int]:
        """The tokens of a text after token `last`; placeholders become plain text again."""
        first, *others = [*self._name.split(text)]
        names = self._name.findall(text)
        ids = self.tokenizer.encode(first) if is_start else self.tokenizer.encode_after(first, last)
        for name, piece in zip(names, others, strict=True):
            with suppress(ValueError):  # an alphabet that cannot write it leaves it out
                ids += self.tokenizer.encode_plain(self._names[name], ids[-1] if ids else last)
            ids += self.tokenizer.encode_after(piece, ids[-1] if ids else last)
        return ids

    def check_tokens(self, pieces: Sequence[Piece]) -> None:
        """Raise ValueError unless the pieces have the tokens of the whole text.

        They may differ where the tokenizer would join characters across the border of two pieces:
        there a turn began, and the text before it already had its tokens.
        """
        encode, texts = self.tokenizer.encode, [piece.text for piece in pieces]
        built = [token for piece in pieces for token in piece.tokens]
        whole = encode("".join(texts))
        special = self.tokenizer.special_ids
        if built == whole or sum(map(special.__contains__, built)) < sum(
            map(special.__contains__, whole)  # control tokens that are plain text in a message
        ):
            return
        for number in range(1, len(texts)):
            before = encode("".join(texts[:number]))
            if before != whole[: len(before)]:
                return
        at = next((i for i, (a, b) in enumerate(zip(built, whole, strict=False)) if a != b), 0)
        near = slice(max(0, at - 3), at + 4)
        raise ValueError(
            f"the tokenizer encodes this conversation differently turn by turn: tokens {built[near]} "
            f"instead of {whole[near]} at token {at}. It adds something before or between texts that "
            "graft does not support; use another tokenizer.json of the model"
        )

    def turn_end(self, whole: str) -> tuple[str, str]:
        """A text that ends with an assistant's turn, without its closing, and the turn's end."""
        if whole.endswith(self._closing):
            return whole[: len(whole) - len(self._closing)], self.end_text
        for end in self.ends.values():
            if whole.endswith(end):
                return whole.removesuffix(end), end
        raise self._unlike_a_policy("", whole)

    def assistant_text(self, message: Message, opened: str, whole: str) -> tuple[str, str]:
        """The policy's text after `opened` if the template renders `whole`, and the turn's end."""
        turn = _squeeze(whole[len(opened) :])
        if not (whole.startswith(opened) and all(text in turn for text in _texts_of(message))):
            raise self._unlike_a_policy(opened, whole)
        text, end = self.turn_end(whole)
        return text[len(opened) :], end

    def _written_after(
        self, messages: Sequence[Message], *, opened: bool, tool: str = "tool"
    ) -> str:
        """The template's text after an assistant's content when `messages` follow."""
        for role in {message["role"] for message in messages} - self._shown:
            self._require(role, tool)
        probe = [_ASK, {"role": "assistant", "content": SENTINEL}, *messages]
        try:
            text = self.render(probe, add_generation_prompt=opened)
        except TemplateError:
            if not any(message["role"] == "tool" for message in messages):
                raise
            return self._written_after_call(messages, opened, tool)
        before, found, after = text.partition(SENTINEL)
        if not found:
            raise TemplateRewrites(
                f"the chat template drops an assistant turn; it wrote {before[:120]!r}. "
                f"{HOW_TO_APPEND}"
            )
        return after

    def _written_after_call(self, messages: Sequence[Message], opened: bool, tool: str) -> str:
        """The same for templates that show a result only after a call, which then ends the turn."""
        answers = [{"tool_call_id": _CALL_ID, "name": tool, **message} for message in messages]
        closing = self.render([_ASK, _probe_call(tool)]).partition(SENTINEL)[2]
        text = self.render([_ASK, _probe_call(tool), *answers], add_generation_prompt=opened)
        after = text.partition(SENTINEL)[2]
        end = _last_added(closing, self.tokenizer)
        if not end or not after.startswith(closing):
            raise TemplateRewrites(
                f"the chat template rewrites a call when its result arrives: {closing[:80]!r} has "
                f"become {after[:80]!r}. {HOW_TO_APPEND}"
            )
        return after[closing.rfind(end) :]

    def _require(self, role: str, tool: str) -> None:
        """Raise if the template skips a role, as some do: a tool result would be lost silently."""
        self._shown.add(role)
        probe: Message = {"role": role, "content": _SHOWN}
        if _SHOWN not in self._written_after([probe], opened=False, tool=tool):
            self._shown.discard(role)
            raise TemplateError(
                f"the chat template does not write messages of role {role!r}; "
                f"use model.chat_template=chatml, or send them as another role"
            )

    def _find_other_ends(self) -> None:
        """A turn that calls a tool, or an earlier turn, may end differently (gpt-oss: <|call|>)."""
        try:
            called = self.render([_ASK, _probe_call("tool")]).partition(SENTINEL)[2]
        except TemplateError:  # a template without calls
            called = ""
        end = _last_added(called, self.tokenizer)
        if end and self.end_text.strip() not in called and self.ends:
            self.ends[self.tokenizer.added_tokens[end]] = end
        try:
            after = self._written_after([{"role": "user", "content": _SHOWN}], opened=False)
        except TemplateError:  # one question, one answer: nothing ever follows
            return
        past, _ = _turn_end(after.partition(_SHOWN)[0], self.tokenizer)
        is_any_message_end = after.partition(_SHOWN)[2].startswith(past)
        if past and is_any_message_end and not after.startswith(self.end_text):
            self._past_end = past

    def _find_ends_in_what_follows(self) -> None:
        """GLM's turns end with the mark of the next role: <|user|>, <|observation|>."""
        for role in ("user", "tool"):
            try:
                after = self._written_after([{"role": role, "content": _SHOWN}], opened=False)
            except TemplateError:
                continue
            text, ids = _turn_end(after.partition(_SHOWN)[0], self.tokenizer)
            if any(text == token for token in self.tokenizer.added_tokens):
                self.ends |= dict.fromkeys(ids, text)
                self.end_text = self.end_text or text

    def _behind_end(self, after: str, end: str) -> str:
        """The rest of `after` behind a turn that ended with `end`."""
        for closing in filter(None, (end, self._past_end)):
            if after.startswith(closing):
                return after[len(closing) :]
        return after

    def hidden(self, text: str) -> str:
        """The text with placeholders for control tokens."""
        for name, token in self._names.items():
            text = text.replace(token, name)
        return text

    def _turn_text(self, message: Message, tools: Tools | None) -> tuple[str, str]:
        """An assistant message as the policy would write it, and its end."""
        whole = self.render([_ASK, message], tools)
        opened = self._opened
        if tools or not opened or not whole.startswith(opened):  # such as a date that has changed
            opened = self.render([_ASK], tools, add_generation_prompt=True)
            if not tools:
                self._opened = opened
        return self.assistant_text(message, opened, whole)

    def _unlike_a_policy(self, opened: str, whole: str) -> TemplateRewrites:
        return TemplateRewrites(
            f"the chat template does not render an assistant message as a policy could write it: "
            f"opened {opened[-40:]!r}, rendered {whole[-120:]!r}. {HOW_TO_APPEND}"
        )


def turns_of(messages: Sequence[Message]) -> list[int]:
    """The indices of the assistant's messages; ValueError for an impossible conversation."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not messages or messages[0]["role"] == "assistant":
        raise ValueError("a conversation starts with a system or user message, this one does not")
    for first, second in pairwise(turns):
        if second == first + 1:
            raise ValueError(
                f"messages {first} and {second} are both from the assistant; join them into one, "
                f"or add the messages between them"
            )
    return turns


def _remembered(messages: Sequence[Message], *how: Any) -> Any:
    """A key for messages that have short texts alone; None for others."""
    if not all(isinstance(one, str) for message in messages for one in message.values()):
        return None
    if sum(len(one) for message in messages for one in message.values()) > LONGEST_EXTENDED:
        return None
    return (*how, *(tuple(message.items()) for message in messages))


def _turn_end(closing: str, tokenizer: FastTokenizer) -> tuple[str, frozenset[int]]:
    """The end of a turn in its closing text: up to its first special token, or its last word.

    "<|im_end|>\\n" -> "<|im_end|>"; as one token its id too, as several no id.
    """
    found = [(closing.find(token), -len(token), token) for token in tokenizer.added_tokens]
    found = sorted(place for place in found if place[0] >= 0)
    if not found:
        return closing.rstrip(), frozenset()
    at, _, token = found[0]
    return closing[: at + len(token)], frozenset({tokenizer.added_tokens[token]})


def _last_added(text: str, tokenizer: FastTokenizer) -> str:
    """The last added token in the text, the longest of those that end there."""
    found = [
        (text.rfind(token) + len(token), len(token), token) for token in tokenizer.added_tokens
    ]
    return max((place for place in found if place[2] in text), default=(0, 0, ""))[2]


def _probe_call(tool: str) -> Message:
    function = {"name": tool, "arguments": {"graft": SENTINEL}}
    calls = [{"id": _CALL_ID, "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _calls(message: Message) -> list[Mapping[str, Any]]:
    return [call.get("function") or call for call in message.get("tool_calls") or []]


def _tool_of(message: Message) -> str:
    """The name of the tool that the message calls; without a call, any name."""
    return next((str(call["name"]) for call in _calls(message) if call.get("name")), "tool")


def _texts_of(message: Message) -> list[str]:
    """The texts that a rendered assistant message must contain, without blanks."""
    parts = [message.get("content"), message.get("reasoning_content")]
    return [_squeeze(part) for part in [*parts, *(call.get("name") for call in _calls(message))]]


def _squeeze(content: Any) -> str:
    """The text without blanks: templates may format content, but not drop it."""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    return "".join((content or "").split())

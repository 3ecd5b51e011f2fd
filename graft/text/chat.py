"""Conversations as tokens that only grow: a prompt, the policy's turn, the text between, and so on.

Sampled tokens are never rendered or encoded again; the text between two turns is what the template
writes after an assistant's text (`graft.text.turn_borders`).

Some templates rewrite earlier turns when later ones arrive: Qwen3's drops thoughts from before the
last question. `history` selects what happens then:

    append      sampled tokens stay; only new messages are rendered, as above
    template    every turn follows the template's rendering of the whole conversation; where that
                differs from the context, a new context begins (`graft.text.transcript`)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from graft.text.append_only import TemplateRewrites, check_growth
from graft.text.template import (
    TEMPLATES,
    TemplateError,
    Tools,
    check_variables,
    find_template,
    render,
    variables_of,
)
from graft.text.tokenizer import FastTokenizer
from graft.text.turn_borders import SENTINEL, TurnBorders, tool_of
from graft.types import Message

T = TypeVar("T")

APPEND, TEMPLATE = "append", "template"
HISTORIES = {
    APPEND: "model.history=append: sampled tokens stay in the context, also those that the template "
    "would drop, and only new messages are rendered; an attempt is one context",
    TEMPLATE: "model.history=template: each turn follows the template's rendering of the whole "
    "conversation; where it rewrites earlier turns, a new context begins, which is a row of its own",
}
"""What each value does with a template that rewrites."""
MAX_EXTENDED, LONGEST_EXTENDED = 1024, 2048
"""Texts between two turns whose tokens are kept, and the characters of their messages: environments and
agents send the same few lines again and again."""


class Piece(NamedTuple):
    """A part of a finished conversation, and whether the assistant wrote it (it is trained)."""

    text: str
    tokens: list[int]
    is_trained: bool


class Chat:
    """Renders with one template; `options` are extra template variables such as enable_thinking.

    `end_ids` are the tokens with which the template ends an assistant turn: sampling stops there, and at
    eos. `end_text` is the text of that end; if it is not one token, `end_ids` is empty and it is a stop
    string. `ends` has the text that each of these tokens completes. A turn that ends with another of the
    model's eos tokens (Llama 3.1's <|eom_id|>) has ended, too: it gets no second end.

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
            self.origin = f"model.chat_template={template if len(template) < 200 else 'TEXT'!r}"
            self.template = self._explained(
                lambda: find_template(template, tokenizer.chat_templates)
            )
        elif tokenizer.chat_template is not None:
            self.template = tokenizer.chat_template
            self.origin = (
                f"{tokenizer.origin or 'tokenizer'} (model.chat_template replaces its template)"
            )
        else:
            known = ", ".join([*TEMPLATES, *tokenizer.chat_templates])
            raise TemplateError(
                f"the tokenizer has no default chat template; pass model.chat_template=NAME "
                f"(one of {known}) or model.chat_template=PATH of a .jinja file; from Python "
                "graft.load(..., chat_template=NAME)"
            )
        self._explained(lambda: variables_of(self.template))
        check_variables(self.template, options)
        self._extended: dict[Any, list[int]] = {}
        self._ended: dict[int | None, list[int]] = {}
        self._names = {  # placeholders for control tokens that are only text
            f"{SENTINEL}.{number}.": token for number, token in enumerate(tokenizer.control_tokens)
        }
        self._name = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self.borders = TurnBorders(self.render, tokenizer)
        self.end_text, self.ends = self.borders.end_text, self.borders.ends
        self.end_ids = frozenset(self.ends)

    def render(self, messages: Sequence[Message], tools: Tools | None = None, **how: bool) -> str:
        """The text of `messages`; `how` is add_generation_prompt or continue_final_message."""
        variables = {**self.tokenizer.special_tokens, **self.options}
        return self._explained(
            lambda: render(self.template, messages, tools=tools, **how, **variables)
        )

    def _explained(self, use: Callable[[], T]) -> T:
        """`use()`; an error of the template names its file and the key that replaces it."""
        try:
            return use()
        except TemplateError as error:
            raise TemplateError(f"{self.origin}: {error}") from error

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
        if not prefill:
            return prompt
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
                f"{self.origin}: the chat template does not show tools, so the policy would not see them; "
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
            if len(self._extended) >= MAX_EXTENDED:
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
        after = self.borders.after([self.hide(one) for one in messages], opened=True, tool=tool)
        if not closed:
            return self.encode(after, last)
        if last in self.tokenizer.eos_ids and last not in self.ends:
            # where the mark of the next message ends a turn, that mark is still missing
            end = self.end_text if self.borders.closing else ""
        else:
            if last not in self.ends and self.ends:
                last = next(iter(self.ends))
            end = self.end_text if last is None else self.ends.get(last, self.end_text)
        return self.encode(self.borders.text_after(after, end), last)

    def is_closed(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens of a policy turn end as the template ends a turn, or with an eos token."""
        if tokens and tokens[-1] in {*self.end_ids, *self.tokenizer.eos_ids}:
            return True
        if self.end_ids or not self.end_text:
            return False
        longest = len(self.end_text.encode())  # a token may be a single byte
        return self.tokenizer.decode(tokens[-longest:]).endswith(self.end_text)

    def turn_text(self, tokens: Sequence[int], last: int | None = None) -> str:
        """The text of a turn after token `last`, without its end, the template's or plain eos."""
        end = ""
        if tokens and tokens[-1] in self.ends:
            end = self.ends[tokens[-1]]
        elif tokens and tokens[-1] in self.tokenizer.eos_ids:
            tokens = tokens[:-1]
        elif self.is_closed(tokens):
            end = self.end_text
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
            after = self.borders.after(others, opened=stop is not None, tool=tool_of(message))
            text, end = self.borders.written(message, tools)
            if not self.borders.closing:  # the start of the next message ends the turn
                end = next((end for end in self.ends.values() if after.startswith(end)), end)
            texts += [text + end, self.borders.text_after(after, end)]
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
        closing = self.borders.closing
        check_growth(self.render, closing, self.end_text if closing else "")

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
        if SENTINEL not in text:  # so no placeholder
            return (
                self.tokenizer.encode(text) if is_start else self.tokenizer.encode_after(text, last)
            )
        first, *others = [*self._name.split(text)]
        names = self._name.findall(text)
        ids = self.tokenizer.encode(first) if is_start else self.tokenizer.encode_after(first, last)
        for name, piece in zip(names, others, strict=True):
            with suppress(ValueError):  # an alphabet that cannot write it leaves it out
                ids += self.tokenizer.encode_plain(self._names[name], ids[-1] if ids else last)
            ids += self.tokenizer.encode_after(piece, ids[-1] if ids else last)
        return ids

    def encode_end(self, last: int | None) -> list[int]:
        """The tokens of `end_text` after token `last`: every turn of a demonstration asks for them."""
        last = last if last in self.tokenizer.added_ids else None  # all ordinary tokens are alike
        if last not in self._ended:
            self._ended[last] = self.tokenizer.encode_after(self.end_text, last)
        return self._ended[last]

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

    def hidden(self, text: str) -> str:
        """The text with placeholders for control tokens."""
        for name, token in self._names.items():
            text = text.replace(token, name)
        return text


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

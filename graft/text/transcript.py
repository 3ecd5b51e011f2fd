"""Conversations that follow a template exactly, even if it rewrites earlier turns.

Qwen3's template shows a thought only until the next question. A policy that follows the template is
sampled in several contexts, each of which only grows:

    context 0   <|user|>2+3?<|assistant|>  <think>easy</think>5          sampled
    context 1   <|user|>2+3?<|assistant|>5<|user|>and 4?<|assistant|>  <think>so</think>9     sampled

Before each turn the whole conversation is rendered, the policy's turns as messages. If the text starts
with the text of the context, only the rest is encoded and the sampled tokens stay; if not, a new context
begins with the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graft.text.chat import APPEND, Chat, Piece, turns_of
from graft.text.syntax_probe import syntax_of
from graft.text.template import TemplateError, Tools
from graft.text.turn import readings
from graft.types import Message


class Next(NamedTuple):
    """What follows a turn: `tokens` appended to its context, or (`is_new`) in a new context."""

    transcript: Transcript
    tokens: list[int]
    is_new: bool


class Transcript(NamedTuple):
    """One context as messages and as text, up to the start of the policy's turn."""

    messages: tuple[Message, ...]
    """With placeholders for control tokens in their contents."""
    shown: str
    """The text of the context's first `length` tokens."""
    length: int
    tools: Tools | None = None
    begun: str = ""
    """The start of the policy's turn among these tokens: a prefill, or a message that it continues."""

    @classmethod
    def of(
        cls,
        chat: Chat,
        messages: Sequence[Message],
        tools: Tools | None,
        tokens: Sequence[int],
        prefill: str = "",
    ) -> Transcript:
        """The transcript of a prompt with these tokens."""
        plain, messages = messages, [chat.hide(message) for message in messages]
        shown, begun = chat.visible(chat.prompt_text(messages, tools)), ""
        if plain[-1]["role"] == "assistant":
            opened = chat.visible(chat.render(messages[:-1], tools, add_generation_prompt=True))
            content = str(plain[-1]["content"])
            begun = shown[len(opened) :] if shown.startswith(opened) else content
            messages = messages[:-1]
        return cls(tuple(messages), shown + prefill, len(tokens), tools, begun + prefill)

    def answered(self, chat: Chat, tokens: Sequence[int], answers: Sequence[Message]) -> Next:
        """What follows `tokens`, the whole context, when the policy's turn gets these answers."""
        turn, last = tokens[self.length :], tokens[self.length - 1]
        words = chat.turn_text(turn, last)
        message = self._as_message(chat, words)
        calls = message.get("tool_calls") or []
        hidden = [chat.hide(_answer(answer, calls, i)) for i, answer in enumerate(answers)]
        messages = (*self.messages, message, *hidden)
        text = chat.render(messages, self.tools, add_generation_prompt=True)
        shown = self.shown + chat.tokenizer.decode_after(turn, last)
        rest = chat.rest_of(text, shown)
        new = chat.encode(text, is_start=True) if rest is None else chat.encode(rest, tokens[-1])
        length = len(new) if rest is None else len(tokens) + len(new)
        following = Transcript(messages, chat.visible(text), length, self.tools)
        return Next(following, new, rest is None)

    def plain_messages(self, chat: Chat) -> list[Message]:
        """The messages without placeholders, as plain data."""
        keys = ("content", "reasoning_content", "thinking")
        return [
            {k: chat.visible(v) if k in keys and isinstance(v, str) else v for k, v in one.items()}
            for one in self.messages
        ]

    def _as_message(self, chat: Chat, words: str) -> Message:
        """The policy's turn as a message that the template renders as the policy wrote it.

        If it renders no reading that way, the first reading that it accepts.
        """
        accepted: Message | None = None
        for reading in readings(self.begun + words, syntax_of(chat), self.tools):
            message = chat.hide(reading)
            try:
                whole = chat.render([*self.messages, message], self.tools)
            except TemplateError:
                continue
            if chat.visible(whole).startswith(self.shown + words):
                return message
            accepted = accepted or message
        if accepted is None:
            raise TemplateError(
                f"the chat template refuses what the policy wrote, {words[:80]!r}, as a message; "
                "use model.history=append"
            )
        return accepted


def contexts(chat: Chat, messages: Sequence[Message], tools: Tools | None) -> list[list[Piece]]:
    """A finished conversation in the contexts that its turns would be sampled in, each in pieces.

    With history "append" it is one context. With "template" every turn is in the context that it
    would have been sampled in, so that all turns can be trained.
    """
    turns = turns_of(messages)
    if chat.history == APPEND or not turns:
        return [chat.pieces(messages, tools)]
    texts = [chat.prompt_text(messages[: turns[0]], tools)]
    found: list[list[str]] = []
    for start, stop in zip(turns, [*turns[1:], None], strict=True):
        opened, whole = "".join(texts), chat.render(messages[: start + 1], tools)
        text, end = chat.borders.assistant_text(messages[start], opened, whole)
        later = whole
        if stop is not None:
            later = chat.render(messages[:stop], tools, add_generation_prompt=True)
        ends = dict.fromkeys([end, *chat.ends.values()])
        kept = next((e for e in ends if later.startswith(opened + text + e)), None)
        if kept is not None:
            texts += [text + kept, later[len(opened + text + kept) :]]
        else:
            found.append([*texts, text + end])
            texts = [later]
    return [chat.encode_pieces(one) for one in [*found, texts] if len(one) > 1]


def _answer(answer: Message, calls: Sequence[Message], number: int) -> Message:
    """A tool's result with the id and name of its call, which some templates read."""
    if answer["role"] != "tool" or not calls:
        return answer
    call = calls[min(number, len(calls) - 1)]
    return {"tool_call_id": call["id"], "name": call["function"]["name"], **answer}

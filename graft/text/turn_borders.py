"""Find where a template begins and ends the assistant's turns, and what it writes after one.

The text between two turns is found by rendering a probe conversation with a sentinel as the assistant's
text and cutting after it:

    [user probe, assistant SENTINEL, user "and 4?"] in chatml, a line per part:

        <|im_start|>user⏎probe<|im_end|>⏎<|im_start|>assistant⏎SENTINEL
        <|im_end|>⏎                                                        closes the turn
        <|im_start|>user⏎and 4?<|im_end|>⏎<|im_start|>assistant⏎           the message; opens the next turn
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graft.text.append_only import HOW_TO_APPEND, TemplateRewrites
from graft.text.template import TemplateError, Tools
from graft.text.tokenizer import FastTokenizer
from graft.types import Message

SENTINEL = "graft.sentinel.7c1e"
_SHOWN = "graft.shown"
ASK: Message = {"role": "user", "content": "graft.question"}
_CALL_ID = "call00001"  # nine characters: Mistral's templates count them


class TurnBorders:
    """What `render`, of one template, writes around the assistant's texts.

    ends       the tokens that end a turn, each with the text that it completes
    end_text   the text of that end, also where it is not one token
    closing    what a template writes after the last turn of a conversation
    """

    def __init__(self, render: Callable[..., str], tokenizer: FastTokenizer) -> None:
        self.render, self.tokenizer = render, tokenizer
        self._shown: set[str] = set()  # roles whose messages the template writes
        self._opened = ""  # the text before an assistant's turn, without tools
        self._past_end = ""  # the end of a turn that is not the last, where that differs
        self.closing = self.after([], opened=False)
        self.end_text, ids = _turn_end(self.closing, tokenizer)
        self.ends: dict[int, str] = dict.fromkeys(ids, self.end_text)
        if self.end_text:
            self._find_other_ends()
        else:
            self._find_ends_in_what_follows()

    def after(self, messages: Sequence[Message], *, opened: bool, tool: str = "tool") -> str:
        """The template's text after an assistant's content when `messages` follow."""
        for role in {message["role"] for message in messages} - self._shown:
            self._require(role, tool)
        probe = [ASK, {"role": "assistant", "content": SENTINEL}, *messages]
        try:
            text = self.render(probe, add_generation_prompt=opened)
        except TemplateError:
            if not any(message["role"] == "tool" for message in messages):
                raise
            return self._after_call(messages, opened, tool)
        before, found, after = text.partition(SENTINEL)
        if not found:
            raise TemplateRewrites(
                f"the chat template drops an assistant turn; it wrote {before[:120]!r}. "
                f"{HOW_TO_APPEND}"
            )
        return after

    def _after_call(self, messages: Sequence[Message], opened: bool, tool: str) -> str:
        """The same for templates that show a result only after a call, which then ends the turn."""
        answers = [{"tool_call_id": _CALL_ID, "name": tool, **message} for message in messages]
        closing = self.render([ASK, _probe_call(tool)]).partition(SENTINEL)[2]
        text = self.render([ASK, _probe_call(tool), *answers], add_generation_prompt=opened)
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
        if _SHOWN not in self.after([probe], opened=False, tool=tool):
            self._shown.discard(role)
            raise TemplateError(
                f"the chat template does not write messages of role {role!r}; "
                f"use model.chat_template=chatml, or send them as another role"
            )

    def _find_other_ends(self) -> None:
        """A turn that calls a tool, or an earlier turn, may end differently (gpt-oss: <|call|>)."""
        try:
            called = self.render([ASK, _probe_call("tool")]).partition(SENTINEL)[2]
        except TemplateError:  # a template without calls
            called = ""
        end = _last_added(called, self.tokenizer)
        if end and self.end_text.strip() not in called and self.ends:
            self.ends[self.tokenizer.added_tokens[end]] = end
        try:
            after = self.after([{"role": "user", "content": _SHOWN}], opened=False)
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
                after = self.after([{"role": role, "content": _SHOWN}], opened=False)
            except TemplateError:
                continue
            text, ids = _turn_end(after.partition(_SHOWN)[0], self.tokenizer)
            if any(text == token for token in self.tokenizer.added_tokens):
                self.ends |= dict.fromkeys(ids, text)
                self.end_text = self.end_text or text

    def text_after(self, after: str, end: str) -> str:
        """The rest of `after` behind a turn that ended with `end`."""
        for closing in filter(None, (end, self._past_end)):
            if after.startswith(closing):
                return after[len(closing) :]
        return after

    def turn_end(self, whole: str) -> tuple[str, str]:
        """A text that ends with an assistant's turn, without its closing, and the turn's end."""
        if whole.endswith(self.closing):
            return whole[: len(whole) - len(self.closing)], self.end_text
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

    def written(self, message: Message, tools: Tools | None) -> tuple[str, str]:
        """An assistant message as the policy would write it, and its end."""
        whole = self.render([ASK, message], tools)
        opened = self._opened
        if tools or not opened or not whole.startswith(opened):  # such as a date that has changed
            opened = self.render([ASK], tools, add_generation_prompt=True)
            if not tools:
                self._opened = opened
        return self.assistant_text(message, opened, whole)

    def _unlike_a_policy(self, opened: str, whole: str) -> TemplateRewrites:
        return TemplateRewrites(
            f"the chat template does not render an assistant message as a policy could write it: "
            f"opened {opened[-40:]!r}, rendered {whole[-120:]!r}. {HOW_TO_APPEND}"
        )


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


def tool_of(message: Message) -> str:
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

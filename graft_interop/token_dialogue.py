"""A dialogue in tokens, for trainers whose rollouts are token lists: verl, OpenRLHF, RL2.

prompt       begin(seed)          the chat template's tokens of the task
turn         sampled by the trainer, never encoded again
observation  reply(turn)          the end of the turn if it lacks one, the messages, the next opening
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft_interop.dialogue import REWRITES, Dialogue, until_stop

MAX_CHATS = 8


class TurnTokens(NamedTuple):
    """What one turn of the policy leads to."""

    kept: int
    """How many of the sampled tokens belong to the turn: what follows a stop string is cut."""
    observation: list[int]
    """Tokens to append, which are not trained; none at the end of the episode."""
    is_new_context: bool = False
    """`observation` is a whole prompt: the environment has rewritten the history."""


class TokenDialogue:
    def __init__(self, dialogue: Dialogue, chat: Chat) -> None:
        self.dialogue, self.chat = dialogue, chat

    async def begin(self, seed: int) -> list[int]:
        await self.dialogue.begin_async(seed)
        return self._prompt()

    async def reply(self, tokens: Sequence[int]) -> TurnTokens:
        """Act with the text of the sampled tokens."""
        dialogue, chat = self.dialogue, self.chat
        kept = kept_tokens(tokens, dialogue.stop, chat.tokenizer)
        turn = list(tokens[:kept])
        # the last token may contain more than the stop string
        answer = await dialogue.reply_async(until_stop(chat.turn_text(turn), dialogue.stop))
        if dialogue.is_over:
            return TurnTokens(kept, [])
        if dialogue.observed_as in REWRITES:
            return TurnTokens(kept, self._prompt(), is_new_context=True)
        last = turn[-1] if turn else None
        if dialogue.observed_as == "inline":
            text = answer.observation
            return TurnTokens(kept, chat.tokenizer.encode_plain(text, last))
        tool = str(answer.info.get("tool") or "tool")
        closed = chat.is_closed(turn)
        return TurnTokens(kept, chat.extend(dialogue.fresh, closed=closed, last=last, tool=tool))

    def _prompt(self) -> list[int]:
        dialogue = self.dialogue
        if dialogue.observed_as == "raw":  # a wrapper has applied the chat template
            return self.chat.encode(str(dialogue.messages[0]["content"]), is_start=True)
        return self.chat.prompt(dialogue.messages, dialogue.tools)


def kept_tokens(tokens: Sequence[int], stop: Sequence[str], tokenizer: FastTokenizer) -> int:
    """The number of tokens up to the first stop string, all of them without one.

    An engine that stops there has nothing to cut.
    """
    if not stop or not any(one in tokenizer.decode(tokens) for one in stop):
        return len(tokens)
    low, high = 1, len(tokens)
    while low < high:  # a longer start contains what a shorter one contains
        middle = (low + high) // 2
        text = tokenizer.decode(tokens[:middle])
        low, high = (low, middle) if any(one in text for one in stop) else (middle + 1, high)
    return low


_chats: dict[tuple[Any, ...], tuple[Any, Chat]] = {}


def chat_of(tokenizer: Any, options: Mapping[str, Any] | None = None) -> Chat:
    """The Chat of a transformers tokenizer; `options` are variables of its chat template.

    Kept, since to build one takes a second with a large vocabulary: for the next tokenizer of the same
    model too, because Ray gives each task a copy.
    """
    who = getattr(tokenizer, "name_or_path", "") or id(tokenizer)
    key = (who, str(tokenizer.chat_template), json.dumps(dict(options or {}), sort_keys=True))
    if key not in _chats:
        if len(_chats) >= MAX_CHATS:
            _chats.clear()
        _chats[key] = tokenizer, built_chat(tokenizer, dict(options or {}))  # keeps the id in use
    return _chats[key][1]


def built_chat(tokenizer: Any, options: Mapping[str, Any]) -> Chat:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no fast backend; load the model's tokenizer with use_fast=True"
        )
    stored = tokenizer.chat_template or {}
    templates = {"default": stored} if isinstance(stored, str) else dict(stored)
    # a copy: the trainer sets padding and truncation on its own
    copied = type(backend).from_str(backend.to_str())
    return Chat(FastTokenizer(copied, tokenizer.special_tokens_map, templates), **options)

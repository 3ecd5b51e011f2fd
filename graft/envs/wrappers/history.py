"""Wrappers that show the whole history in every prompt, instead of letting the context grow.

    reset   rules, board 0
    concat              rules, feedback 1, board 1
    concat_with_action  rules, action 1, feedback 1, board 1
    concat_chat         the same as messages, through the chat template

What only holds now (the board, `info["suffix"]`; or `info["prefix"]`) is shown once, in its last
version. The observation is the complete next prompt, and `observe_as` is its kind: "prompt" (a text
for the user's turn) or "raw" (already rendered by the chat template).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graft.envs.base import Wrapper, as_messages
from graft.protocols import Env, Observation
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.types import Message, Turn

GONE = "(what was shown here no longer holds)"
"""Replaces an old message that held only a board: a chat needs some message in its place."""

Render = Callable[[Sequence[Message], Any], str]
Plain = Callable[[str], str]
"""Makes a text harmless to the template: control tokens in it are not read as such."""


class History(Wrapper):
    """Rewrites observations to prompts that hold the history.

    `actions` shows what the policy did (`info["parsed_action"]` where the env sets it). `chat` is
    "turns" (every turn a message), "reset" (the first observation a message, the rest plain text
    after it) or "" (no template). `turns` keeps only the last turns; the first observation, which holds
    the instructions, always stays.
    """

    shared = ("_render", "_plain")
    saved = ("seen", "schemas")

    def __init__(
        self,
        env: Env,
        *,
        actions: bool,
        chat: str = "",
        turns: int | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(env)
        if turns is not None and turns < 0:
            raise ValueError(f"turns={turns}: must be 0 or more, or None for the whole history")
        if env.observe_as in ("prompt", "raw"):
            raise ValueError(
                "two wrappers rewrite the history; keep one (max_history comes right after it)"
            )
        self.actions = actions
        self.chat = chat
        self.keep = turns
        self._render, self._plain = renderer(tokenizer) if chat else (None, str)
        self.observe_as = "raw" if chat else "prompt"
        self.seen: list[dict[str, Any]] = []
        self.schemas: list[Any] | None = None

    def reset(self, seed: int | None = None, **options: Any) -> tuple[Observation, dict[str, Any]]:
        observation, info = self.env.reset(seed, **options)
        messages = [dict(message) for message in as_messages(observation)]
        self.schemas = info.get("tools")
        self.seen = [{"messages": messages, **margins(info)}]
        return self._prompt(), self._without_margins(info)

    def step(self, action: str) -> Turn:
        turn: Turn = self.env.step(action)
        role = "tool" if "tool" in turn.info else "user"
        observe_as = turn.info.get("observe_as", role)
        if observe_as == "messages":
            raise ValueError(
                "the environment started another conversation (a sub-agent's, or a rewritten history), "
                "which a history wrapper cannot show; leave the wrapper out"
            )
        role = observe_as if observe_as in ("user", "tool") else role
        messages = [{"role": role, "content": turn.observation}]
        played = turn.info.get("parsed_action", action)
        self.seen.append({"action": played, "messages": messages, **margins(turn.info)})
        return turn._replace(observation=self._prompt(), info=self._without_margins(turn.info))

    def limited(self, turns: int) -> History:
        """The same wrapper around the same env, showing only the last `turns`."""
        twin = copy.copy(self)
        twin.seen, twin.keep = [], turns
        return twin

    def _prompt(self) -> str:
        if self.chat == "turns":
            return self._rendered(self._messages())
        first, *rest = self._turns()
        opening = (
            self._rendered(first["messages"])
            if self.chat == "reset"
            else "\n".join(str(message["content"]) for message in first["messages"])
        )
        texts = [opening]
        for turn in rest:
            if self.actions:
                texts.append(self._plain(turn["action"]))
            texts.append(self._plain(turn["messages"][0]["content"]))
        *before, last = [text for text in texts if text] or [""]
        return "".join(text if text.endswith("\n") else f"{text}\n" for text in before) + last

    def _messages(self) -> list[Message]:
        first, *rest = self._turns()
        messages: list[Message] = list(first["messages"])
        for turn in rest:
            (observed,) = turn["messages"]
            messages.append({"role": "assistant", "content": turn["action"]})
            messages.append(observed)
        return messages

    def _turns(self) -> list[dict[str, Any]]:
        """The part of the history to show: without outdated boards and dropped turns."""
        prefix = next((turn["prefix"] for turn in self.seen[::-1] if turn["prefix"]), "")
        live = max((i for i, turn in enumerate(self.seen) if turn["suffix"]), default=0)
        start = 1 if self.keep is None else max(1, len(self.seen) - self.keep)
        shown = [0, *range(start, len(self.seen))]
        turns: list[dict[str, Any]] = []
        for i in shown:
            turn = copy.deepcopy(self.seen[i])
            last = turn["messages"][-1]
            text: str = last["content"].removeprefix(turn["prefix"])
            if turn["suffix"] and i != live:
                text = text.removesuffix(turn["suffix"]).removesuffix("\n")
            if i == 0 and live not in shown:  # the board is in a turn that is dropped
                text = f"{text}\n{self.seen[live]['suffix']}".removeprefix("\n")
            last["content"] = f"{prefix}{text}" if i == 0 else text
            turns.append(turn)
        return turns

    def _rendered(self, messages: Sequence[Message]) -> str:
        assert self._render is not None, "only called where `chat` is set"
        filled = [
            message if message["content"] else {**message, "content": GONE} for message in messages
        ]
        plain = [
            {**one, "content": self._plain(one["content"])}
            if isinstance(one["content"], str)
            else one
            for one in filled
        ]
        return self._render(plain, self.schemas)

    def _without_margins(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """`info` without the parts that the prompt now contains."""
        done = {"prefix", "suffix", "observe_as", *(["tools"] if self.chat else [])}
        return {name: value for name, value in info.items() if name not in done}


def margins(info: Mapping[str, Any]) -> dict[str, str]:
    return {"prefix": info.get("prefix") or "", "suffix": info.get("suffix") or ""}


def renderer(tokenizer: Any) -> tuple[Render, Plain]:
    """A function from messages and tool schemas to text, from anything with a chat template; and one that
    keeps control tokens in a content from being read as such: in graft by placeholders, which
    `Chat.encode` writes as plain text, elsewhere by a character of no width after their first one."""
    if tokenizer is None:
        raise ValueError(
            "a chat wrapper renders prompts and needs the model's tokenizer: "
            'wrap(env, "concat_chat", tokenizer=...), or use concat_with_action'
        )
    if isinstance(tokenizer, FastTokenizer):
        tokenizer = tokenizer.chat or Chat(tokenizer)
    if isinstance(tokenizer, Chat):
        chat = tokenizer

        def rendered(messages: Sequence[Message], tools: Any) -> str:
            return chat.render(messages, tools, add_generation_prompt=True)

        return rendered, chat.hidden
    if not hasattr(tokenizer, "apply_chat_template"):
        raise ValueError(
            f"{type(tokenizer).__name__} has no apply_chat_template; pass a tokenizer with a chat "
            "template, or a graft Chat"
        )

    def render(messages: Sequence[Message], tools: Any) -> str:
        more = {"tools": tools} if tools else {}
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **more
        )

    def plain(text: str) -> str:
        for token in getattr(tokenizer, "all_special_tokens", ()):
            text = text.replace(token, f"{token[0]}\u200b{token[1:]}")
        return text

    return render, plain


def concat(env: Env, *, turns: int | None = None) -> History:
    """All observations so far, one after the other."""
    return History(env, actions=False, turns=turns)


def concat_with_action(env: Env, *, turns: int | None = None) -> History:
    """Observation, action, observation, ... as plain text."""
    return History(env, actions=True, turns=turns)


def concat_chat(env: Env, *, tokenizer: Any = None, turns: int | None = None) -> History:
    """The history as messages through the chat template; a tool's result has the role "tool"."""
    return History(env, actions=True, chat="turns", turns=turns, tokenizer=tokenizer)


def concat_chat_on_reset(env: Env, *, tokenizer: Any = None, turns: int | None = None) -> History:
    """The first observation through the chat template, later turns after it as plain text."""
    return History(env, actions=True, chat="reset", turns=turns, tokenizer=tokenizer)


def max_history(env: Env, *, turns: int = 4) -> History:
    """The instructions and the last `turns`: of the history wrapper inside, else as plain text."""
    return env.limited(turns) if isinstance(env, History) else concat_with_action(env, turns=turns)

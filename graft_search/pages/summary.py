"""A second model that reads a page: an OpenAI-compatible endpoint."""

from __future__ import annotations

import os

from graft.http import HttpFault
from graft.tools.chat_model import ChatModel
from graft.tools.errors import ToolError
from graft.types import Message

INSTRUCTION = (
    "Below is the text of a web page. Write down the facts in it that help with the goal, with names, "
    "numbers and dates as they are written there. Use nothing but the page; if it does not help, say so "
    "in one sentence."
)


class Summariser:
    """Facts of a page for a goal, from a model behind `url` (https://host/v1).

    `key` is the name of an environment variable; "" sends none. The page is cut to `max_chars`.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        key: str = "",
        max_tokens: int = 512,
        max_chars: int = 40_000,
        timeout: float = 60.0,
        retries: int = 2,
        instruction: str = INSTRUCTION,
    ) -> None:
        if key and not os.environ.get(key):
            raise ValueError(f"the summariser's key is to be in the environment variable {key}")
        self.max_tokens, self.max_chars = max_tokens, max_chars
        self.instruction = instruction
        self.fingerprint = f"summary:{model}:{max_tokens}:{instruction}"
        self._chat = ChatModel(
            url,
            model,
            who="summariser",
            api_key_env=key,
            timeout=timeout,
            retries=retries,
            deadline=timeout,
        )

    def __call__(self, page: str, goal: str) -> str:
        wanted = goal or "a summary of the page"
        prompt = f"{self.instruction}\n\nGoal: {wanted}\n\nPage:\n{page[: self.max_chars]}"
        messages: list[Message] = [{"role": "user", "content": prompt}]
        try:
            text = self._chat.reply(messages, max_tokens=self.max_tokens, temperature=0.0)
        except HttpFault as fault:
            raise ToolError(f"the summariser at {self._chat.url} {fault}") from fault
        return text.strip()

"""A second model that reads a page: an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import os
from typing import Any

from graft.http import HttpClient, HttpFault, json_of
from graft.tools.errors import ToolError

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
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"summariser url {url!r} is not of the form http://host:port/v1")
        if key and not os.environ.get(key):
            raise ValueError(f"the summariser's key is to be in the environment variable {key}")
        self.url = f"{url.rstrip('/').removesuffix('/chat/completions')}/chat/completions"
        self.model, self.max_tokens, self.max_chars = model, max_tokens, max_chars
        self.instruction = instruction
        self.fingerprint = f"summary:{model}:{max_tokens}:{instruction}"
        self._client = HttpClient(
            timeout=timeout,
            deadline=timeout,
            retries=retries,
            headers={
                "Content-Type": "application/json",
                **({"Authorization": f"Bearer {os.environ[key]}"} if key else {}),
            },
        )

    def __call__(self, page: str, goal: str) -> str:
        wanted = goal or "a summary of the page"
        prompt = f"{self.instruction}\n\nGoal: {wanted}\n\nPage:\n{page[: self.max_chars]}"
        content = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
        }
        try:
            return self._client.request(self.url, json.dumps(content).encode(), _text_of)
        except HttpFault as fault:
            raise ToolError(f"the summariser at {self.url} {fault}") from fault


def _text_of(body: bytes) -> str:
    reply: Any = json_of(body)
    try:
        text = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):
        raise ValueError("a reply without choices[0].message.content")
    return text.strip()

"""A model behind an OpenAI-compatible server (vLLM, SGLang, llama.cpp, a hosted one): messages -> a text.

model = ChatModel(None, None, who="judge", timeout=30.0, retries=3)    at $JUDGE_URL, $JUDGE_MODEL
model.reply([{"role": "user", "content": "2+3="}], temperature=0)      "5"
"""

from __future__ import annotations

import json
import math
import os
import urllib.parse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from graft.http import HttpClient, HttpFault, decode_excerpt, json_of, key_for
from graft.trust.masking import remember_all
from graft.types import Message


class ChatModel:
    """One served model, by its address, its name and the key that it wants.

    url          the server's base, such as http://host:8001/v1; None or "" takes $WHO_URL
    model        the served model; None takes $WHO_MODEL, and "" sends no name
    who          what the model is here for, such as "judge", in messages and in names of variables
    api_key_env  the environment variable with the key for this server; "": see `graft.http.key_for`
    timeout, retries, deadline, max_bytes   of `HttpClient`
    """

    def __init__(
        self,
        url: str | None,
        model: str | None,
        *,
        who: str,
        api_key_env: str = "",
        timeout: float,
        retries: int,
        deadline: float = math.inf,
        max_bytes: int = 2**26,
    ) -> None:
        variable = f"{who.upper()}_URL"
        self.url = chat_address(url or os.environ.get(variable, ""), who, variable)
        remember_all(self.url)
        self.name = os.environ.get(f"{who.upper()}_MODEL", "") if model is None else model
        headers = {"Content-Type": "application/json"}
        if key := key_for(self.url, api_key_env):
            headers["Authorization"] = f"Bearer {key}"
        self._client = HttpClient(
            timeout=timeout,
            deadline=deadline,
            retries=retries,
            headers=headers,
            max_bytes=max_bytes,
        )

    def reply(
        self,
        messages: Sequence[Message],
        *,
        deadline: float = math.inf,
        before: Callable[[float], None] | None = None,
        on_fault: Callable[[HttpFault, float | None], None] | None = None,
        is_whole: bool = False,
        **settings: Any,
    ) -> str:
        """The text of the model's reply; HttpFault if there is none, or (`is_whole`) only its start.

        `settings` are parts of the request, such as temperature; the other arguments are those of
        `HttpClient.request`.
        """
        content = {"model": self.name} if self.name else {}
        content |= {"messages": [*messages], **settings}
        return self._client.request(
            self.url,
            json.dumps(content).encode(),
            partial(_text_of, is_whole=is_whole),
            deadline=deadline,
            before=before,
            on_fault=on_fault,
        )


def chat_address(url: str, who: str, variable: str) -> str:
    """The address of chat completions under a server's base: http://host/v1 -> .../v1/chat/completions"""
    if not url:
        raise ValueError(
            f"the {who} has no server: give url=, such as http://localhost:8001/v1, or set ${variable}"
        )
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{who} url {url!r} is not of the form http://host:port/v1")
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    return parts._replace(path=f"{path}/chat/completions").geturl()


def _text_of(data: bytes, is_whole: bool) -> str:
    """The text of a chat completion; ValueError: it has none, or was cut off."""
    try:
        choice = json_of(data)["choices"][0]
        text = choice["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"no choices[0].message.content: {decode_excerpt(data)!r}") from None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"a message without text: {text!r}")
    if is_whole and choice.get("finish_reason") == "length":
        raise ValueError(f"a message that was cut off: {text[-80:]!r}")
    return text

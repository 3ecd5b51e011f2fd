"""Another model provider, to which the calls of an agent are passed on as they are. Nothing of it is trained.

endpoint = ModelEndpoint("https://api.openai.com/v1")
answer = await endpoint.send("/v1/chat/completions", {"model": "gpt-4.1", "messages": [...]}, {})   # bytes

The session's key stays here: the provider gets the key of the variable that is named for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic_core import to_json

from graft.gateway.request import RefusedRequest
from graft.http import HttpClient, HttpFault, key_for
from graft.trust.masking import remember_all

PASSED_HEADERS = ("anthropic-version", "anthropic-beta", "openai-beta")
"""The client's headers that are passed on, besides the kind of its content."""
ANTHROPIC = ("ANTHROPIC_API_KEY", "api.anthropic.com")
"""The variable that Anthropic's clients read, and the server that it is for."""
RETRIES = 2
MAX_ANSWER = 2**26
KINDS = {401: "internal", 403: "internal", 404: "not_found", 413: "too_large", 429: "rate_limit"}
"""Status of the provider -> kind of refusal; a key that it does not take is no fault of the agent."""


class ModelEndpoint:
    """A provider by its base address, with or without /v1.

    model         its name for the model; "": the client's
    api_key_env   the variable with its key; "": OPENAI_API_KEY or ANTHROPIC_API_KEY, for their own servers
    seconds       for one answer, retries included
    """

    def __init__(
        self, url: str, model: str = "", api_key_env: str = "", seconds: float = 600.0
    ) -> None:
        self.url, self.model = url.rstrip("/").removesuffix("/v1"), model
        remember_all(self.url)
        is_anthropic = urlsplit(url).hostname == ANTHROPIC[1] and not api_key_env
        key = key_for(self.url, *ANTHROPIC) if is_anthropic else key_for(self.url, api_key_env)
        keys = {"Authorization": f"Bearer {key}", "x-api-key": key} if key else {}
        self._client = HttpClient(
            timeout=seconds,
            deadline=seconds,
            retries=RETRIES,
            headers={"Content-Type": "application/json", **keys},
            max_bytes=MAX_ANSWER,
        )

    async def send(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
        """POST a request of a client to the same path; RefusedRequest if the provider refuses it."""
        sent = {**body, "model": self.model} if self.model else body
        more = {name: headers[name] for name in PASSED_HEADERS if name in headers}
        try:
            return await self._client.request_async(
                f"{self.url}{path}", to_json(sent), bytes, headers=more
            )
        except HttpFault as fault:
            kind = KINDS.get(fault.code, "invalid" if 400 <= fault.code < 500 else "overloaded")
            host = urlsplit(self.url).netloc.rpartition("@")[2]
            raise RefusedRequest(f"the endpoint {host} {fault}", kind) from fault

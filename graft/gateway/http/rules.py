"""Which session a request is about, in which dialect it asks, and whether it may."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import to_json

from graft.gateway.dialects import anthropic, openai_chat
from graft.gateway.dialects.dialect import DIALECTS, Dialect
from graft.gateway.request import RefusedRequest
from graft.gateway.session import AgentSession
from graft.serving.guard import Refused, Rules, bearer_tokens, equal_secrets

Find = Callable[[str], AgentSession | None]
"""The session with this key or id."""


class Place(NamedTuple):
    """A path without the name of its session.

    "/s/abc/v1/messages" -> Place("abc", "/v1/messages");  "/graft/sessions/abc/end" -> Place("abc", "end")
    """

    session: str
    path: str
    is_control: bool = False

    @property
    def api_path(self) -> str:
        """The path with the /v1 that some clients leave out."""
        return self.path if self.path.startswith("/v1/") else f"/v1{self.path}"

    @classmethod
    def of(cls, path: str, headers: Mapping[str, str]) -> Place:
        parts = path.strip("/").split("/")
        if parts[:2] == ["graft", "sessions"] and len(parts) <= 4:
            return cls("".join(parts[2:3]), "".join(parts[3:4]), is_control=True)
        named = headers.get("x-graft-session", "")
        if parts[0] == "s" and len(parts) > 1:
            named, parts = parts[1], parts[2:]
        return cls(named, "/" + "/".join(parts))


def dialect_of(place: Place, headers: Mapping[str, str]) -> Dialect:
    """The dialect of a path; of one that several have, that of the client."""
    for one in DIALECTS.values():
        if place.api_path.removesuffix("/count_tokens") == one.PATH:
            return one
    return anthropic if "anthropic-version" in headers else openai_chat


class GatewayRules(Rules):
    """Each path needs the key of its session, or the gateway's token; refusals are those of a dialect."""

    KINDS = {401: "authentication", 403: "permission", 404: "not_found", 413: "too_large"}

    def __init__(self, token: str, address: Sequence[Any], find: Find) -> None:
        super().__init__(token, address, "", ("GET", "HEAD", "POST", "DELETE"))
        self.find = find

    def stranger(
        self, path: str, headers: Mapping[str, str], tokens: Sequence[str]
    ) -> Refused | None:
        place = Place.of(path, headers)
        if place.path == "/" and not place.is_control:  # clients look whether anything is there
            return None
        shown = shown_keys(headers)
        if any(map(self.is_token, (*shown, *tokens))):
            return None
        if place.is_control and not place.session:  # a session's key opens no other
            return (
                401,
                "opening a session takes the token of this gateway, as a bearer's or as x-api-key",
            )
        session = session_of(place, shown, self.find)
        if session is None or not any(
            equal_secrets(one, session.key) for one in (place.session, *shown)
        ):
            return 401, (
                "no API key of an open session (it may have ended): send it as a bearer's token or as "
                "x-api-key, or put it into the path, /s/KEY/v1/..."
            )
        return None

    def written(self, refused: Refused, path: str, headers: Mapping[str, str]) -> tuple[str, bytes]:
        status, text = refused
        dialect = dialect_of(Place.of(path, headers), headers)
        error = RefusedRequest(text, self.KINDS.get(status, "invalid"))
        return "application/json", to_json(dialect.error(error)[1])


def shown_keys(headers: Mapping[str, str]) -> list[str]:
    """The secrets that a request shows in its headers."""
    return [*bearer_tokens(headers), *filter(None, [headers.get("x-api-key", "").strip()])]


def session_of(place: Place, shown: Sequence[str], find: Find) -> AgentSession | None:
    """The session that a request names, or whose key it shows."""
    if place.session:
        return find(place.session)
    found = ((key, find(key)) for key in shown)
    return next((one for key, one in found if one and equal_secrets(key, one.key)), None)

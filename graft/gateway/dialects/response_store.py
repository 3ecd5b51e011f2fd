"""Responses that a client goes on from by their id, as OpenAI keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from graft.gateway.dialects.fields import RequestFields, describe_value
from graft.gateway.request import RefusedRequest


class KeptResponse(NamedTuple):
    """A response with what it adds to the one before it."""

    previous: str | None
    items: list[Any]
    """The input of its request, then its output."""


class ResponseStore:
    """The responses of one session.

    request 1   input "1+2?"                                            -> resp_a, output "3"
    request 2   previous_response_id resp_a, input "and 4?"
                resolved: input ["1+2?", "3", "and 4?"]                 -> resp_b
    """

    def __init__(self) -> None:
        self._kept: dict[str, KeptResponse] = {}
        self._items: dict[str, Any] = {}
        self._responses: dict[str, Mapping[str, Any]] = {}

    def get(self, id: str) -> Mapping[str, Any]:
        """The response with this id, as it was answered."""
        if id not in self._responses:
            raise RefusedRequest(
                f"no response {describe_value(id)} of this session was kept", "not_found"
            )
        return self._responses[id]

    def delete(self, id: str) -> dict[str, Any]:
        """Forget a response: nothing can go on from it. What was sampled stays recorded."""
        for item in self.get(id)["output"]:
            self._items.pop(item["id"], None)
        del self._responses[id], self._kept[id]
        return {"id": id, "object": "response", "deleted": True}

    def resolve(self, body: Any) -> Any:
        """The request with the whole conversation as its input; RefusedRequest for an unknown id."""
        if not isinstance(body, Mapping) or not isinstance(body.get("input"), str | list):
            return body  # the dialect refuses it
        previous = RequestFields(body).text("previous_response_id") or None
        items = self._before(previous) + [self._resolve_item(item) for item in _items_of(body)]
        rest = {name: value for name, value in body.items() if name != "previous_response_id"}
        return {**rest, "input": items}

    def keep(self, body: Mapping[str, Any], response: Mapping[str, Any]) -> None:
        """Keep the response to `body`, the request as the client sent it."""
        if body.get("store") is False:
            return
        new = [self._resolve_item(item) for item in _items_of(body)]
        previous = body.get("previous_response_id") or None
        self._responses[response["id"]] = response
        self._kept[response["id"]] = KeptResponse(previous, [*new, *response["output"]])
        self._items |= {item["id"]: item for item in response["output"]}

    def _before(self, id: str | None) -> list[Any]:
        """The items up to this response, oldest first."""
        parts: list[list[Any]] = []
        while id is not None:
            if id not in self._kept:
                raise RefusedRequest(
                    f"previous_response_id {describe_value(id)} is no response of this session "
                    "that was kept; "
                    "send the whole conversation as input",
                    param="previous_response_id",
                )
            id, items = self._kept[id]
            parts.append(items)
        return [item for items in reversed(parts) for item in items]

    def _resolve_item(self, item: Any) -> Any:
        """The item, or the one that it refers to."""
        is_reference = isinstance(item, Mapping) and item.get("type") == "item_reference"
        id = item.get("id") if is_reference else None
        return self._items.get(id, item) if isinstance(id, str) else item


def _items_of(body: Mapping[str, Any]) -> list[Any]:
    given = body["input"]
    return [{"role": "user", "content": given}] if isinstance(given, str) else given

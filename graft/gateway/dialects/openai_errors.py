"""Errors and model lists in OpenAI's form, which its two dialects share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graft.gateway.request import RefusedRequest

ERRORS = {
    "invalid": (400, "invalid_request_error", None),
    "context_length": (400, "invalid_request_error", "context_length_exceeded"),
    "authentication": (401, "invalid_request_error", "invalid_api_key"),
    "permission": (403, "invalid_request_error", "forbidden"),
    "not_found": (404, "invalid_request_error", "not_found"),
    "too_large": (413, "invalid_request_error", "request_too_large"),
    "rate_limit": (429, "rate_limit_error", "rate_limit_exceeded"),
    "overloaded": (503, "server_error", "overloaded"),
    "internal": (500, "server_error", "server_error"),
}
"""Kind of refusal -> status, type, code."""


def error(refused: RefusedRequest) -> tuple[int, dict[str, Any]]:
    """The status and the body of a refused request."""
    status, kind, code = ERRORS.get(refused.kind, ERRORS["internal"])
    about = {"message": str(refused), "type": kind, "param": refused.param, "code": code}
    return status, {"error": about}


def models(names: Sequence[str]) -> Mapping[str, Any]:
    """The answer to GET /v1/models."""
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "graft"} for name in names]
    return {"object": "list", "data": data}

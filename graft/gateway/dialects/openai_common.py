"""What OpenAI's two dialects share: contents, choices of tools, log-probs, errors, lists of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graft.gateway.dialects.fields import RequestFields, describe_value
from graft.gateway.request import PolicyAnswer, RefusedRequest

UNCONSTRAINED = (
    "the policy writes freely, and is not constrained to a format; ask for it in the prompt"
)
OTHER_SAMPLING = (
    "tokens are sampled from the policy's own distribution, which is the one that is trained"
)
NO_MEDIA = "the policy reads and writes text only"
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


def text_of(fields: RequestFields, name: str, kinds: Sequence[str] = ("text",)) -> str:
    """Content as text: a string, or parts of these types, each on its own lines."""
    if isinstance(parts := fields.parts(name), str):
        return parts
    texts: list[str] = []
    for part in parts:
        kind = part.text("type", kinds[0])
        if kind not in kinds and kind != "refusal":
            raise part.refused("type", f"is {describe_value(kind)}: {NO_MEDIA}")
        texts.append(part.text("refusal" if kind == "refusal" else "text"))
    return "\n".join(texts)


def choice_of(fields: RequestFields, within: str = "") -> str:
    """`tool_choice`: a word, or the name of a function, in the object `within` the choice or in itself."""
    value = fields.get("tool_choice")
    if value is None or isinstance(value, str):
        return value or "auto"
    choice = fields.fields("tool_choice")
    choice.check_type("function", "only a function can be chosen")
    return (choice.fields(within) if within else choice).name("name")


def token_logprobs(one: PolicyAnswer) -> list[dict[str, Any]]:
    """The sampled tokens with their log-probs."""
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(one.token_texts, one.logprobs, strict=True)
    ]

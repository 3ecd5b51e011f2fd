"""What OpenAI's two dialects share: contents, choices of tools, log-probs, errors, lists of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graft.gateway.dialects.fields import RequestFields, describe_value
from graft.gateway.dialects.tools import joined_name
from graft.gateway.request import AgentRequest, PolicyAnswer, RefusedRequest

OTHER_SAMPLING = (
    "tokens are sampled from the policy's own distribution, which is the one that is trained"
)
NO_MEDIA = "the policy reads and writes text only"
MAX_LISTED = 20
"""The largest top_logprobs that OpenAI allows."""
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


def allowed_of(fields: RequestFields, within: str = "") -> tuple[str, ...]:
    """The tools of a `tool_choice` of the type allowed_tools; (): it is none, or it allows all."""
    if (choice := _allowed_tools(fields, within)) is None:
        return ()
    tools = [tool.fields(within) if within else tool for tool in choice.objects("tools")]
    return tuple(
        joined_name(tool.text("namespace"), tool.name("name"))
        for tool in tools
        if tool.get("name") is not None
    )


def _allowed_tools(fields: RequestFields, within: str) -> RequestFields | None:
    if not isinstance(fields.get("tool_choice"), dict):
        return None
    choice = fields.fields("tool_choice")
    if choice.text("type") != "allowed_tools":
        return None
    if within:
        choice.required("allowed_tools")
        choice = choice.fields("allowed_tools")
    choice.required("tools")
    return choice


def choice_of(fields: RequestFields, within: str = "") -> str:
    """`tool_choice`: a word, or the name of a function, in the object `within` the choice or in itself.

    Of allowed_tools it is their mode: a single one that is required is chosen.
    """
    if (allowed := _allowed_tools(fields, within)) is not None:
        mode, names = allowed.text("mode", "auto"), allowed_of(fields, within)
        if mode not in ("auto", "required"):
            raise allowed.refused("mode", f"must be auto or required, not {describe_value(mode)}")
        if not names:
            return "none"
        return names[0] if mode == "required" and len(names) == 1 else mode
    value = fields.get("tool_choice")
    if value is None or isinstance(value, str):
        return value or "auto"
    choice = fields.fields("tool_choice")
    is_custom = choice.text("type") == "custom"
    if not is_custom:
        choice.check_type("function", "only a function or a custom tool can be chosen")
    named = choice.fields("custom" if is_custom else within) if within else choice
    return joined_name(named.text("namespace"), named.name("name"))


def text_tools_of(fields: RequestFields, within: str = "") -> tuple[str, ...]:
    """The names of the tools of the type custom, which take a text."""
    custom = [tool for tool in fields.objects("tools") if tool.text("type") == "custom"]
    return tuple((tool.fields(within) if within else tool).name("name") for tool in custom)


def token_logprobs(one: PolicyAnswer, listed: int = 0) -> list[dict[str, Any]]:
    """The sampled tokens with their log-probs; of `listed` likeliest ones only the sampled one is known."""
    tokens = [
        {"token": text, "logprob": value, "bytes": list(text.encode())}
        for text, value in zip(one.token_texts, one.logprobs, strict=True)
    ]
    return [{**token, "top_logprobs": [token][:listed]} for token in tokens]


def answer_ids(request: AgentRequest, one: PolicyAnswer) -> dict[str, Any]:
    """The ids of the sampled tokens, if they are asked for."""
    return {"token_ids": list(one.tokens)} if request.with_token_ids else {}


def prompt_ids(request: AgentRequest, answers: Sequence[PolicyAnswer]) -> dict[str, Any]:
    """The ids of the prompt's tokens, if they are asked for."""
    return {"prompt_token_ids": list(answers[0].prompt)} if request.with_token_ids else {}


def usage_of(answers: Sequence[PolicyAnswer]) -> dict[str, Any]:
    """The numbers of tokens of chat and text completions."""
    prompt, written = answers[0].prompt_tokens, sum(len(one.tokens) for one in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": answers[0].cached_tokens},
    }

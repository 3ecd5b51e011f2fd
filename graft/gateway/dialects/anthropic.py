"""Anthropic's Messages: POST /v1/messages, and the count of a request's tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graft.gateway.dialects import sse
from graft.gateway.dialects.common import (
    assistant_message,
    function_call,
    read_messages,
    request_of,
)
from graft.gateway.dialects.fields import RequestFields, body_fields, describe_value
from graft.gateway.dialects.formats import read_format
from graft.gateway.dialects.tools import function_tool, read_tools
from graft.gateway.request import AgentRequest, PolicyAnswer, RefusedRequest
from graft.types import Message

PATH: str = "/v1/messages"
PREFIX: str = "msg_"
COUNT_PATH = "/v1/messages/count_tokens"
BILLING = "x-anthropic-billing-header:"
"""How a system block of Claude Code begins that has a hash of the user's prompt: no two tasks would share a
prefix behind it."""
KNOWN = {
    "messages", "model", "system", "tools", "tool_choice", "temperature", "top_p", "top_k", "max_tokens",
    "stop_sequences", "stream", "output_config", "output_format",
}  # fmt: skip
IGNORED = {
    # names and book-keeping of the client
    "metadata", "service_tier", "betas", "cache_control", "diagnostics", "inference_geo", "speed",
    "user_profile_id", "workspace_id", "fallbacks", "fallback_credit_token", "anthropic_version",
    # the chat template decides whether the policy thinks
    "thinking",
    # edits of earlier turns on the provider's side: clients that use them work without
    "context_management", "compaction",
}  # fmt: skip
REFUSED: dict[str, tuple[Sequence[Any], str]] = {
    "mcp_servers": (([],), "tools run in the agent, not at the provider"),
    "container": ((), "tools run in the agent, not at the provider"),
    "thread": ((), "conversations are not kept here; send the whole conversation"),
}
"""Name -> values that ask for nothing, and the reason why others are refused."""
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {
    "invalid": (400, "invalid_request_error"),
    "context_length": (400, "invalid_request_error"),
    "authentication": (401, "authentication_error"),
    "permission": (403, "permission_error"),
    "not_found": (404, "not_found_error"),
    "too_large": (413, "request_too_large"),
    "rate_limit": (429, "rate_limit_error"),
    "overloaded": (529, "overloaded_error"),
    "internal": (500, "api_error"),
}
"""Kind of refusal -> status, type."""
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""The SDK's tool runner sends the whole conversation when it reads this."""
TOO_LONG = "prompt is too long"
"""Claude Code compacts the conversation when it reads these words."""


def read(body: Any, headers: Mapping[str, str]) -> AgentRequest:
    RequestFields(body).required("max_tokens")
    return read_count(body, headers)


def read_count(body: Any, headers: Mapping[str, str]) -> AgentRequest:
    """A request of COUNT_PATH, which has no `max_tokens`."""
    fields = body_fields(body, KNOWN, IGNORED, REFUSED)
    system = _texts(fields, "system", {"text": _text})
    if system and system[0].startswith(BILLING):
        system = system[1:]
    messages: list[Message] = [{"role": "system", "content": "\n".join(system)}] if system else []
    messages += read_messages(fields, "messages", _messages)
    choice = fields.fields("tool_choice")
    return request_of(
        fields,
        headers,
        messages=messages,
        tools=read_tools(fields, _tool, ("custom",)),
        choice=_choice(choice),
        hottest=1,
        max_tokens=fields.whole("max_tokens", 1),
        stop=fields.texts("stop_sequences"),
        format=read_format(fields.fields("output_config"), "format")
        or read_format(fields, "output_format"),
        parallel_calls=not choice.flag("disable_parallel_tool_use"),
    )


def answer(request: AgentRequest, answers: Sequence[PolicyAnswer]) -> dict[str, Any]:
    (one,) = answers
    return {**_head(request, one.id), "content": _blocks(one), **_end(one), "usage": _usage(one)}


def opening(request: AgentRequest, id: str) -> bytes:
    usage = _usage(PolicyAnswer(id, ""))  # the last event has the numbers
    unfinished = {"stop_reason": None, "stop_sequence": None}
    message = {**_head(request, id), "content": [], **unfinished, "usage": usage}
    return _event("message_start", message=message)


def events(request: AgentRequest, answers: Sequence[PolicyAnswer]) -> Iterator[bytes]:
    (one,) = answers
    for index, block in enumerate(_blocks(one)):
        begun, deltas = _streamed(block)
        yield _event("content_block_start", index=index, content_block=begun)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_end(one), usage=_usage(one))
    yield _event("message_stop")


def ping() -> bytes:
    return _event("ping")


def error(refused: RefusedRequest) -> tuple[int, dict[str, Any]]:
    status, kind = ERRORS.get(refused.kind, ERRORS["internal"])
    message = str(refused)
    if refused.kind == "context_length" and TOO_LONG not in message:
        message = f"{TOO_LONG}: {message}"
    details = {"details": NO_THREADS} if refused.param == "thread" else {}
    return status, {"type": "error", "error": {"type": kind, "message": message, **details}}


def error_event(refused: RefusedRequest) -> bytes:
    return sse.event(error(refused)[1], "error")


def counted(tokens: int) -> dict[str, Any]:
    """The answer to a request of COUNT_PATH."""
    return {"input_tokens": tokens}


def models(names: Sequence[str]) -> Mapping[str, Any]:
    """The answer to GET /v1/models."""
    made = {"type": "model", "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
    data = [{**made, "id": name, "display_name": name} for name in names]
    first, last = (names[0], names[-1]) if names else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def _messages(fields: RequestFields) -> list[Message]:
    """One message of the dialect: the results of tools are messages of their own, before its text."""
    role = fields.name("role")
    fields.required("content")
    if role == "assistant":
        return [_assistant(fields)]
    if role == "system":
        return [{"role": role, "content": "\n".join(_texts(fields, "content", {"text": _text}))}]
    if role != "user":
        raise fields.refused("role", f"must be user or assistant, not {describe_value(role)}")
    results: list[Message] = []

    def result(block: RequestFields) -> None:
        results.append(_result(block))

    texts = _texts(fields, "content", {"text": _text, "tool_result": result})
    if texts or not results:
        return [*results, {"role": "user", "content": "\n".join(texts)}]
    return results


def _assistant(fields: RequestFields) -> Message:
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []

    def thought(block: RequestFields) -> None:
        thoughts.append(block.text("thinking"))

    def call(block: RequestFields) -> None:
        arguments = dict(block.fields("input").values)
        calls.append(function_call(block.name("id"), block.name("name"), arguments))

    # what is redacted cannot be read, by nobody but the provider that wrote it
    redacted = {"redacted_thinking": lambda block: None}
    kinds = {"text": _text, "thinking": thought, "tool_use": call, **redacted}
    texts = _texts(fields, "content", kinds)
    return assistant_message("\n".join(texts), "\n".join(thoughts), calls)


def _texts(fields: RequestFields, name: str, kinds: Mapping[str, Any]) -> list[str]:
    """The texts of a content: a string, or blocks of these types, read by these functions."""
    if isinstance(blocks := fields.parts(name), str):
        return [blocks] if blocks else []
    texts: list[str] = []
    for block in blocks:
        kind = block.name("type")
        if kind not in kinds:
            allowed = " or ".join(kinds)
            why = f"is {describe_value(kind)}: here it can be {allowed}; the policy reads text only"
            raise block.refused("type", why)
        if (text := kinds[kind](block)) is not None:
            texts.append(text)
    return texts


def _text(block: RequestFields) -> str:
    return block.text("text")


def _result(block: RequestFields) -> Message:
    content = "\n".join(_texts(block, "content", {"text": _text}))
    if block.flag("is_error") and "error" not in content.lower():
        content = f"Error: {content}"  # no template writes the mark itself
    return {"role": "tool", "content": content, "tool_call_id": block.name("tool_use_id")}


def _tool(fields: RequestFields) -> dict[str, Any]:
    fields.check_type("custom", "tools of the provider are not known here")
    return function_tool(fields, "input_schema")


def _choice(fields: RequestFields) -> str:
    kind = fields.text("type", "auto")
    if kind == "tool":
        return fields.name("name")
    if kind not in ("auto", "any", "none"):
        raise fields.refused("type", f"must be auto, any, none or tool, not {describe_value(kind)}")
    return "required" if kind == "any" else kind


def _head(request: AgentRequest, id: str) -> dict[str, Any]:
    return {"id": PREFIX + id, "type": "message", "role": "assistant", "model": request.model}


def _blocks(one: PolicyAnswer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if one.reasoning:
        # clients send the signature back; nothing here needs it
        signature = f"graft-{one.id}"
        blocks.append({"type": "thinking", "thinking": one.reasoning, "signature": signature})
    if one.content or not one.calls:  # clients read the text of the first block
        blocks.append({"type": "text", "text": one.content})
    for call in one.calls:
        arguments = json.loads(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


def _streamed(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and its deltas."""
    if block["type"] == "tool_use":
        whole = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": whole}]
    name = "thinking" if block["type"] == "thinking" else "text"
    deltas = [{"type": f"{name}_delta", name: piece} for piece in sse.pieces(block[name])]
    if name == "text":
        return {**block, "text": ""}, deltas
    signature = {"type": "signature_delta", "signature": block["signature"]}
    return {**block, "thinking": "", "signature": ""}, [*deltas, signature]


def _end(one: PolicyAnswer) -> dict[str, Any]:
    is_stopped = (
        one.stop_string is not None and not one.calls
    )  # clients run tools after tool_use only
    reason = "stop_sequence" if is_stopped else STOP_REASONS[one.finish]
    return {"stop_reason": reason, "stop_sequence": one.stop_string if is_stopped else None}


def _usage(one: PolicyAnswer) -> dict[str, Any]:
    return {
        "input_tokens": one.prompt_tokens - one.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": one.cached_tokens,
        "output_tokens": len(one.tokens),
    }


def _event(kind: str, **data: Any) -> bytes:
    return sse.event({"type": kind, **data}, kind)

"""OpenAI's Responses: POST /v1/responses.

A conversation is a list of items. The policy's turn is several of them, here one message:

    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "one and two"}]}
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Adding."}]}
    {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": "{\\"a\\": 1}"}

`previous_response_id` and references to items are resolved by a `ResponseStore` before `read`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graft.gateway.dialects import sse
from graft.gateway.dialects.common import (
    arguments_of,
    assistant_message,
    function_call,
    request_of,
)
from graft.gateway.dialects.fields import RequestFields, body_fields, describe_value
from graft.gateway.dialects.formats import read_format
from graft.gateway.dialects.openai_common import (
    MAX_LISTED,
    OTHER_SAMPLING,
    allowed_of,
    choice_of,
    text_of,
    text_tools_of,
    token_logprobs,
)
from graft.gateway.dialects.openai_common import error as error
from graft.gateway.dialects.openai_common import models as models
from graft.gateway.dialects.tools import (
    function_tool,
    joined_name,
    read_tools,
    text_arguments,
    text_input,
    text_tool,
)
from graft.gateway.request import AgentRequest, AnsweredCall, PolicyAnswer, RefusedRequest
from graft.types import Message

PATH: str = "/v1/responses"
PREFIX: str = "resp_"
TEXTS = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"
KNOWN = {
    "input", "instructions", "model", "tools", "tool_choice", "parallel_tool_calls", "temperature",
    "top_p", "top_k", "max_output_tokens", "stream", "include", "top_logprobs", "text",
    "truncation", "previous_response_id",
}  # fmt: skip
IGNORED = {
    # names and book-keeping of the client; the store reads `store`
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "moderation", "stream_options",
    # a limit of the provider's own tools, which are refused
    "max_tool_calls",
    # a hint to models that were trained for it: here the chat template decides
    "reasoning",
    # compaction on the provider's side: clients that use it work without
    "context_management",
}  # fmt: skip
WRITTEN = {"function_call": "arguments", "custom_tool_call": "input"}
"""Kind of a call -> its field that the policy writes."""
WHOLE = "send the whole conversation as input"
REFUSED: dict[str, tuple[Sequence[Any], str]] = {
    "background": ((False,), "an answer is waited for"),
    "conversation": ((), f"conversations are not kept here; {WHOLE}"),
    "prompt": ((), f"prompts are not kept here; {WHOLE}"),
    "logit_bias": (({},), OTHER_SAMPLING),
    "presence_penalty": ((0,), OTHER_SAMPLING),
    "frequency_penalty": ((0,), OTHER_SAMPLING),
    "truncation": (
        ("disabled",),
        "nothing is dropped from a conversation; shorten it in the agent",
    ),
}
"""Name -> values that ask for nothing, and the reason why others are refused."""


def read(body: Any, headers: Mapping[str, str]) -> AgentRequest:
    fields = body_fields(body, KNOWN, IGNORED, REFUSED)
    if fields.get("previous_response_id") is not None:
        raise fields.refused("previous_response_id", f"is not known here; {WHOLE}")
    listed = fields.whole("top_logprobs", 0, MAX_LISTED) or 0
    instructions = fields.text("instructions")
    first: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    return request_of(
        fields,
        headers,
        messages=[*first, *_messages(fields)],
        tools=read_tools(fields, _tool, ("function", "custom")),
        choice=choice_of(fields),
        allowed=allowed_of(fields),
        text_tools=text_tools_of(fields),
        hottest=2,
        max_tokens=fields.whole("max_output_tokens", 1),
        logprobs=listed if LOGPROBS in fields.texts("include") else None,
        format=read_format(fields.fields("text"), "format"),
        parallel_calls=fields.flag("parallel_tool_calls", True),
    )


def answer(request: AgentRequest, answers: Sequence[PolicyAnswer]) -> dict[str, Any]:
    (one,) = answers
    is_cut = one.finish == "length"
    details = {"reason": "max_output_tokens"} if is_cut else None
    return {
        **_head(request, one.id),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": details,
        "output": _items(request, one),
        "usage": _usage(one),
    }


def opening(request: AgentRequest, id: str) -> bytes:
    begun = {**_head(request, id), "tools": []}  # the last event has them; they may be 100 kB
    names = ("response.created", "response.in_progress")
    return b"".join(_event(number, name, response=begun) for number, name in enumerate(names))


def events(request: AgentRequest, answers: Sequence[PolicyAnswer]) -> Iterator[bytes]:
    whole = answer(request, answers)
    number = 2  # the opening has two
    for index, item in enumerate(whole["output"]):
        for name, data in _streamed(item):
            yield _event(number, name, output_index=index, **data)
            number += 1
    yield _event(number, f"response.{whole['status']}", response=whole)


def ping() -> bytes:
    return sse.COMMENT


def error_event(refused: RefusedRequest) -> bytes:
    about = error(refused)[1]["error"]
    flat = {name: about[name] for name in ("code", "message", "param")}
    return _event(0, "error", **flat, error=about)


def _messages(fields: RequestFields) -> list[Message]:
    value = fields.required("input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[Message] = []
    is_open = False  # whether items of the policy's turn still join the last message
    for item in fields.objects("input"):
        kind = item.text("type", "message")
        part = _turn_part(item, kind)
        if part is None:
            messages.append(_message(item, kind))
            is_open = False
        elif is_open and _can_follow(messages[-1], part):
            messages[-1] = _joined(messages[-1], part)
        else:
            messages.append(part)
            is_open = True
    return messages


def _turn_part(item: RequestFields, kind: str) -> Message | None:
    """An item of the policy's turn, as a message with this part alone; None for other items."""
    if kind == "reasoning":
        content, summary = item.objects("content"), item.objects("summary")
        thought = "\n".join(part.text("text") for part in content or summary)
        return assistant_message("", thought, [])
    if kind == "function_call":
        arguments = arguments_of(item.text("arguments"))
        name = joined_name(item.text("namespace"), item.name("name"))
        call = function_call(item.name("call_id"), name, arguments)
        return assistant_message("", "", [call])
    if kind == "custom_tool_call":
        arguments = text_arguments(item.text("input"))
        return assistant_message(
            "", "", [function_call(item.name("call_id"), item.name("name"), arguments)]
        )
    if kind == "message" and item.text("role") == "assistant":
        return assistant_message(text_of(item, "content", TEXTS), "", [])
    return None


def _can_follow(turn: Message, part: Message) -> bool:
    """A turn is a thought, a text and calls, in this order; another order is another turn."""
    if part.get("tool_calls"):
        return True
    is_thought = bool(part.get("reasoning_content"))
    began = turn["content"] or turn.get("tool_calls")
    return not began and not (is_thought and turn.get("reasoning_content"))


def _joined(turn: Message, part: Message) -> Message:
    return assistant_message(
        turn["content"] or part["content"],
        turn.get("reasoning_content") or part.get("reasoning_content", ""),
        [*turn.get("tool_calls", ()), *part.get("tool_calls", ())],
    )


def _message(item: RequestFields, kind: str) -> Message:
    if kind in ("function_call_output", "custom_tool_call_output"):
        content = text_of(item, "output", TEXTS)
        return {"role": "tool", "content": content, "tool_call_id": item.name("call_id")}
    if kind == "item_reference":
        raise item.refused("type", f"is a reference to an item that is not kept here; {WHOLE}")
    if kind != "message":
        raise item.refused(
            "type", f"is {describe_value(kind)}, an item that the policy cannot read"
        )
    role = item.name("role")
    if role not in ("system", "developer", "user"):
        why = f"must be system, developer, user or assistant, not {describe_value(role)}"
        raise item.refused("role", why)
    content = text_of(item, "content", TEXTS)
    return {"role": "user" if role == "user" else "system", "content": content}


def _tool(fields: RequestFields) -> dict[str, Any]:
    if fields.text("type") == "custom":
        return text_tool(fields)
    fields.check_type("function", "there are no tools of the provider, only functions of the agent")
    return function_tool(fields, "parameters")


def _tool_told(request: AgentRequest, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as the client is told it again."""
    function = tool["function"]
    if function["name"] in request.text_tools:
        return {"type": "custom", "name": function["name"], "description": function["description"]}
    return {"type": "function", **function}


def _head(request: AgentRequest, id: str) -> dict[str, Any]:
    """A response that has begun."""
    kind = "custom" if request.tool_choice in request.text_tools else "function"
    named = {"type": kind, "name": request.tool_choice}
    is_word = request.tool_choice in ("auto", "none", "required")
    return {
        "id": PREFIX + id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_calls,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_output_tokens": request.max_tokens,
        "tool_choice": request.tool_choice if is_word else named,
        "tools": [_tool_told(request, tool) for tool in request.tools],
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "usage": None,
    }


def _items(request: AgentRequest, one: PolicyAnswer) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if one.reasoning:
        content = [{"type": "reasoning_text", "text": one.reasoning}]
        items.append({"id": f"rs_{one.id}", "type": "reasoning", "summary": [], "content": content})
    if one.content or not one.calls:
        part = {"type": "output_text", "text": one.content, "annotations": []}
        part["logprobs"] = [] if request.logprobs is None else token_logprobs(one, request.logprobs)
        items.append(
            {"id": f"msg_{one.id}", "type": "message", "role": "assistant", "content": [part]}
        )
    items += [_called(request, one, number, call) for number, call in enumerate(one.calls)]
    status = "incomplete" if one.finish == "length" else "completed"
    return [{**item, "status": status} for item in items]


def _called(
    request: AgentRequest, one: PolicyAnswer, number: int, call: AnsweredCall
) -> dict[str, Any]:
    if call.name in request.text_tools:
        made = {"id": f"ctc_{one.id}_{number}", "type": "custom_tool_call", "call_id": call.id}
        return {**made, "name": call.name, "input": text_input(call.arguments)}
    namespace, name = request.namespaces.get(call.name, ("", call.name))
    return {
        "id": f"fc_{one.id}_{number}",
        "type": "function_call",
        "call_id": call.id,
        "name": name,
        "arguments": call.arguments,
        **({"namespace": namespace} if namespace else {}),
    }


def _streamed(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of one item."""
    here: dict[str, Any] = {"item_id": item["id"]}
    written = WRITTEN.get(item["type"], "")
    empty = {written: ""} if written else {"content": []}
    begun = {**item, **empty, "status": "in_progress"}
    yield "response.output_item.added", {"item": begun}
    if written:
        name = f"response.{item['type']}_{written}"
        named = {"name": item["name"]} if written == "arguments" else {}
        yield f"{name}.delta", {**here, "delta": item[written]}
        yield f"{name}.done", {**here, **named, written: item[written]}
    else:
        (part,) = item["content"]
        here["content_index"] = 0
        name = f"response.{part['type']}"
        logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        none = {"logprobs": []} if logprobs else {}
        yield "response.content_part.added", {**here, "part": {**part, "text": "", **none}}
        for piece in sse.pieces(part["text"]):
            yield f"{name}.delta", {**here, "delta": piece, **none}
        yield f"{name}.done", {**here, "text": part["text"], **logprobs}
        yield "response.content_part.done", {**here, "part": part}
    yield "response.output_item.done", {"item": item}


def _usage(one: PolicyAnswer) -> dict[str, Any]:
    written = len(one.tokens)
    return {
        "input_tokens": one.prompt_tokens,
        "input_tokens_details": {"cached_tokens": one.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": written,
        # a thought's tokens are among these; they are not counted apart
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": one.prompt_tokens + written,
    }


def _event(number: int, kind: str, **data: Any) -> bytes:
    return sse.event({"type": kind, "sequence_number": number, **data}, kind)

"""OpenAI's Chat Completions: POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graft.gateway.dialects import sse
from graft.gateway.dialects.common import (
    arguments_of,
    assistant_message,
    function_call,
    read_messages,
    request_of,
)
from graft.gateway.dialects.fields import MAX_ANSWERS, RequestFields, body_fields, describe_value
from graft.gateway.dialects.formats import GUIDED, read_format, read_guided
from graft.gateway.dialects.openai_common import (
    MAX_LISTED,
    NO_MEDIA,
    OTHER_SAMPLING,
    allowed_of,
    answer_ids,
    choice_of,
    prompt_ids,
    text_of,
    text_tools_of,
    token_logprobs,
    usage_of,
)
from graft.gateway.dialects.openai_common import error as error
from graft.gateway.dialects.openai_common import models as models
from graft.gateway.dialects.tools import (
    function_tool,
    read_tools,
    text_arguments,
    text_input,
    text_tool,
)
from graft.gateway.request import AgentRequest, AnsweredCall, PolicyAnswer, RefusedRequest
from graft.types import Message

PATH: str = "/v1/chat/completions"
PREFIX: str = "chatcmpl-"
KNOWN = {
    "messages", "model", "tools", "tool_choice", "parallel_tool_calls", "temperature", "top_p", "top_k",
    "max_tokens", "max_completion_tokens", "stop", "seed", "n", "stream", "stream_options",
    "logprobs", "top_logprobs", "return_token_ids",
    "web_search_options", "response_format", "structured_outputs", *GUIDED,
}  # fmt: skip
IGNORED = {
    # names and book-keeping of the client
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "moderation",
    # a faster way to the same text
    "prediction",
    # hints to models that were trained for them: here the chat template decides
    "reasoning_effort", "verbosity",
}  # fmt: skip
REFUSED: dict[str, tuple[Sequence[Any], str]] = {
    "logit_bias": (({},), OTHER_SAMPLING),
    "presence_penalty": ((0,), OTHER_SAMPLING),
    "frequency_penalty": ((0,), OTHER_SAMPLING),
    # not OpenAI's, but other servers read them
    "repetition_penalty": ((1,), OTHER_SAMPLING),
    "min_p": ((0,), OTHER_SAMPLING),
    "min_tokens": ((0,), OTHER_SAMPLING),
    "ignore_eos": ((False,), OTHER_SAMPLING),
    "bad_words": (([],), OTHER_SAMPLING),
    "allowed_token_ids": (([],), OTHER_SAMPLING),
    "chat_template_kwargs": (
        ({},),
        "model.template_args of the recipe has the template's variables",
    ),
    "functions": (([],), "it is deprecated; use tools"),
    "function_call": (("none",), "it is deprecated; use tool_choice"),
    "modalities": ((["text"],), NO_MEDIA),
    "audio": ((), NO_MEDIA),
}
"""Name -> values that ask for nothing, and the reason why others are refused."""


def read(body: Any, headers: Mapping[str, str]) -> AgentRequest:
    fields = body_fields(body, KNOWN, IGNORED, REFUSED)
    limit = fields.whole("max_completion_tokens", 1)
    tools = read_tools(fields, _tool, ("function", "custom"))
    if fields.get("web_search_options") is not None:
        tools.dropped.append("web_search_options")
    return request_of(
        fields,
        headers,
        messages=read_messages(fields, "messages", lambda one: [_message(one)]),
        tools=tools,
        choice=choice_of(fields, "function"),
        allowed=allowed_of(fields, "function"),
        text_tools=text_tools_of(fields, "custom"),
        with_token_ids=fields.flag("return_token_ids"),
        hottest=2,
        max_tokens=fields.whole("max_tokens", 1) if limit is None else limit,
        stop=fields.texts("stop"),
        seed=fields.whole("seed", -(2**63)),
        n=fields.whole("n", 1, MAX_ANSWERS) or 1,
        with_usage=not fields.flag("stream")
        or fields.fields("stream_options").flag("include_usage"),
        logprobs=_logprobs(fields),
        format=read_format(fields, "response_format", "json_schema") or read_guided(fields),
        parallel_calls=fields.flag("parallel_tool_calls", True),
    )


def answer(request: AgentRequest, answers: Sequence[PolicyAnswer]) -> dict[str, Any]:
    choices = [
        {
            "index": number,
            "message": _answered(request, one),
            "logprobs": _logprobs_of(request, one),
            "finish_reason": one.finish,
            **_id_of_choice(answers, one),
            **answer_ids(request, one),
        }
        for number, one in enumerate(answers)
    ]
    whole = {**_head(request, answers[0].id), "choices": choices, "usage": usage_of(answers)}
    return {**whole, **prompt_ids(request, answers)}


def opening(request: AgentRequest, id: str) -> bytes:
    delta = {"role": "assistant", "content": ""}
    return b"".join(_chunk(request, id, number, delta) for number in range(request.n))


def events(request: AgentRequest, answers: Sequence[PolicyAnswer]) -> Iterator[bytes]:
    id = answers[0].id
    if request.with_token_ids:
        yield sse.event(
            {**_head(request, id, ".chunk"), "choices": [], **prompt_ids(request, answers)}
        )
    for number, one in enumerate(answers):
        for name, text in (("reasoning_content", one.reasoning), ("content", one.content)):
            for piece in sse.pieces(text):
                yield _chunk(request, id, number, {name: piece})
        for place, call in enumerate(one.calls):
            delta = {"tool_calls": [{"index": place, **_called(request, call)}]}
            yield _chunk(request, id, number, delta)
        end = {
            "finish_reason": one.finish,
            **_id_of_choice(answers, one),
            **answer_ids(request, one),
        }
        yield _chunk(request, id, number, {}, logprobs=_logprobs_of(request, one), **end)
    if request.with_usage:
        yield sse.event({**_head(request, id, ".chunk"), "choices": [], "usage": usage_of(answers)})
    yield sse.DONE


def ping() -> bytes:
    return sse.COMMENT


def error_event(refused: RefusedRequest) -> bytes:
    return sse.event(error(refused)[1])


def _message(fields: RequestFields) -> Message:
    role = fields.name("role")
    content = text_of(fields, "content")
    if role in ("system", "developer", "user"):
        return {"role": "user" if role == "user" else "system", "content": content}
    if role == "tool":
        id = fields.name("tool_call_id")
        return {"role": "tool", "content": content, "tool_call_id": id}
    if role != "assistant":
        raise fields.refused(
            "role",
            f"must be system, developer, user, assistant or tool, not {describe_value(role)}",
        )
    if fields.get("function_call") is not None:
        raise fields.refused("function_call", "is deprecated; use tool_calls")
    reasoning = fields.text("reasoning_content") or fields.text("reasoning")
    calls = [_call(call) for call in fields.objects("tool_calls")]
    return assistant_message(content or fields.text("refusal"), reasoning, calls)


def _call(fields: RequestFields) -> dict[str, Any]:
    if fields.text("type") == "custom":
        custom = fields.fields("custom")
        arguments = text_arguments(custom.text("input"))
        return function_call(fields.name("id"), custom.name("name"), arguments)
    fields.check_type("function", "only calls of functions and custom tools are known")
    function = fields.fields("function")
    arguments = function.get("arguments")
    if not isinstance(arguments, Mapping):
        arguments = arguments_of(function.text("arguments"))
    return function_call(fields.name("id"), function.name("name"), arguments)  # type: ignore[arg-type]


def _tool(fields: RequestFields) -> dict[str, Any]:
    if fields.text("type") == "custom":
        return text_tool(fields.fields("custom"))
    fields.check_type("function", "only tools of the types function and custom are known")
    return function_tool(fields.fields("function"), "parameters")


def _logprobs(fields: RequestFields) -> int | None:
    listed = fields.whole("top_logprobs", 0, MAX_LISTED) or 0
    return listed if fields.flag("logprobs") else None


def _head(request: AgentRequest, id: str, kind: str = "") -> dict[str, Any]:
    return {
        "id": PREFIX + id,
        "object": f"chat.completion{kind}",
        "created": int(time.time()),
        "model": request.model,
    }


def _chunk(
    request: AgentRequest, first: str, number: int, delta: Mapping[str, Any], **end: Any
) -> bytes:
    choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None, **end}
    return sse.event({**_head(request, first, ".chunk"), "choices": [choice]})


def _answered(request: AgentRequest, one: PolicyAnswer) -> dict[str, Any]:
    content = one.content if one.content or not one.calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if one.reasoning:
        message["reasoning_content"] = one.reasoning
    if one.calls:
        message["tool_calls"] = [_called(request, call) for call in one.calls]
    return message


def _called(request: AgentRequest, call: AnsweredCall) -> dict[str, Any]:
    if call.name in request.text_tools:
        custom = {"name": call.name, "input": text_input(call.arguments)}
        return {"id": call.id, "type": "custom", "custom": custom}
    return function_call(call.id, call.name, call.arguments)


def _id_of_choice(answers: Sequence[PolicyAnswer], one: PolicyAnswer) -> dict[str, Any]:
    """Each of several answers has an id for its reward; OpenAI's form has only one for all of them."""
    return {"id": PREFIX + one.id} if len(answers) > 1 else {}


def _logprobs_of(request: AgentRequest, one: PolicyAnswer) -> dict[str, Any] | None:
    if request.logprobs is None:
        return None
    return {"content": token_logprobs(one, request.logprobs), "refusal": None}

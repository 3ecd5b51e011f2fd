"""OpenAI's older Completions: POST /v1/completions, a text or the ids of its tokens without a chat template.

    {"prompt": "<|im_start|>user\\n2+3?<|im_end|>\\n<|im_start|>assistant\\n"}   -> {"text": "5"}
    {"prompt": [1, 882, 13], "return_token_ids": true}                     -> {"text": "5", "token_ids": [20]}

A prompt that begins with a whole context, the end of its answer included, goes on in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from graft.gateway.dialects import sse
from graft.gateway.dialects.common import request_of
from graft.gateway.dialects.fields import MAX_ANSWERS, RequestFields, body_fields, describe_value
from graft.gateway.dialects.formats import GUIDED, read_format, read_guided
from graft.gateway.dialects.openai_common import (
    OTHER_SAMPLING,
    answer_ids,
    prompt_ids,
    usage_of,
)
from graft.gateway.dialects.openai_common import error as error
from graft.gateway.dialects.openai_common import models as models
from graft.gateway.dialects.tools import OfferedTools
from graft.gateway.request import PLAIN, AgentRequest, PolicyAnswer, RefusedRequest
from graft.types import Message

PATH: str = "/v1/completions"
PREFIX: str = "cmpl-"
MAX_LISTED = 5
"""The largest logprobs that OpenAI allows."""
KNOWN = {
    "prompt", "model", "temperature", "top_p", "top_k", "max_tokens", "stop", "seed", "n", "stream",
    "stream_options", "logprobs", "return_token_ids", "response_format", "structured_outputs", *GUIDED,
}  # fmt: skip
IGNORED = {"user"}
REFUSED: dict[str, tuple[Sequence[Any], str]] = {
    "echo": ((False,), "the answer is what was sampled; the client has the prompt"),
    "suffix": (("",), "the policy goes on from the prompt, and is not told what follows"),
    "best_of": ((1,), "every sampled answer is returned, and trained; use n"),
    "logit_bias": (({},), OTHER_SAMPLING),
    "presence_penalty": ((0,), OTHER_SAMPLING),
    "frequency_penalty": ((0,), OTHER_SAMPLING),
}
"""Name -> values that ask for nothing, and the reason why others are refused."""


def read(body: Any, headers: Mapping[str, str]) -> AgentRequest:
    fields = body_fields(body, KNOWN, IGNORED, REFUSED)
    options = fields.fields("stream_options")
    return request_of(
        fields,
        headers,
        messages=[_prompt(fields)],
        tools=OfferedTools(),
        choice="auto",
        hottest=2,
        max_tokens=fields.whole("max_tokens", 1),
        stop=fields.texts("stop"),
        seed=fields.whole("seed", -(2**63)),
        n=fields.whole("n", 1, MAX_ANSWERS) or 1,
        with_usage=not fields.flag("stream") or options.flag("include_usage"),
        logprobs=fields.whole("logprobs", 0, MAX_LISTED),
        format=read_format(fields, "response_format", "json_schema") or read_guided(fields),
        with_token_ids=fields.flag("return_token_ids"),
    )


def answer(request: AgentRequest, answers: Sequence[PolicyAnswer]) -> dict[str, Any]:
    choices = [_choice(request, number, sampled) for number, sampled in enumerate(answers)]
    return {**_head(request, answers[0].id), "choices": choices, "usage": usage_of(answers)}


def opening(request: AgentRequest, id: str) -> bytes:
    """Begin a stream: its chunks have no head of their own."""
    return b""


def events(request: AgentRequest, answers: Sequence[PolicyAnswer]) -> Iterator[bytes]:
    head = _head(request, answers[0].id)
    for number, sampled in enumerate(answers):
        *first, last = [*sse.pieces(sampled.content)] or [""]
        for piece in first:
            part = {"index": number, "text": piece, "logprobs": None, "finish_reason": None}
            yield sse.event({**head, "choices": [part]})
        yield sse.event({**head, "choices": [{**_choice(request, number, sampled), "text": last}]})
    if request.with_usage:
        yield sse.event({**head, "choices": [], "usage": usage_of(answers)})
    yield sse.DONE


def ping() -> bytes:
    return sse.COMMENT


def error_event(refused: RefusedRequest) -> bytes:
    return sse.event(error(refused)[1])


def _prompt(fields: RequestFields) -> Message:
    prompt = fields.required("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return {"role": PLAIN, "content": prompt}
    is_list = isinstance(prompt, list) and bool(prompt)
    if is_list and all(type(token) is int and token >= 0 for token in prompt):
        return {"role": PLAIN, "content": "", "tokens": prompt}
    raise fields.refused(
        "prompt",
        f"must be a text or the ids of its tokens, not {describe_value(prompt)}; send several prompts as "
        "several requests",
    )


def _head(request: AgentRequest, id: str) -> dict[str, Any]:
    made = {"id": PREFIX + id, "object": "text_completion", "created": int(time.time())}
    return {**made, "model": request.model}


def _choice(request: AgentRequest, number: int, sampled: PolicyAnswer) -> dict[str, Any]:
    choice = {"index": number, "text": sampled.content, "logprobs": _logprobs(request, sampled)}
    ids = {**prompt_ids(request, [sampled]), **answer_ids(request, sampled)}
    named = {"id": PREFIX + sampled.id} if request.n > 1 else {}
    return {**choice, "finish_reason": sampled.finish, **named, **ids}


def _logprobs(request: AgentRequest, sampled: PolicyAnswer) -> dict[str, Any] | None:
    if request.logprobs is None:
        return None
    texts, values = list(sampled.token_texts), list(sampled.logprobs)
    listed = [{text: value} for text, value in zip(texts, values, strict=True)]
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": listed if request.logprobs else None,
        "text_offset": [*accumulate(map(len, texts), initial=0)][:-1],
    }

"""Requests of each dialect as one form, and answers in each dialect's form, written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from dialect_kit import ANSWERS, CALLING, SCHEMA, STOPPED, TOOL, data_of

from graft.gateway.dialects import anthropic, fields, openai_chat, openai_responses
from graft.gateway.dialects.dialect import DIALECTS, answer_id
from graft.gateway.request import AgentRequest, PolicyAnswer, RefusedRequest

ASK = {"role": "user", "content": "1+2?"}
CHAT = {"model": "m", "messages": [ASK]}
MESSAGES = {"model": "m", "max_tokens": 5, "messages": [ASK]}
ADD = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1}},
}
WIRE = {**ADD, "function": {"name": "add", "arguments": '{"a":1}'}}


def chat(*messages: Any, **more: Any) -> AgentRequest:
    return openai_chat.read({**CHAT, "messages": [*messages] or [ASK], **more}, {})


def claude(*messages: Any, **more: Any) -> AgentRequest:
    return anthropic.read({**MESSAGES, "messages": [*messages] or [ASK], **more}, {})


def test_a_chat_of_openai():
    request = chat(
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "1+2?"}, {"type": "text", "text": "!"}],
        },
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [WIRE]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3"}]},
        tools=[{"type": "function", "function": {**TOOL["function"], "strict": True}}],
        max_tokens=9,
        max_completion_tokens=7.0,
        stop="END",
        temperature=0,
        top_p=0,
        top_k=-1,
        n=2,
        seed=5,
        user="someone",
        parallel_tool_calls=True,
        frequency_penalty=0,
        response_format={"type": "text"},
    )
    assert request == AgentRequest(
        messages=(
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1+2?\n!"},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [ADD]},
            {"role": "tool", "content": "3", "tool_call_id": "call_1", "name": "add"},
        ),
        tools=(TOOL,),
        strict_tools=("add",),
        model="m",
        max_tokens=7,
        stop=("END",),
        temperature=0.0,
        top_p=1e-6,
        top_k=0,
        n=2,
        seed=5,
    )


@pytest.mark.parametrize("text", ['{"a": ', "[1]", '"x"', "NaN", "[" * 5000, '{"a": 1e999}'])
def test_arguments_that_are_no_object_stay_text(text: str):
    broken = {**WIRE, "function": {"name": "add", "arguments": text}}
    request = chat(ASK, {"role": "assistant", "content": "", "tool_calls": [broken]})
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == text


def test_a_chat_of_anthropic():
    request = claude(
        {"role": "user", "content": [{"type": "text", "text": "1+2?", "cache_control": {}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "Adding."},
                {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Well?"},
                {
                    "type": "tool_result",
                    "tool_use_id": "call_1",
                    "content": [{"type": "text", "text": "no such number"}],
                    "is_error": True,
                },
            ],
        },
        {"role": "assistant", "content": "It"},
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=a1b2;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Always."},
        ],
        tools=[{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
        tool_choice={"type": "any"},
        stop_sequences=["END"],
        top_k=3,
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "high"},
    )
    assert request == AgentRequest(
        messages=(
            {"role": "system", "content": "Be brief.\nAlways."},
            ASK,
            {
                "role": "assistant",
                "content": "Adding.",
                "reasoning_content": "hm",
                "tool_calls": [ADD],
            },
            {
                "role": "tool",
                "content": "Error: no such number",
                "tool_call_id": "call_1",
                "name": "add",
            },
            {"role": "user", "content": "Well?"},
            {"role": "assistant", "content": "It"},
        ),
        tools=(TOOL,),
        model="m",
        max_tokens=5,
        stop=("END",),
        top_k=3,
        tool_choice="required",
    )


def test_a_header_names_the_sub_agent():
    for dialect, body in ((openai_chat, CHAT), (anthropic, MESSAGES)):
        assert dialect.read(body, {"X-Claude-Code-Agent-Id": "a7"}).agent == "a7"
        assert dialect.read(body, {}).agent == ""


CHAT_REFUSED = [
    ({"response_format": {"type": "yaml"}}, "response_format.type", "'yaml'"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
     "response_format.json_schema.schema", "required"),
    ({"guided_json": "{"}, "guided_json", "no JSON"),
    ({"guided_choice": []}, "guided_choice", "list of texts"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "beside guided_regex"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not known"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "own distribution"),
    ({"presence_penalty": 0.5}, "presence_penalty", "own distribution"),
    ({"top_logprobs": 30, "logprobs": True}, "top_logprobs", "from 0 to 20"),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ({"n": 0}, "n", "a whole number from 1 to 128"),
    ({"n": True}, "n", "a whole number"),
    ({"temperature": "hot"}, "temperature", "must be a number from 0 to 2, not 'hot'"),
    ({"stop": [""]}, "stop", "not empty"),
    ({"stream": 1}, "stream", "must be true or false"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools.0.custom.name", "required"),
    ({"tool_choice": "f"}, "tool_choice", "the tools are []"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": ["x"]}, "messages.0", "must be a JSON object, not 'x'"),
    ({"messages": [{"role": "poet", "content": ""}]}, "messages.0.role", "'poet'"),
    ({"messages": [{"role": "tool", "content": ""}]}, "messages.0.tool_call_id", "required"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages.0.content.0.type", "text only"),
    ({"seed": 2**70}, None, "63 bits"),
    ({"user": "\ud800"}, None, "surrogate"),
]  # fmt: skip
MESSAGES_REFUSED = [
    ({"max_tokens": None}, "max_tokens", "is required"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "required"),
    ({"mcp_servers": [{}]}, "mcp_servers", "in the agent"),
    ({"tools": [{"type": "bash_20250124"}]}, "tools.0.name", "required"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice", "the tools are []"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
     "messages.0.content.0.type", "text only"),
    ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
     "messages.0.content.0.type", "server_tool_use"),
]  # fmt: skip
RESPONSES_REFUSED = [
    ({"input": None}, "input", "is required"),
    ({"input": []}, "messages", "at least one"),
    ({"previous_response_id": "resp_x"}, "previous_response_id", "whole conversation"),
    ({"tools": [{"type": "custom"}]}, "tools.0.name", "required"),
    ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format.schema", "JSON schema"),
    ({"truncation": "auto"}, "truncation", "nothing is dropped"),
    ({"background": True}, "background", "waited for"),
    ({"conversation": "c"}, "conversation", "not kept"),
    ({"top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "not kept here"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0.type", "cannot read"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input.0.content.0.type", "text only"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("dialect", "body", "more", "param", "why"),
    [
        *((openai_chat, CHAT, *row) for row in CHAT_REFUSED),
        *((anthropic, MESSAGES, *row) for row in MESSAGES_REFUSED),
        *((openai_responses, {"model": "m", "input": "x"}, *row) for row in RESPONSES_REFUSED),
    ],
)
def test_what_cannot_be_asked_for(dialect: Any, body: Any, more: Any, param: str | None, why: str):
    with pytest.raises(RefusedRequest) as caught:
        dialect.read({**body, **more}, {})
    assert why in str(caught.value) and caught.value.param == param
    status, answer = dialect.error(caught.value)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_count_tokens_needs_no_limit():
    body = {"model": "m", "messages": [ASK]}
    assert anthropic.read_count(body, {}).messages == (ASK,)
    assert anthropic.counted(7) == {"input_tokens": 7}


def test_fields_that_nobody_knows_are_ignored_and_named_once(caplog: pytest.LogCaptureFixture):
    fields._noted.clear()
    for _ in range(2):
        assert chat(graft_of_tomorrow=1).messages == (ASK,)
    assert caplog.text.count("graft_of_tomorrow") == 1


def test_an_answer_of_openai_s_chat():
    body = openai_chat.answer(AgentRequest((ASK,), model="m"), [CALLING])
    assert (body["id"], body["object"], body["model"]) == ("chatcmpl-7f", "chat.completion", "m")
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["logprobs"] is None
    assert choice["message"] == {
        "role": "assistant",
        "content": "Adding.",
        "refusal": None,
        "reasoning_content": "one and two",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 1, "b": "ü\\u2028"}'},
            },
            {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    }
    assert body["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 6},
    }


def test_log_probs_and_several_answers():
    one = PolicyAnswer("a", "é", token_texts=("é",), logprobs=(-0.5,), tokens=(4,))
    two = PolicyAnswer("b", "x", token_texts=("x",), logprobs=(-1.0,), tokens=(5,))
    body = openai_chat.answer(AgentRequest((ASK,), n=2, logprobs=0), [one, two])
    first, second = body["choices"]
    assert first["logprobs"]["content"] == [
        {"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": []}
    ]
    assert (first["id"], second["id"]) == ("chatcmpl-a", "chatcmpl-b")
    assert answer_id(second["id"]) == "b"
    assert body["usage"]["completion_tokens"] == 2


def test_an_answer_of_anthropic_s():
    body = anthropic.answer(AgentRequest((ASK,), model="m"), [CALLING])
    assert body == {
        "id": "msg_7f",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "one and two", "signature": "graft-7f"},
            {"type": "text", "text": "Adding."},
            {
                "type": "tool_use",
                "id": "call_1",
                "name": "add",
                "input": {"a": 1, "b": "ü\u2028"},
            },
            {"type": "tool_use", "id": "call_2", "name": "now", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 6,
            "output_tokens": 3,
        },
    }
    ended = anthropic.answer(AgentRequest((ASK,)), [STOPPED])
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", "END")
    called = replace(CALLING, stop_string="END")  # a client runs tools after tool_use only
    ended = anthropic.answer(AgentRequest((ASK,)), [called])
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("tool_use", None)


def test_the_events_of_anthropic_in_order():
    request = AgentRequest((ASK,), model="m", stream=True)
    stream = anthropic.ping() + anthropic.opening(request, "7f")
    stream += b"".join(anthropic.events(request, [CALLING]))
    found = [(one["type"], one.get("delta", {}).get("type", "")) for one in data_of(stream)]
    block = [("content_block_start", ""), ("content_block_delta", ""), ("content_block_stop", "")]

    def deltas(*kinds: str) -> list[tuple[str, str]]:
        return [block[0], *(("content_block_delta", kind) for kind in kinds), block[2]]

    assert found == [
        ("ping", ""),
        ("message_start", ""),
        *deltas("thinking_delta", "signature_delta"),
        *deltas("text_delta"),
        *deltas("input_json_delta"),
        *deltas("input_json_delta"),
        ("message_delta", ""),
        ("message_stop", ""),
    ]


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_that_comes_back_is_the_message_that_was_sent(kind: str):
    """What a client makes of an answer, sent as history, reads as the same content and calls."""
    answer, request = ANSWERS[kind], AgentRequest((ASK,))
    message = openai_chat.answer(request, [answer])["choices"][0]["message"]
    blocks = anthropic.answer(request, [answer])["content"]
    output = openai_responses.answer(request, [answer])["output"]
    read = openai_responses.read({"model": "m", "input": [ASK, *output]}, {}).messages
    openai, claude_ = chat(ASK, message), claude(ASK, {"role": "assistant", "content": blocks})
    assert openai.messages == claude_.messages
    for last in (openai.messages[-1], read[-1]):
        reasoning = last.get("reasoning_content", "")
        assert (last["content"], reasoning) == (answer.content, answer.reasoning)
        assert [call["id"] for call in last.get("tool_calls", ())] == [c.id for c in answer.calls]


def test_the_id_of_an_answer():
    for name, prefix in (("openai_chat", "chatcmpl-"), ("anthropic", "msg_")):
        assert prefix == DIALECTS[name].PREFIX and answer_id(f"{prefix}7f") == "7f"
    assert answer_id("7f") == "7f"


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize(
    "kind, status",
    [
        ("invalid", (400, 400)),
        ("context_length", (400, 400)),
        ("authentication", (401, 401)),
        ("permission", (403, 403)),
        ("not_found", (404, 404)),
        ("too_large", (413, 413)),
        ("rate_limit", (429, 429)),
        ("overloaded", (503, 529)),
        ("internal", (500, 500)),
        ("a kind of tomorrow", (500, 500)),
    ],
)
def test_errors_have_the_status_of_the_dialect(dialect: Any, kind: str, status: tuple[int, int]):
    refused = RefusedRequest("8 tokens > 5 maximum", kind)
    got, body = dialect.error(refused)
    assert got == status[dialect is anthropic]
    assert "8 tokens > 5 maximum" in body["error"]["message"]
    assert b"8 tokens > 5 maximum" in dialect.error_event(refused)
    if dialect is anthropic and kind == "context_length":
        assert body["error"]["message"] == "prompt is too long: 8 tokens > 5 maximum"


def test_a_thread_is_refused_so_that_the_sdk_sends_the_whole_conversation():
    with pytest.raises(RefusedRequest) as caught:
        anthropic.read({**MESSAGES, "thread": {"type": "create"}}, {})
    status, body = anthropic.error(caught.value)
    assert (status, body["error"]["details"]["error_code"]) == (400, "thread_unsupported_request")


def test_model_lists():
    assert openai_chat.models(["m"])["data"][0]["id"] == "m"
    listed = anthropic.models(["m", "n"])
    assert (listed["first_id"], listed["last_id"], listed["data"][1]["display_name"]) == (
        "m",
        "n",
        "n",
    )

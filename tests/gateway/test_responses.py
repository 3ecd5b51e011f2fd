"""OpenAI's Responses, written by hand: items as messages, answers as items, events in order."""

from __future__ import annotations

from typing import Any

import pytest
from dialect_kit import CALLING, CUT, SCHEMA, TALKING, THINKING, TOOL, data_of

from graft.gateway.dialects import openai_responses
from graft.gateway.dialects.response_store import ResponseStore
from graft.gateway.request import AgentRequest, PolicyAnswer, RefusedRequest

ASK = {"role": "user", "content": "1+2?"}
ADD = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALL = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a":1}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "3"}


def read(items: Any = "1+2?", **more: Any) -> AgentRequest:
    return openai_responses.read({"model": "m", "input": items, **more}, {})


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "content": content}


def thought(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}


def test_items_are_messages():
    request = read(
        [
            {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            ASK,
            thought("hm"),
            said("Adding."),
            CALL,
            {**CALL, "call_id": "call_2", "arguments": "[1"},
            {**RESULT, "output": [{"type": "input_text", "text": "3"}]},
            said("So"),
            said("it is."),
        ],
        instructions="Add.",
        tools=[{"type": "function", **TOOL["function"], "strict": True}],
        tool_choice={"type": "function", "name": "add"},
        max_output_tokens=7,
        include=["message.output_text.logprobs"],
        reasoning={"effort": "low"},
        store=False,
        truncation="disabled",
        text={"format": {"type": "text"}, "verbosity": "low"},
    )
    second = {**ADD, "id": "call_2", "function": {"name": "add", "arguments": "[1"}}
    assert request == AgentRequest(
        messages=(
            {"role": "system", "content": "Add."},
            {"role": "system", "content": "Be brief."},
            ASK,
            {
                "role": "assistant",
                "content": "Adding.",
                "reasoning_content": "hm",
                "tool_calls": [ADD, second],
            },
            {"role": "tool", "content": "3", "tool_call_id": "call_1", "name": "add"},
            {"role": "assistant", "content": "So"},
            {"role": "assistant", "content": "it is."},
        ),
        tools=(TOOL,),
        strict_tools=("add",),
        model="m",
        max_tokens=7,
        logprobs=0,
        tool_choice="add",
    )
    assert read().messages == (ASK,)


def test_an_answer_is_items():
    request = AgentRequest((ASK,), tools=(TOOL,), model="m", tool_choice="add")
    body = openai_responses.answer(request, [CALLING])
    assert (body["id"], body["status"], body["error"]) == ("resp_7f", "completed", None)
    assert body["tools"] == [
        {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}
    ]
    assert body["tool_choice"] == {"type": "function", "name": "add"}
    assert [(item["type"], item["id"]) for item in body["output"]] == [
        ("reasoning", "rs_7f"),
        ("message", "msg_7f"),
        ("function_call", "fc_7f_0"),
        ("function_call", "fc_7f_1"),
    ]
    assert body["output"][3] == {
        "id": "fc_7f_1",
        "type": "function_call",
        "call_id": "call_2",
        "name": "now",
        "arguments": "{}",
        "status": "completed",
    }
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (10, 3)
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 6
    cut = openai_responses.answer(request, [CUT])
    assert (cut["status"], cut["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )


def test_log_probs_of_an_answer():
    one = PolicyAnswer("a", "x", token_texts=("x",), logprobs=(-0.5,), tokens=(4,))
    (item,) = openai_responses.answer(AgentRequest((ASK,), logprobs=0), [one])["output"]
    assert item["content"][0]["logprobs"] == [
        {"token": "x", "bytes": [120], "logprob": -0.5, "top_logprobs": []}
    ]


def test_the_events_in_order():
    request = AgentRequest((ASK,), stream=True)
    stream = openai_responses.opening(request, "7f")
    stream += b"".join(openai_responses.events(request, [CALLING]))
    found = data_of(stream)
    assert [one["sequence_number"] for one in found] == [*range(len(found))]
    item, done = ["output_item.added"], ["output_item.done"]
    part, parted = ["content_part.added"], ["content_part.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert [one["type"].removeprefix("response.") for one in found] == [
        *["created", "in_progress"],
        *[*item, *part, "reasoning_text.delta", "reasoning_text.done", *parted, *done],
        *[*item, *part, "output_text.delta", "output_text.done", *parted, *done],
        *[*item, *call, *done],
        *[*item, *call, *done],
        "completed",
    ]
    assert [one["output_index"] for one in found[2:-1]] == [0] * 6 + [1] * 6 + [2] * 4 + [3] * 4
    assert found[2]["item"] == {
        "id": "rs_7f",
        "type": "reasoning",
        "summary": [],
        "content": [],
        "status": "in_progress",
    }
    assert found[14]["item"]["arguments"] == ""
    cut = data_of(b"".join(openai_responses.events(request, [CUT])))
    assert cut[-1]["type"] == "response.incomplete"
    pieces = [one["delta"] for one in cut if one["type"] == "response.output_text.delta"]
    assert len(pieces) == 5 and "".join(pieces) == CUT.content


def test_a_conversation_goes_on_from_a_response():
    store, request = ResponseStore(), AgentRequest((ASK,))
    first = {"model": "m", "input": "1+2?", "instructions": "Add."}
    store.keep(first, openai_responses.answer(request, [THINKING]))
    second = {"model": "m", "input": [RESULT], "previous_response_id": "resp_7f"}
    whole = store.resolve(second)
    assert "previous_response_id" not in whole and "instructions" not in whole
    messages = openai_responses.read(whole, {}).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["reasoning_content"] == "one and two"
    later = PolicyAnswer("8a", "So.")
    store.keep(second, openai_responses.answer(request, [later]))
    third = store.resolve({"input": "and?", "previous_response_id": "resp_8a"})
    assert [m["content"] for m in read(third["input"]).messages] == [
        "1+2?",
        "It is 3.",
        "3",
        "So.",
        "and?",
    ]


def test_items_are_found_by_their_ids_and_unknown_ids_are_refused():
    store = ResponseStore()
    store.keep({"input": "1+2?"}, openai_responses.answer(AgentRequest((ASK,)), [TALKING]))
    reference = {"type": "item_reference", "id": "msg_7f"}
    messages = read(store.resolve({"input": [ASK, reference]})["input"]).messages
    assert messages[1]["content"] == "It is 3."
    with pytest.raises(RefusedRequest, match="'resp_9' is no response of this session"):
        store.resolve({"input": "x", "previous_response_id": "resp_9"})
    store.keep({"input": "x", "store": False}, {"id": "resp_n", "output": []})
    with pytest.raises(RefusedRequest, match="resp_n"):
        store.resolve({"input": "x", "previous_response_id": "resp_n"})
    for broken in (None, [], {}, {"input": 5, "previous_response_id": 5}):
        assert store.resolve(broken) is broken
    with pytest.raises(RefusedRequest, match="previous_response_id must be a text"):
        store.resolve({"input": "x", "previous_response_id": 5})

"""Our JSON and events, read by the providers' own libraries: their parsers and stream accumulators."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from dialect_kit import ANSWERS, CALLING, SCHEMA, THINKING, TOOL

from graft.gateway.dialects import (
    anthropic,
    openai_chat,
    openai_completions,
    openai_responses,
)
from graft.gateway.request import AgentRequest, AnsweredCall, PolicyAnswer, RefusedRequest

pytestmark = [pytest.mark.peer, pytest.mark.slow]
ASK = {"role": "user", "content": "1+2?"}


def client(
    library: Any, transport: Any, kind: str, dialect: Any, answers: list[PolicyAnswer]
) -> Any:
    """A client of the library whose requests the dialect reads and answers, and the requests."""
    seen: list[AgentRequest] = []

    def handle(request: Any) -> Any:
        body = json.loads(request.content) if request.content else {}
        try:
            one = dialect.read(body, dict(request.headers))
        except RefusedRequest as refused:
            status, error = dialect.error(refused)
            return transport.Response(status, json=error)
        seen.append(one)
        if not one.stream:
            return transport.Response(200, json=dialect.answer(one, answers))
        stream = [dialect.ping(), dialect.opening(one, answers[0].id), dialect.ping()]
        stream += dialect.events(one, answers)
        head = {"content-type": "text/event-stream"}
        return transport.Response(200, content=b"".join(stream), headers=head)

    http = transport.Client(transport=transport.MockTransport(handle))
    made = getattr(library, kind)(
        api_key="k", base_url="http://127.0.0.1/v1", http_client=http, max_retries=0
    )
    made.seen = seen
    return made


def http_of(library: Any) -> Any:
    """The HTTP library that theirs uses, by version."""
    uses = library._base_client.__dict__
    return uses.get("httpx2") or uses["httpx"]


@pytest.fixture
def openai() -> Callable[..., Any]:
    library = pytest.importorskip("openai")
    return lambda *answers, dialect=openai_chat: client(
        library, http_of(library), "OpenAI", dialect, list(answers)
    )


@pytest.fixture
def claude() -> Callable[..., Any]:
    library = pytest.importorskip("anthropic")
    return lambda *answers: client(library, http_of(library), "Anthropic", anthropic, list(answers))


@pytest.mark.parametrize("kind", ANSWERS)
def test_openai_s_chat_whole_and_streamed(openai: Callable[..., Any], kind: str):
    answer = ANSWERS[kind]
    asked = {"model": "m", "messages": [ASK], "tools": [TOOL]}
    made = openai(answer)
    whole = made.chat.completions.create(**asked)
    if kind == "cut":  # their accumulator raises, as what it parses might be cut
        chunks = list(made.chat.completions.create(**asked, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.content
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
        return
    with made.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        streamed = stream.get_final_completion()
    for one in (whole, streamed):
        (choice,) = one.choices
        assert (one.id, choice.finish_reason) == ("chatcmpl-7f", answer.finish)
        assert (choice.message.content or "") == answer.content
        assert getattr(choice.message, "reasoning_content", "") == answer.reasoning
        calls = choice.message.tool_calls or []
        assert [(c.id, c.function.name, c.function.arguments) for c in calls] == [
            (c.id, c.name, c.arguments) for c in answer.calls
        ]
        assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (10, 3)
        assert one.usage.prompt_tokens_details.cached_tokens == 6


def test_openai_s_chat_streams_several_answers_and_log_probs(openai: Callable[..., Any]):
    pair = [PolicyAnswer(n, n, token_texts=(n,), logprobs=(-0.5,), tokens=(4,)) for n in "ab"]
    asked = {"model": "m", "messages": [ASK], "n": 2, "logprobs": True}
    made = openai(*pair)
    with made.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion()
    for one in (made.chat.completions.create(**asked), streamed):
        assert [choice.message.content for choice in one.choices] == ["a", "b"]
        assert [choice.logprobs.content[0].logprob for choice in one.choices] == [-0.5, -0.5]
    assert made.seen[0].logprobs == 0 and made.seen[0].with_usage is False


def test_openai_s_older_completions_whole_and_streamed(openai: Callable[..., Any]):
    pair = [PolicyAnswer(n, n, token_texts=(n,), logprobs=(-0.5,), tokens=(4,)) for n in "ab"]
    asked = {"model": "m", "prompt": [1, 2], "n": 2, "logprobs": 1}
    made = openai(*pair, dialect=openai_completions)
    whole = made.completions.create(**asked)
    assert [(one.text, one.logprobs.token_logprobs) for one in whole.choices] == [
        ("a", [-0.5]),
        ("b", [-0.5]),
    ]
    chunks = list(made.completions.create(**asked, stream=True))
    assert ["".join(one.text for one in chunk.choices) for chunk in chunks] == ["a", "b"]
    assert made.seen[0].messages[0]["tokens"] == [1, 2]


def test_openai_s_custom_tools_in_both_apis(openai: Callable[..., Any]):
    called = AnsweredCall("call_1", "patch", '{"input": "*** a"}')
    answer = PolicyAnswer("7f", "", calls=(called,), finish="tool_calls")
    custom = {"name": "patch", "description": "Edits."}
    chat = openai(answer)
    tools = [{"type": "custom", "custom": custom}]
    whole = chat.chat.completions.create(model="m", messages=[ASK], tools=tools)
    (call,) = whole.choices[0].message.tool_calls
    assert (call.custom.name, call.custom.input) == ("patch", "*** a")
    responses = openai(answer, dialect=openai_responses)
    asked = {"model": "m", "input": "x", "tools": [{"type": "custom", **custom}]}
    (item,) = responses.responses.create(**asked).output
    assert (item.type, item.call_id, item.input) == ("custom_tool_call", "call_1", "*** a")
    events = list(responses.responses.create(**asked, stream=True))
    for event in events:
        type(event).model_validate(event.to_dict())
    assert [one.input for one in events if one.type.endswith("input.done")] == ["*** a"]


def test_errors_are_those_of_the_library(openai: Callable[..., Any], claude: Callable[..., Any]):
    import anthropic as their_anthropic
    import openai as their_openai

    with pytest.raises(their_openai.BadRequestError, match="logit_bias is not supported") as one:
        openai(THINKING).chat.completions.create(model="m", messages=[ASK], logit_bias={"5": 1})
    assert one.value.param == "logit_bias"
    with pytest.raises(their_anthropic.BadRequestError, match="not supported here: tools run in"):
        claude(THINKING).messages.create(
            model="m", max_tokens=5, messages=[ASK], extra_body={"mcp_servers": [{}]}
        )


@pytest.mark.parametrize("kind", ANSWERS)
def test_openai_s_responses_whole_and_streamed(openai: Callable[..., Any], kind: str):
    answer = ANSWERS[kind]
    tools = [{"type": "function", **TOOL["function"], "strict": False}]
    asked = {"model": "m", "input": "1+2?", "tools": tools}
    made = openai(answer, dialect=openai_responses)
    whole = made.responses.create(**asked)
    assert (whole.id, whole.output_text) == ("resp_7f", answer.content)
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [(call.call_id, call.name, call.arguments) for call in calls] == [
        (call.id, call.name, call.arguments) for call in answer.calls
    ]
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (10, 3)
    # every event is valid in their types, and what they add up is the whole
    events = list(made.responses.create(**asked, stream=True))
    for event in events:
        type(event).model_validate(event.to_dict())
    is_cut = answer.finish == "length"
    assert events[-1].type == ("response.incomplete" if is_cut else "response.completed")
    asked["tools"] = []  # their helper wants strict ones
    with made.responses.stream(**asked) as stream:
        snapshots = [event for event in stream if event.type == "response.output_text.delta"]
        if is_cut:
            assert snapshots[-1].snapshot == answer.content
            return
        final = stream.get_final_response()
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert final.output_text == answer.content
    # a client's history is the output
    history = [{"role": "user", "content": "1+2?"}, *(item.to_dict() for item in whole.output)]
    made.responses.create(model="m", input=history)
    last = made.seen[-1].messages[-1]
    assert (last["content"], len(last.get("tool_calls", ()))) == (answer.content, len(answer.calls))


@pytest.mark.parametrize("kind", ANSWERS)
def test_anthropic_s_messages_whole_and_streamed(claude: Callable[..., Any], kind: str):
    answer = ANSWERS[kind]
    tools = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    asked = {"model": "m", "max_tokens": 5, "messages": [ASK], "tools": tools}
    made = claude(answer)
    with made.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    whole = made.messages.create(**asked)
    assert streamed.to_dict(exclude_none=True) == whole.to_dict(exclude_none=True)
    assert whole.id == "msg_7f"
    texts = [block.text for block in whole.content if block.type == "text"]
    assert "".join(texts) == answer.content
    thoughts = [block.thinking for block in whole.content if block.type == "thinking"]
    assert "".join(thoughts) == answer.reasoning
    calls = [block for block in whole.content if block.type == "tool_use"]
    assert [(call.id, call.name, call.input) for call in calls] == [
        (call.id, call.name, json.loads(call.arguments)) for call in answer.calls
    ]
    assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens) == (4, 6)
    assert [tool["function"]["name"] for tool in made.seen[0].tools] == ["add"]


def test_an_error_inside_a_stream_reaches_the_client():
    refused = RefusedRequest("the engine has stopped", "internal")
    library = pytest.importorskip("openai")
    theirs = pytest.importorskip("anthropic")

    class Broken:
        """A dialect whose stream breaks."""

        def __init__(self, dialect: Any) -> None:
            self.dialect = dialect

        def __getattr__(self, name: str) -> Any:
            return getattr(self.dialect, name)

        def events(self, *_: Any) -> list[bytes]:
            return [self.dialect.error_event(refused)]

    made = client(library, http_of(library), "OpenAI", Broken(openai_chat), [CALLING])
    with pytest.raises(library.APIError, match="engine has stopped"):
        list(made.chat.completions.create(model="m", messages=[ASK], stream=True))
    made = client(library, http_of(library), "OpenAI", Broken(openai_responses), [CALLING])
    with pytest.raises(library.APIError, match="engine has stopped"):
        list(made.responses.create(model="m", input="x", stream=True))
    made = client(theirs, http_of(theirs), "Anthropic", Broken(anthropic), [CALLING])
    with pytest.raises(theirs.APIError, match="engine has stopped"):
        list(made.messages.create(model="m", max_tokens=5, messages=[ASK], stream=True))


def test_models_are_listed_by_both_libraries():
    pages = pytest.importorskip("openai.pagination"), pytest.importorskip("anthropic.pagination")
    from anthropic.types import ModelInfo
    from openai.types import Model

    listed = pages[0].SyncPage[Model].model_validate(openai_chat.models(["m"]))
    assert [one.id for one in listed.data] == ["m"]
    listed = pages[1].SyncPage[ModelInfo].model_validate(anthropic.models(["m"]))
    assert [one.id for one in listed.data] == ["m"] and listed.has_more is False

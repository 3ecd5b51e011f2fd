"""The older Completions API: prompts without a chat template, as texts and as the ids of their tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from graft.gateway.dialects import openai_completions
from graft.gateway.gateway import Gateway
from graft.gateway.request import PLAIN, AgentRequest, PolicyAnswer, RefusedRequest
from graft.gateway.session import AgentSession
from tests.gateway.dialect_kit import data_of
from tests.gateway.tiny import asks, check_exact, said


def plain(prompt: Any, **more: Any) -> AgentRequest:
    return openai_completions.read({"model": "m", "prompt": prompt, **more}, {})


async def test_a_text_is_no_chat_and_goes_on_in_its_context(
    gateway: Gateway, session: AgentSession
):
    decode = gateway.policy.chat.tokenizer.decode
    (first,) = await session.answer(plain("2+3=", max_tokens=3))
    done = session.history.answers[first.id]
    assert decode(done.tokens[:4]) == "2+3=" and len(first.tokens) == 3
    (second,) = await session.answer(plain(decode(done.tokens) + "\nand", max_tokens=3))
    whole = session.history.answers[second.id].tokens
    assert whole[: len(done.tokens)] == done.tokens
    (other,) = await session.answer(plain("7+1=", max_tokens=3))
    assert [one.reason for one in session.contexts] == ["first", "new conversation"]
    session.end()
    check_exact(session.forest.episode(), gateway, [first.tokens, second.tokens, other.tokens])


async def test_ids_of_tokens_go_on_exactly(gateway: Gateway, session: AgentSession):
    (first,) = await session.answer(plain([50, 51, 52], max_tokens=4, return_token_ids=True))
    assert first.prompt == (50, 51, 52)
    ids = [*first.prompt, *first.tokens]
    (second,) = await session.answer(plain([*ids, 60], max_tokens=4))
    (third,) = await session.answer(plain(ids, max_tokens=4))  # nothing new: the answer goes on
    (again,) = await session.answer(plain([50, 51, 52], max_tokens=4, return_token_ids=True))
    assert again is first and session.counts["retries"] == 1
    assert len(session.contexts) == 1
    session.end()
    check_exact(session.forest.episode(), gateway, [first.tokens, second.tokens, third.tokens])


async def test_a_chat_never_goes_on_from_a_plain_prompt(session: AgentSession):
    (answer,) = await session.answer(plain("hello", max_tokens=3))
    await session.answer(asks("hello", said(answer), "more"))
    assert len(session.contexts) == 2


@pytest.mark.parametrize("prompt", [None, "", [], ["a", "b"], [[1], [2]], [-1], [1.5], {}])
def test_a_prompt_is_a_text_or_ids(prompt: Any):
    with pytest.raises(RefusedRequest) as refused:
        plain(prompt)
    assert refused.value.param == "prompt"


async def test_an_id_beyond_the_vocabulary_is_refused(session: AgentSession):
    with pytest.raises(RefusedRequest, match="99999"):
        await session.answer(plain([99999]))


@pytest.mark.parametrize("field", [{"echo": True}, {"suffix": "x"}, {"best_of": 2}])
def test_what_is_not_sampled_so_is_refused(field: dict[str, Any]):
    with pytest.raises(RefusedRequest) as refused:
        plain("a", **field)
    assert refused.value.param == next(iter(field))


def test_answers_have_the_form_of_the_api():
    request = plain(["a"], n=2, logprobs=1, return_token_ids=True, stream=True)
    assert request.messages == ({"role": PLAIN, "content": "a"},)
    pair = [
        PolicyAnswer(
            n, "xy", tokens=(4, 5), token_texts=("x", "y"), logprobs=(-1.0, -2.0), prompt=(3,)
        )
        for n in "ab"
    ]
    whole = openai_completions.answer(request, pair)
    assert (whole["id"], whole["object"]) == ("cmpl-a", "text_completion")
    for number, choice in enumerate(whole["choices"]):
        assert (choice["index"], choice["text"], choice["finish_reason"]) == (number, "xy", "stop")
        assert (choice["prompt_token_ids"], choice["token_ids"]) == ([3], [4, 5])
        assert choice["logprobs"]["token_logprobs"] == [-1.0, -2.0]
        assert choice["logprobs"]["text_offset"] == [0, 1]
    events = data_of(b"".join(openai_completions.events(request, pair)))
    assert ["".join(e["choices"][0]["text"]) for e in events] == ["xy", "xy"]
    assert json.dumps(whole)


async def test_a_plain_answer_has_the_format_that_is_asked_for(session: AgentSession):
    (answer,) = await session.answer(plain("2+3=", guided_regex="[0-9]{3}", max_tokens=8))
    assert len(answer.content) == 3 and answer.content.isdigit()

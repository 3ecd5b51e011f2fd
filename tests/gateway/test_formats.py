"""Structured answers over the gateway: three dialects ask, the policy's text has the format, and training
knows what was allowed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch
from tiny import CALCULATOR, TASK, asks, said, tiny_gateway

from graft.gateway.dialects.dialect import DIALECTS
from graft.gateway.request import RefusedRequest
from graft.models.tree.forest import Forest
from graft.rollout.batching import to_batch, trajectories_of
from graft.structure import Structure
from graft.types import NO_ACTION, Sampling

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"value": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["value"],
    "additionalProperties": False,
}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
RESPONSES = {"model": "m", "input": "x"}
CLAUDE = {**CHAT, "max_tokens": 9}
NAMED = {"name": "p", "strict": True, "schema": SCHEMA}
FORMAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("dialect", "body", "structure"),
    [
        ("openai_chat", {**CHAT, "response_format": {"type": "text"}}, None),
        ("openai_chat", {**CHAT, "response_format": {"type": "json_object"}}, Structure.json()),
        (
            "openai_chat",
            {**CHAT, "response_format": {"type": "json_schema", "json_schema": NAMED}},
            Structure.json(SCHEMA),
        ),
        ("openai_chat", {**CHAT, "guided_json": json.dumps(SCHEMA)}, Structure.json(SCHEMA)),
        ("openai_chat", {**CHAT, "guided_choice": ["a", "b"]}, Structure.choice(["a", "b"])),
        ("openai_chat", {**CHAT, "structured_outputs": {"regex": "a+"}}, Structure.regex("a+")),
        ("openai_chat", {**CHAT, "structured_outputs": {"json_object": True}}, Structure.json()),
        ("openai_responses", {**RESPONSES, "text": {"verbosity": "low"}}, None),
        ("openai_responses", {**RESPONSES, "text": {"format": FORMAT}}, Structure.json(SCHEMA)),
        ("anthropic", {**CLAUDE, "output_config": {"format": FORMAT}}, Structure.json(SCHEMA)),
        ("anthropic", {**CLAUDE, "output_format": FORMAT}, Structure.json(SCHEMA)),
        ("anthropic", {**CLAUDE, "output_config": {"effort": "low"}}, None),
    ],
)
def test_every_dialect_asks_for_a_format(dialect: str, body: Any, structure: Any) -> None:
    request = DIALECTS[dialect].read(body, {})
    plain = DIALECTS[dialect].read({k: v for k, v in body.items() if k in CLAUDE | RESPONSES}, {})
    assert request.format == structure
    assert (request.sampling_key == plain.sampling_key) is (structure is None)


@pytest.fixture
def gateway() -> Any:
    gateway = tiny_gateway(sampling=Sampling(max_tokens=48))
    yield gateway
    gateway.policy.engine.close()


async def test_an_answer_has_the_format_and_the_next_turn_goes_on_from_it(gateway: Any) -> None:
    session = gateway.open(TASK)
    ask = asks("how many?", format=Structure.json(SCHEMA))
    (first,) = await session.answer(ask)
    value = json.loads(first.content)["value"]
    assert 0 <= value <= 999 and first.finish == "stop"
    (second,) = await session.answer(asks("how many?", said(first), "and now?"))
    (third,) = await session.answer(asks("how many?", format=Structure.choice(["one", "two"])))
    assert third.content in ("one", "two") and second.content != third.content
    session.reward(1.0)
    session.end()
    episode = session.forest.episode()
    assert len(episode.leaves[0].tips) == 2  # the third asked for another format
    rows = trajectories_of([episode])
    batch = to_batch(rows)
    drawn = [s for row in rows for s in row.spans if s.masks]
    assert all(any(s.mask) and NO_ACTION in s.actions for s in drawn)
    assert not any(
        m for s in drawn for m, a in zip(s.mask, s.actions, strict=True) if a == NO_ACTION
    )
    with torch.no_grad():
        logp, _ = Forest(rows, batch.mask, torch.device("cpu")).logprobs(
            gateway.policy.engine.decoder
        )
    torch.testing.assert_close(logp[batch.mask], batch.logprobs[batch.mask], atol=1e-5, rtol=0)


async def test_beside_tools_an_answer_is_a_call_or_has_the_format(gateway: Any) -> None:
    session = gateway.open(TASK)
    ask = {"tools": (CALCULATOR,), "format": Structure.json(SCHEMA)}
    answers = [await session.answer(asks("x", seed=n, **ask)) for n in range(12)]
    texts = [one.content for (one,) in answers]
    assert all(t.startswith("<tool_call>") or "value" in json.loads(t) for t in texts)
    assert len({t[0] for t in texts}) == 2  # both happen


async def test_a_budget_that_ends_inside_the_format_is_said(gateway: Any) -> None:
    session = gateway.open(TASK)
    (cut,) = await session.answer(asks("x", format=Structure.json(SCHEMA), max_tokens=4))
    assert cut.finish == "length" and cut.content == '{"va'


@pytest.mark.parametrize(
    ("structure", "more"),
    [
        (Structure.json({"type": "integer", "minimum": 3, "maximum": 2}), ()),
        (Structure.regex("(a"), ()),
        (Structure.json(SCHEMA), ({"role": "assistant", "content": "{"},)),
    ],
)
async def test_a_format_that_cannot_be_enforced_is_refused(
    gateway: Any, structure: Structure, more: tuple[Any, ...]
) -> None:
    session = gateway.open(TASK)
    with pytest.raises(RefusedRequest) as caught:
        await session.answer(asks("x", *more, format=structure))
    assert caught.value.kind == "invalid" and caught.value.param == "response_format"
    (done,) = await session.answer(asks("y"))  # the session goes on
    assert done.tokens


@pytest.mark.parametrize("choices", [-1, True, 1.5, "ab", {"a": 1}, [], [1], [""]])
def test_choices_that_are_no_list_of_texts_are_refused(choices: Any) -> None:
    for body, param in (
        ({**CHAT, "guided_choice": choices}, "guided_choice"),
        ({**CHAT, "structured_outputs": {"choice": choices}}, "structured_outputs.choice"),
    ):
        with pytest.raises(RefusedRequest) as refused:
            DIALECTS["openai_chat"].read(body, {})
        assert refused.value.param == param


async def test_many_formats_at_once(gateway: Any) -> None:
    session = gateway.open(TASK)
    asked = [asks(f"{n}", format=Structure.json({"const": n}) if n % 2 else None) for n in range(9)]
    answers = await asyncio.gather(*(session.answer(one) for one in asked))
    assert [one.content for (one,) in answers[1::2]] == ["1", "3", "5", "7"]

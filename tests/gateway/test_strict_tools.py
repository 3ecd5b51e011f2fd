"""Tools with `strict`: calls have valid arguments, whatever the policy is, and the rest of a turn is free."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import fastjsonschema
import pytest
import torch
from tiny import CALCULATOR, TASK, asks, said, tiny_engine

from graft.engine.checks import check_structure
from graft.engine.native.context import NativeContext
from graft.gateway import policy as served
from graft.gateway.dialects.dialect import DIALECTS
from graft.gateway.drawing import DrawnTurn
from graft.gateway.gateway import Gateway
from graft.gateway.request import RefusedRequest
from graft.models.tree.forest import Forest
from graft.rollout.batching import to_batch, trajectories_of
from graft.structure import FIRST_ROW_ID, Structure
from graft.text.chat import Chat
from graft.text.template import TEMPLATES
from graft.text.tokenizer import FastTokenizer
from graft.types import NO_ACTION, Author, Completion, Sampling
from tests.gateway.written_policy import WrittenPolicy, check_episodes

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "at": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 2},
        "note": {"type": "string", "maxLength": 3},
        "unit": {"enum": ["m", "km"]},
    },
    "required": ["unit", "at"],
    "additionalProperties": False,
}


def tool(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


TOOLS = (tool("go", SCHEMA), CALCULATOR, tool("stop", {"additionalProperties": False}))
STRICT = {"tools": TOOLS, "strict_tools": ("go", "stop")}
FUNCTION = {"name": "go", "strict": True, "parameters": {}}
OPENAI = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("dialect", "body", "strict"),
    [
        ("openai_chat", {**OPENAI, "tools": [{"type": "function", "function": FUNCTION}]}, ("go",)),
        ("openai_responses", {"input": "x", "tools": [{"type": "function", **FUNCTION}]}, ("go",)),
        (
            "openai_responses",
            {
                "input": "x",
                "tools": [
                    {
                        "type": "namespace",
                        "name": "a",
                        "tools": [FUNCTION, {**FUNCTION, "name": "b", "strict": None}],
                    }
                ],
            },
            ("a__go",),
        ),
        (
            "anthropic",
            {
                **OPENAI,
                "max_tokens": 9,
                "tools": [
                    {"name": "a", "input_schema": {}},
                    {"name": "go", "strict": True, "input_schema": {}},
                ],
            },
            ("go",),
        ),
    ],
)
def test_every_dialect_says_which_tools_are_strict(
    dialect: str, body: dict[str, Any], strict: tuple[str, ...]
) -> None:
    assert DIALECTS[dialect].read(body, {}).strict_tools == strict


def marked_gateway(*, special: bool, template: str | None = None, **settings: Any) -> Gateway:
    """A random policy of which every 266th token begins a call."""
    backend = FastTokenizer.bytes()._backend
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    add = backend.add_special_tokens if special else backend.add_tokens
    add(["<tool_call>", "</tool_call>"])
    names = {"eos_token": "<|im_end|>", "pad_token": "<pad>"}
    tokenizer = FastTokenizer(backend, names, {"default": TEMPLATES["chatml"]})
    how = {
        "formats": "strict",
        "sampling": Sampling(max_tokens=300),
        "max_context": 8192,
        **settings,
    }
    return Gateway(tiny_engine(tokenizer), Chat(tokenizer, template), **how)


def check_gap(gateway: Gateway, session: Any) -> None:
    """The learner's log-probs are the engine's, and what was forced is not trained."""
    rows = trajectories_of([session.forest.episode()])
    batch = to_batch(rows)
    decoder: Any = gateway.policy.engine
    with torch.no_grad():
        logp, _ = Forest(rows, batch.mask, torch.device("cpu")).logprobs(decoder.decoder)
    torch.testing.assert_close(logp[batch.mask], batch.logprobs[batch.mask], atol=1e-5, rtol=0)
    for span in (s for row in rows for s in row.spans if s.author is Author.POLICY):
        assert span.mask == [action != NO_ACTION for action in span.actions]


@pytest.mark.parametrize(
    ("choice", "special"), [("auto", False), ("auto", True), ("required", False), ("go", True)]
)
async def test_calls_of_a_random_policy_are_valid(choice: str, special: bool) -> None:
    gateway = marked_gateway(special=special)
    session = gateway.open(TASK)
    asked = [asks("x", seed=n, tool_choice=choice, **STRICT) for n in range(40)]
    answers = [one for (one,) in await asyncio.gather(*(session.answer(a) for a in asked))]
    calls = [call for one in answers for call in one.calls]
    valid = {f["function"]["name"]: f["function"]["parameters"] for f in TOOLS}
    for call in calls:
        fastjsonschema.validate({"type": "object"} | valid[call.name], json.loads(call.arguments))
    assert {call.name for call in calls} & {"go", "stop"}
    for one in answers:  # what is no call was cut, or has no mark
        assert one.calls or one.finish == "length" or "<tool_call>" not in one.content
    session.end()
    check_gap(gateway, session)
    spans = [s for s in session.forest.episode().spans if s.author is Author.POLICY]
    assert len(spans) == len(answers)  # a turn is one span
    if choice == "auto":  # free text before a call, and behind it
        free = [all(mode == 0 for mode in s.modes) for s in spans]
        assert set(free) == {True, False}
        held = [s for s, is_free in zip(spans, free, strict=True) if not is_free]
        assert all(s.modes[0] == 0 and max(s.modes) >= FIRST_ROW_ID for s in held)
    gateway.policy.engine.close()


CALL = '<tool_call>\n{"name": "go", "arguments": {"at": [1, 20], "unit": "km"}}\n</tool_call>'
ODD = CALL.replace("20]", '20], "note": "</t"')
FREE = '<tool_call>\n{"name": "add", "arguments": {"b": "</tool_call>"}}\n</tool_call>'
RULES = [
    ("", r"thought\?", f"<think>\nNo <tool_call> {{}}\n</think>\n\nSo {CALL}"),
    ("", r"both\?", f"Two. {CALL}\n{ODD} and {FREE} Done."),
    ("", r"stop\?", f"A{CALL}Halt, and more"),
    ("", r"many\?", f"{FREE}\n{CALL}"),
    ("", r"", "done"),
]


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = WrittenPolicy(monkeypatch, RULES, kv_tokens=1 << 14)
    yield made
    made.engine.close()


def talk(policy: WrittenPolicy, *requests: Any, **settings: Any) -> tuple[Any, list[Any]]:
    settings = {"formats": "strict", **settings}
    gateway = policy.gateway(max_context=9999, sampling=Sampling(max_tokens=999), **settings)
    session = gateway.open(TASK)

    async def ask() -> list[Any]:
        answers: list[Any] = []
        for request in requests:
            answers += await session.answer(request(answers[-1]) if answers else request)
        return answers

    answers = asyncio.run(ask())
    session.end()
    check_episodes(policy, [session.forest.episode()])
    return session, answers


def test_a_turn_goes_on_behind_its_calls_and_the_next_one_behind_it(policy: WrittenPolicy) -> None:
    session, (first, second) = talk(
        policy,
        asks("both?", logprobs=0, **STRICT),
        lambda one: asks("both?", said(one), "and?", **STRICT),
    )
    assert [one.name for one in first.calls] == ["go", "go", "add"]
    assert first.content == "Two.  and  Done." and first.finish == "tool_calls"
    assert len(first.logprobs) == len(first.tokens) == len(first.token_texts)
    assert second.content == "done" and len(session.contexts) == 1
    sampled = policy.samples[:-1]
    assert len(sampled) == 7  # free and held in turn, free at both ends


def test_a_mark_in_a_thought_begins_no_call(policy: WrittenPolicy) -> None:
    _, (one,) = talk(policy, asks("thought?", **STRICT))
    assert one.reasoning == "No <tool_call> {}" and len(one.calls) == 1


def test_an_answer_with_one_call_ends_with_it(policy: WrittenPolicy) -> None:
    _, (one,) = talk(policy, asks("many?", parallel_calls=False, **STRICT))
    assert json.loads(one.calls[0].arguments) == {"b": "</tool_call>"} and len(one.calls) == 1
    assert policy.tokenizer.decode(one.tokens).endswith("</tool_call>")


def test_stop_strings_and_budgets_count_over_the_whole_turn(policy: WrittenPolicy) -> None:
    _, (one,) = talk(policy, asks("stop?", stop=("Halt",), **STRICT))
    assert one.stop_string == "Halt" and len(one.calls) == 1 and one.content == "A"
    whole = len(one.tokens)
    for limit in (3, whole - 5, whole):
        policy.samples.clear()
        _, (cut,) = talk(policy, asks("stop?", max_tokens=limit, **STRICT))
        assert len(cut.tokens) == limit and cut.finish == "length"


@pytest.mark.parametrize(
    ("settings", "request_"),
    [
        ({"formats": "prompt"}, STRICT),
        ({"formats": "enforce"}, STRICT),
        ({}, {**STRICT, "tool_choice": "none"}),
        ({}, {**STRICT, "allowed": ("add",)}),
        ({}, {"tools": TOOLS}),
    ],
)
def test_without_need_nothing_is_held(
    policy: WrittenPolicy, settings: dict[str, Any], request_: dict[str, Any]
) -> None:
    talk(policy, asks("stop?", **request_), **settings)
    assert len(policy.samples) == 1 and not policy.samples[0].completion.masks


def test_where_calls_are_no_json_behind_a_mark_they_are_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bare = TEMPLATES["chatml"].replace("</tool_call>", "").replace("<tool_call>", "")
    gateway = marked_gateway(special=False, template=bare, sampling=Sampling(max_tokens=8))
    session = gateway.open(TASK)
    for text in "xy":
        asyncio.run(session.answer(asks(text, **STRICT)))
    told = [record for record in caplog.records if "strict" in record.getMessage()]
    assert len(told) == 1  # once
    gateway.policy.engine.close()


@pytest.mark.parametrize("schema", [{"properties": {"a": {"pattern": "(?=a)b"}}}, {"$ref": "#/x"}])
def test_a_schema_that_cannot_be_enforced_is_refused(
    policy: WrittenPolicy, schema: dict[str, Any]
) -> None:
    with pytest.raises(RefusedRequest) as refused:
        talk(policy, asks("x", tools=(tool("go", schema),), strict_tools=("go",)))
    assert (refused.value.kind, refused.value.param) == ("invalid", "tools")


def test_what_a_token_adds_to_a_mark_is_read_as_text_where_no_call_has_it(
    monkeypatch: pytest.MonkeyPatch, policy: WrittenPolicy
) -> None:
    """One token has the end of the mark and a bracket, which no call begins with."""
    whole = '<tool_call>[{"name": "go"}]</tool_call>'
    policy.rules.insert(0, ("", r"odd\?", whole))
    sample = NativeContext.sample

    async def overshoot(context: NativeContext, how: Sampling) -> Completion:
        if "<tool_call>" in how.stop:
            how = replace(how, stop=("[",))
        return await sample(context, how)

    monkeypatch.setattr(NativeContext, "sample", overshoot)
    monkeypatch.setattr(DrawnTurn, "_is_marked", lambda turn, at: at is not None)
    session, (one,) = talk(policy, asks("odd?", **STRICT))
    assert one.content == whole and not one.calls and one.finish == "stop"
    assert session.counts["malformed_calls"] == 1


async def test_other_sessions_go_on_while_a_schema_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = marked_gateway(special=True, sampling=Sampling(max_tokens=8))
    answered = threading.Event()

    def slow(engine: Any, structure: Structure) -> None:
        assert answered.wait(10)
        check_structure(engine, structure)

    monkeypatch.setattr(served, "check_structure", slow)
    waiting = asyncio.ensure_future(
        gateway.open(TASK).answer(asks("x", format=Structure.choice(["a", "b"])))
    )
    (other,) = await gateway.open(TASK).answer(asks("y"))
    assert other.tokens and not waiting.done()
    answered.set()
    (one,) = await waiting
    assert one.content in ("a", "b")
    monkeypatch.setattr(served, "MAX_SECONDS", 0.05)
    answered.clear()
    with pytest.raises(RefusedRequest, match=r"0\.05 s") as refused:
        await gateway.open(TASK).answer(asks("x", format=Structure.choice(["c"])))
    assert refused.value.param == "response_format"
    answered.set()
    gateway.policy.engine.close()


async def test_a_schema_that_many_wait_for_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = marked_gateway(special=True, sampling=Sampling(max_tokens=8))
    compiled: list[Structure] = []
    is_asked = threading.Event()

    def slow(engine: Any, structure: Structure) -> None:
        compiled.append(structure)
        assert is_asked.wait(10)
        check_structure(engine, structure)

    monkeypatch.setattr(served, "check_structure", slow)
    ask = asks("x", format=Structure.choice(["a", "b"]))
    monkeypatch.setattr(served, "MAX_SECONDS", 0.05)
    for _ in range(2):  # the second finds it under way
        with pytest.raises(RefusedRequest) as refused:
            await gateway.open(TASK).answer(ask)
        assert refused.value.param == "response_format"
    monkeypatch.setattr(served, "MAX_SECONDS", 20)
    waiting = [asyncio.ensure_future(gateway.open(TASK).answer(ask)) for _ in range(5)]
    await asyncio.sleep(0)
    is_asked.set()
    answers = await asyncio.gather(*waiting)
    assert all(one.content in ("a", "b") for (one,) in answers) and len(compiled) == 1
    gateway.policy.engine.close()


async def test_a_refusal_names_the_strict_tool_whose_schema_cannot_be_enforced() -> None:
    gateway = marked_gateway(special=True, formats="strict")
    tools = (*TOOLS, tool("odd", {"type": "object", "properties": {"a": {"not": {}}}}))
    with pytest.raises(RefusedRequest) as refused:
        await gateway.open(TASK).answer(asks("x", tools=tools, strict_tools=("go", "odd")))
    assert refused.value.param == "tools"
    assert "'odd'" in str(refused.value) and "REST" not in str(refused.value)
    with pytest.raises(RefusedRequest) as refused:
        await gateway.open(TASK).answer(
            asks("x", format=Structure.json({"not": {}}), tools=TOOLS, strict_tools=("go",))
        )
    assert refused.value.param == "response_format" and "REST" not in str(refused.value)
    gateway.policy.engine.close()

"""The messages of a request as chat templates read them, and arguments of any depth."""

from __future__ import annotations

import pytest
from dialect_kit import TOOL

from graft.gateway.canonical import names_of
from graft.gateway.dialects import openai_chat
from graft.gateway.rendering import template_messages
from graft.text.chat import Chat
from graft.text.syntax_probe import syntax_of
from graft.text.turn import read_turn
from graft.types import Message
from tests.text.text_calls import CALLING, tokenizer_of

ASK = {"role": "user", "content": "1+2?"}


def called(id: str, arguments: object, content: str = "") -> Message:
    call = {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def test_calls_have_numbers_for_ids():
    messages = [
        {"role": "system", "content": "a"},
        ASK,
        called("x", {"a": 1}),
        {"role": "tool", "content": "1", "tool_call_id": "x", "name": "add"},
        {"role": "system", "content": "b"},
        {**called("x", {"a": 2}), "reasoning_content": "hm"},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
        {"role": "tool", "content": "3", "tool_call_id": "other"},
    ]
    made = template_messages(messages, inner_system="user", has_channels=True)
    assert [one["role"] for one in made] == [
        "system", "user", "assistant", "tool", "user", "assistant", "tool", "tool"
    ]  # fmt: skip
    ids = [one["tool_calls"][0]["id"] for one in made if "tool_calls" in one]
    results = [one["tool_call_id"] for one in made if one["role"] == "tool"]
    assert ids == ["call00000", "call00001"] and results == [*ids, "call00000"]
    assert made[3]["name"] == "add" and made[5]["thinking"] == made[5]["reasoning_content"] == "hm"
    both = template_messages([{**called("x", {}, "So"), "reasoning_content": "hm"}], "user", True)
    assert "thinking" not in both[0]
    assert messages[2] == called("x", {"a": 1})  # they stay as they were


@pytest.mark.parametrize("name", CALLING)
def test_a_history_with_calls_is_a_prompt_in_every_template(name: str):
    chat = Chat(tokenizer_of(name))
    result = {"role": "tool", "content": "3", "tool_call_id": "x", "name": "add"}
    messages = template_messages([ASK, called("x", {"a": 1}), result], "user", name == "harmony")
    text = chat.tokenizer.decode(chat.prompt(messages, [TOOL] if name != "harmony" else None))
    assert "add" in text and "3" in text


@pytest.mark.parametrize("text", ["[" * 900 + "]" * 900, '{"a":' * 500 + "1" + "}" * 500])
def test_arguments_of_any_depth_have_a_name(text: str):
    """Neither a client nor the policy can make code that recurses fail."""
    wire = called("x", text)
    request = openai_chat.read({"messages": [ASK, wire]}, {})
    assert len(names_of(request.messages)) == 3
    syntax = syntax_of(Chat(tokenizer_of("chatml")))
    turn = read_turn(f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>', syntax)
    assert (turn.calls, turn.malformed) == ((), 1)

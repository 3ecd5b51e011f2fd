"""Chats in the forms in which they are published, all as the same messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from graft.data.chats import open_chats
from graft.data.conversations import SPEAKERS, chat_of, read_messages
from graft.data.errors import DataError
from tests.row_files import write_rows as write

SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [{"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"}]
TRACE = (
    "<think>I search.</think><search>Bern</search> <result>\nA city.\n</result><answer>ok</answer>"
)
SHAREGPT = {
    "conversations": [{"from": "human", "value": "2+3="}, {"from": "gpt", "value": "5"}],
    "system": "Be brief.",
}


@pytest.mark.parametrize("ending", [".parquet", ".jsonl"])
def test_the_three_forms_are_the_same_chat_in_one_file(tmp_path: Path, ending: str):
    rows = [
        {"messages": [SYSTEM, *CHAT]},
        SHAREGPT,
        {"instruction": "2+3=", "input": "", "output": "5", "system": "Be brief."},
    ]
    chats = open_chats(write(tmp_path / f"chats{ending}", rows))
    assert [chat.messages for chat in chats] == [[SYSTEM, *CHAT]] * 3


def test_every_speaker_has_a_role():
    call = json.dumps({"name": "search", "arguments": {"query": "Bern"}})
    values = {"human": "a", "function_call": call, "observation": "A city.", "gpt": "c"}
    entries = [{"from": speaker, "value": value} for speaker, value in values.items()]
    function = {"name": "search", "arguments": {"query": "Bern"}}
    assert chat_of({"conversations": entries}) == [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "content": "A city."},
        {"role": "assistant", "content": "c"},
    ]
    others = {"system": "s", "user": "u", "assistant": "v", "tool": "t"}
    entries = [{"from": speaker, "value": value} for speaker, value in others.items()]
    roles = [message["role"] for message in chat_of({"conversations": entries})]
    assert roles == ["system", "user", "assistant", "tool"]
    assert {*values, *others} == {*SPEAKERS}


def test_calls_made_at_once_stay_one_message():
    calls = json.dumps([{"name": "f", "arguments": {"x": 1}}, {"name": "g"}])
    entries = [{"from": "human", "value": "?"}, {"from": "function_call", "value": calls}]
    made = chat_of({"conversations": entries})[1]["tool_calls"]
    assert [call["function"] for call in made] == [
        {"name": "f", "arguments": {"x": 1}},
        {"name": "g", "arguments": {}},
    ]


def test_a_tool_trace_inside_the_assistants_text_stays_as_it_is():
    entries = [{"from": "human", "value": "Bern?"}, {"from": "gpt", "value": TRACE}]
    assert chat_of({"conversations": entries, "system": None})[1]["content"] == TRACE


def test_a_conversation_keeps_its_own_system_message():
    entries = [{"from": "system", "value": "Mine."}, *SHAREGPT["conversations"]]
    messages = chat_of({**SHAREGPT, "conversations": entries})
    assert messages == [{"role": "system", "content": "Mine."}, *CHAT]


def test_an_input_follows_its_instruction_on_the_next_line():
    row = {"instruction": "Add.", "input": "2+3=", "output": "5"}
    assert chat_of(row)[0]["content"] == "Add.\n2+3="


def test_keys_that_parquet_fills_with_none_are_left_out_and_arrays_are_lists():
    filled = [{**message, "name": None, "tool_calls": None} for message in CHAT]
    assert read_messages(numpy.array(filled, dtype=object)) == CHAT
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert "content" not in read_messages([CHAT[0], call])[1]


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


@pytest.mark.parametrize("ending", [".parquet", ".jsonl"])
def test_a_content_in_parts_is_the_text_of_its_parts(tmp_path: Path, ending: str):
    question = {"role": "user", "content": [part("2+", image_url=None), part("3=")]}
    row = {"messages": [question, {"role": "assistant", "content": [part("5")]}]}
    (chat,) = open_chats(write(tmp_path / f"chats{ending}", [row]))
    assert chat.messages == CHAT
    parts = numpy.array([part("2+"), part("3=")], dtype=object)  # as pandas has them
    assert read_messages([{"role": "user", "content": parts}]) == CHAT[:1]


PICTURE = {"role": "user", "content": [{"type": "image_url"}]}


def answered(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [CHAT[0], {"role": "assistant", "content": content, **more}]}


def sharegpt(*speakers: Any, value: Any = "x") -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": value} for speaker in speakers]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "Hi"}, "no list `messages` (found: text)"),
        ({"messages": 3}, "no list `messages` (found: messages)"),
        ({"messages": []}, "the list of messages is empty"),
        ({"messages": ["Hi"]}, "message 1 is str 'Hi'"),
        ({"messages": [{"role": "bot", "content": ""}]}, "message 1: role 'bot'"),
        (
            {"messages": [{"role": "user", "content": None}, CHAT[1]]},
            "message 1: `content` holds nothing",
        ),
        ({"messages": CHAT[:1]}, "no assistant message"),
        ({"messages": CHAT[1:]}, "starts with the assistant"),
        ({"messages": [*CHAT, CHAT[1]]}, "messages 2 and 3 are both from the assistant"),
        ({"messages": [PICTURE, CHAT[1]]}, "message 1: `content`: part 1 is image_url"),
        (answered([part("5"), "6"]), "message 2: `content`: part 2 is str '6'"),
        (answered([{"type": "text"}]), "message 2: `content`: part 1: `text` holds nothing"),
        (answered("a\ud800"), "message 2: `content`: character 2 is \\ud800"),
        (answered([part("ab"), part("\udc00")]), "message 2: `content`: character 3 is \\udc00"),
        (answered("5", reasoning_content="\ud800"), "message 2: `reasoning_content`: character 1"),
        (sharegpt("human", "gpt", value="b\ud83d"), "message 1: `content`: character 2 is \\ud83d"),
        ({"conversations": "Hi"}, "`conversations` holds str 'Hi'"),
        ({"conversations": []}, "the list of messages is empty"),
        ({"conversations": [1]}, "entry 1 has no `from` (found: int '1')"),
        ({"conversations": CHAT}, "entry 1 has no `from` (found: role, content)"),
        (sharegpt("human", "bing"), "entry 2: `from` is 'bing'"),
        (sharegpt("human", ["gpt"]), "entry 2: `from` is ['gpt']"),
        (sharegpt("human", "gpt", value=None), "entry 1: `value` holds nothing"),
        (sharegpt("human"), "no assistant message"),
        (sharegpt("gpt"), "starts with the assistant"),
        (sharegpt("human", "function_call"), "entry 2: `value` of a function_call"),
        (sharegpt("human", "function_call", value='{"x": 1}'), "entry 2: dict \"{'x': 1}\""),
        ({**SHAREGPT, "system": 3}, "`system` holds int '3'"),
        ({"instruction": "", "input": "", "output": "5"}, "`instruction` and `input` are empty"),
        ({"instruction": "?", "output": None}, "`output` holds nothing"),
        ({"instruction": "?", "output": "", "history": [["a", "b"]]}, "`history`"),
        ([1], "is list"),
    ],
)
def test_a_row_that_is_no_chat_is_named_with_its_entry(tmp_path: Path, row: Any, message: str):
    data = write(tmp_path / "chats.jsonl", [SHAREGPT, row])
    with pytest.raises(DataError) as caught:
        open_chats(data)
    assert str(caught.value).startswith(f"{data}, row 2")
    assert message in str(caught.value)


def test_bad_rows_of_a_parquet_file_are_named_too(tmp_path: Path):
    for number, (bad, message) in enumerate(
        (
            (sharegpt("human", "gpt", value=None), "entry 1: `value` holds nothing"),
            (sharegpt("human", "robot"), "entry 2: `from` is 'robot'"),
            (sharegpt("human"), "no assistant message"),
        )
    ):
        data = write(tmp_path / f"chats{number}.parquet", [SHAREGPT, bad])
        with pytest.raises(DataError) as caught:
            open_chats(data)
        assert f"chats{number}.parquet, row 2: {message}" in str(caught.value)

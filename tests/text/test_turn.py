"""The policy's turn as thought, content and calls, in the syntax of its chat template."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.text.call_opening import call_opening
from graft.text.call_readers import READERS
from graft.text.call_syntax import CallSyntax
from graft.text.chat import Chat
from graft.text.syntax_probe import syntax_of
from graft.text.turn import ReadTurn, read_turn, readings
from tests.text.text_calls import CALLING, template, tokenizer_of
from tests.text.text_families import marked
from tests.text.text_templates import INSTRUCT, SPECIAL, small_bpe

CHATS = {name: Chat(tokenizer_of(name)) for name in CALLING}
HERMES = syntax_of(CHATS["chatml"])
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
ASK = {"role": "user", "content": "go"}
TYPES = {"n": "integer", "r": "number", "s": "string", "b": "boolean", "l": "array", "o": "object"}
PARAMETERS = {"type": "object", "properties": {k: {"type": kind} for k, kind in TYPES.items()}}
NAMES = ("add", "look_up", "a.b-c")
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": PARAMETERS}}
    for name in NAMES
]


def test_a_turn_in_its_parts():
    assert CallSyntax("json", "<tool_call>", "</tool_call>", before="\n") == HERMES
    turn = read_turn(f"<think>\nhm\n</think>\n\nso\n{CALL}\n{CALL}", HERMES)
    assert (turn.reasoning, turn.content, turn.malformed) == ("hm", "so", 0)
    assert [(call.name, call.arguments) for call in turn.calls] == [("f", {"x": 1})] * 2
    assert turn.message()["tool_calls"][1] == {
        "id": "call00001",
        "type": "function",
        "function": {"name": "f", "arguments": {"x": 1}},
    }


def test_a_malformed_call_is_text_and_is_counted():
    text = f"a<tool_call>{{</tool_call>\n{CALL} b <tool_call>cut"
    turn = read_turn(text, HERMES)
    assert turn.content == "a<tool_call>{</tool_call> b <tool_call>cut"
    assert (len(turn.calls), turn.malformed) == (1, 2)


def test_a_thought_that_was_cut_off_is_no_content():
    thinking = replace(HERMES, is_thinking=True)
    assert read_turn("<think>so far", HERMES)[:2] == ("so far", "")
    assert read_turn("so far", thinking)[:2] == ("so far", "")
    assert read_turn("hm\n</think>\n\n5", thinking)[:2] == ("hm", "5")
    assert read_turn("I <think> so", HERMES)[:2] == ("", "I <think> so")


def test_marks_inside_an_argument_close_nothing():
    text = '<tool_call>{"name": "f", "arguments": {"x": "</tool_call><tool_call>"}}</tool_call>.'
    turn = read_turn(text, HERMES)
    assert turn.calls[0].arguments == {"x": "</tool_call><tool_call>"}
    assert (turn.content, turn.malformed) == (".", 0)


@pytest.mark.parametrize("name", CALLING)
def test_the_syntax_is_found_in_what_the_template_writes(name: str):
    syntax = syntax_of(CHATS[name])
    assert syntax.name == CALLING[name][1] and not syntax.unknown
    assert syntax.has_channels == (name == "harmony")


def test_marks_are_those_of_the_template():
    deepseek = syntax_of(CHATS["deepseek"])
    assert deepseek == CallSyntax(
        "named",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "```<｜tool▁call▁end｜>",
        outer=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        middle="```json",
    )
    assert syntax_of(CHATS["mistral named"]) == CallSyntax("named", "[TOOL_CALLS]", middle="[ARGS]")
    granite = CallSyntax("json", "<|tool_call|>", "<|/tool_call|>", is_list=True)
    assert syntax_of(CHATS["granite"]) == granite
    assert syntax_of(CHATS["llama"]) == CallSyntax("json")
    assert syntax_of(Chat(small_bpe(INSTRUCT))) == CallSyntax()
    assert syntax_of(Chat(small_bpe(), "plain")) == CallSyntax()


def test_a_syntax_that_is_not_known_is_named():
    template = CALLING["glm"][0].replace("arg_key", "odd_key").replace("tool_call>", "odd>")
    syntax = syntax_of(Chat(marked(template)))
    assert syntax.name == "" and "<odd_key>graft" in syntax.unknown
    assert read_turn(CALL, syntax).content == CALL


WORDS = st.text(alphabet="ab \n\"\\é{}[],:;'\u2028", max_size=8)
VALUES = {
    "n": st.integers(-999, 999),
    "r": st.floats(-9, 9, allow_nan=False).map(lambda value: round(value, 3) + 0.5),
    "s": WORDS | st.sampled_from(["1", "true", "null", '"x"', "[1]", "x: y"]),
    "b": st.booleans(),
    "l": st.lists(st.integers(0, 9) | WORDS | st.none(), max_size=3),
    "o": st.dictionaries(st.sampled_from("pq"), st.booleans() | WORDS, max_size=2),
}
ARGUMENTS = st.lists(st.sampled_from([*VALUES]), unique=True, max_size=4).flatmap(
    lambda names: st.fixed_dictionaries({name: VALUES[name] for name in names})
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)


def written(chat: Chat, message: dict[str, Any]) -> tuple[str, str]:
    """The text that the policy would have sampled for the message, and the whole text."""
    opened = chat.render([ASK], TOOLS, add_generation_prompt=True)
    whole = chat.render([ASK, message], TOOLS)
    assert whole.startswith(opened)
    return chat.borders.turn_end(whole)[0][len(opened) :], whole


def message_of(calls: list[tuple[str, dict[str, Any]]], content: str) -> dict[str, Any]:
    made = [
        {"id": f"call{i:05d}", "type": "function", "function": {"name": name, "arguments": given}}
        for i, (name, given) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def check(chat: Chat, calls: list[tuple[str, dict[str, Any]]], content: str) -> ReadTurn:
    """Calls in the template's own rendering are read as they were, and render as they did."""
    message = message_of(calls, content)
    text, whole = written(chat, message)
    syntax = syntax_of(chat)
    turn = read_turn(text, syntax, TOOLS)
    assert [(call.name, call.arguments) for call in turn.calls] == calls
    assert turn.malformed == 0
    again = [chat.render([ASK, reading], TOOLS) for reading in readings(text, syntax, TOOLS)]
    assert whole in again
    return turn


@pytest.mark.parametrize("name", [name for name in CALLING if "python" not in name])
@settings(max_examples=12)
@given(calls=CALLS, content=st.sampled_from(["", "So:", "Well, \u00e9"]))
def test_what_a_template_writes_is_read_back(name: str, calls: list[Any], content: str):
    is_single = name in ("llama", "harmony")
    content = "" if name == "bare list" else content  # such calls are all of a turn
    turn = check(CHATS[name], calls[:1] if is_single else calls, content)
    assert turn.content == ("" if is_single else content)


@pytest.mark.parametrize("name", CALLING)
def test_a_call_that_is_begun_for_the_policy_begins_as_the_template_writes_it(name: str):
    chat = CHATS[name]
    text, _ = written(chat, message_of([("look_up", {"s": "x"})], ""))
    anything, one = call_opening(chat), call_opening(chat, "look_up")
    assert text.startswith(one) and text.startswith(anything)
    assert len(anything) < len(one) < len(text) and "look_up" in one and "look_up" not in anything
    assert "x" not in one[one.index("look_up") :] and call_opening(chat, "a b") == ""


def test_only_calls_with_a_name_before_their_arguments_can_be_begun():
    late = template(
        "{{ m.tool_calls[0].function.arguments | tojson + m.tool_calls[0].function.name }}"
    )
    assert call_opening(Chat(marked(late))) == call_opening(Chat(small_bpe(), "plain")) == ""


def test_python_s_syntax():
    chat = CHATS["python"]
    values = {"n": -1, "s": "a\u2028'b\"", "l": [None, True, {"p": 0.5}]}
    turn = check(chat, [("add", values), ("look_up", {})], "So:")
    assert turn.content == "So:"
    check(CHATS["bare python"], [("add", values), ("look_up", {})], "")
    bare = syntax_of(CHATS["bare python"])
    assert read_turn("[1] and [add(a=1)]", bare).content == "[1] and [add(a=1)]"
    syntax = syntax_of(chat)
    for broken in (
        "add(1)",
        "[add(a=b)]",
        "[add(**x)]",
        "[1]",
        "add(a=1",
        "[f(a=1e999)]",
        "(" * 999,
    ):
        text = f"<|tool_call_start|>{broken}<|tool_call_end|>"
        assert read_turn(text, syntax) == ("", text, (), 1)


def test_llama_s_calls_are_the_whole_turn():
    syntax = syntax_of(CHATS["llama"])
    one = '{"name": "f", "parameters": {"x": 1}}'
    for text in (one, f"<|python_tag|>{one}", f"{one}; {one}", f"\n{one}\n"):
        turn = read_turn(text, syntax)
        assert {(call.name, str(call.arguments)) for call in turn.calls} == {("f", "{'x': 1}")}
        assert len(turn.calls) == text.count("name") and turn.content == ""
    assert read_turn('{"a": 1}', syntax) == ("", '{"a": 1}', (), 0)
    for text in (f"{one} so", '{"name": "f", ', "<|python_tag|>print(1)"):
        assert read_turn(text, syntax) == ("", text, (), 1)


def test_gemma_s_thoughts_and_calls():
    syntax = syntax_of(CHATS["gemma"])
    text = '<|channel>thought\nhm\n<channel|>So<|tool_call>call:f{a:None,b:{c:<|"|>x:{1}<|"|>}}<tool_call|>'
    turn = read_turn(text, syntax)
    assert (turn.reasoning, turn.content) == ("hm", "So")
    assert [(call.name, call.arguments) for call in turn.calls] == [
        ("f", {"a": None, "b": {"c": "x:{1}"}})
    ]
    assert read_turn("<|tool_call>call:f{a:}<tool_call|>", syntax).malformed == 1


def test_channels():
    syntax = syntax_of(CHATS["harmony"])
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>So."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    )
    turn = read_turn(text + '{"x": 1}', syntax)
    assert (turn.reasoning, turn.content, turn.malformed) == ("hm", "So.", 0)
    assert [(call.name, call.arguments) for call in turn.calls] == [("f", {"x": 1})]
    broken = read_turn(text + '{"x": ', syntax)
    assert broken.calls == () and broken.malformed == 1 and broken.content.endswith('{"x": ')
    plain = read_turn(text + '{"x": 1}', replace(syntax, name=""))
    assert (plain.reasoning, plain.content, plain.calls) == ("hm", 'So.{"x": 1}', ())
    assert read_turn("no channel", syntax).content == "no channel"


@pytest.mark.parametrize(
    "schema, text, value",
    [
        ({"type": "string"}, "1", "1"),
        ({"type": "integer"}, "1", 1),
        ({"type": "integer"}, "one", "one"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "true", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "1", "1"),
        ({"type": "array"}, '["a"]', ["a"]),
        (None, '{"a": 1}', {"a": 1}),
        (None, '"a"', '"a"'),
        (None, "True", "True"),
        ("odd", "5", 5),
    ],
)
def test_values_without_quotes_have_the_type_of_the_schema(schema: Any, text: str, value: Any):
    parameters = {"properties": {"x": schema}}
    tools = [{"function": {"name": "f", "parameters": parameters if schema else None}}]
    called = f"<tool_call><function=f><parameter=x>{text}</parameter></function></tool_call>"
    (call,) = read_turn(called, syntax_of(CHATS["qwen coder"]), tools).calls
    assert call.arguments == {"x": value}


SYNTAXES = [*dict.fromkeys(syntax_of(chat) for chat in CHATS.values())]
MARKS = sorted({m for s in SYNTAXES for m in (s.open, s.close, s.middle, *s.outer) if m})
FRAGMENTS = [
    *MARKS,
    *["<think>", "</think>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "analysis", "f"],
    *["<function=f>", "</function>", "<parameter=x>", "</parameter>", "<arg_key>", "</arg_key>"],
    *["<arg_value>", "</arg_value>", '{"name": "f", "arguments": {"x": 1}}', "to=functions.f"],
    *['{"x":', '"', "{", "}", "[", "]", "(", ")", ",", ";", "1", "\\", " ", "\n", "\x00", "\ud800"],
]


@settings(max_examples=40)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=20).map("".join))
def test_no_text_raises_and_nothing_is_lost(text: str):
    for syntax in SYNTAXES:
        turn = read_turn(text, syntax, TOOLS)
        spans = [(call.start, call.end) for call in turn.calls]
        assert spans == sorted(spans) and turn.malformed >= 0
        for call in turn.calls:
            json.dumps(call.arguments).encode()
        list(readings(text, syntax, TOOLS))


@pytest.mark.slow
@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda syntax: f"{syntax.name} {syntax.open}")
def test_long_texts_are_read_in_linear_time(syntax: CallSyntax):
    for unit in {syntax.open, f'{syntax.open}{{"', f"{syntax.open}f{syntax.middle}{{", *FRAGMENTS}:
        if unit:
            read_turn(unit * (30_000 // len(unit)) + syntax.close, syntax)
            read_turn(f"{syntax.open}<function=f>{unit * (30_000 // len(unit))}", syntax)


def test_every_reader_has_a_template():
    assert {syntax.name for syntax in SYNTAXES} == {*READERS, "channels"}


@pytest.mark.peer
@pytest.mark.slow
def test_the_templates_of_trl():
    """Templates of published models: calls are read back, or the syntax is named as unknown."""
    trl = pytest.importorskip("trl")
    calls = [("add", {"n": 1, "s": 'x"y', "l": [1, None, {"p": True}]}), ("look_up", {})]
    known: dict[str, int] = {}
    for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        text = path.read_text()
        marks = set(
            re.findall(r"<\|[^|<>\s]{1,30}\|?>|<[a-z_]{1,30}\|>|<｜[^｜]{1,30}｜>", text)
        ) - {*SPECIAL}
        try:
            chat = Chat(marked(text, special=sorted(marks)))
        except ValueError:  # reads pictures, or drops turns
            continue
        syntax = syntax_of(chat)
        known[syntax.name] = known.get(syntax.name, 0) + 1
        if not syntax.name:
            continue
        try:
            turn, _ = written(chat, message_of(calls, ""))
            made = calls
        except ValueError:  # one call only
            turn, _ = written(chat, message_of(calls[:1], ""))
            made = calls[:1]
        except AssertionError:  # a prompt that ends with an empty thought
            continue
        read = read_turn(turn, syntax, TOOLS)
        wanted = made[: len(read.calls)] if syntax.name == "channels" else made
        assert [(call.name, call.arguments) for call in read.calls] == wanted, path.name
    assert known["json"] > 5 and known["parameters"] > 5 and known["named"] > 0
    assert (
        known["gemma"] > 3
        and known["arg_keys"] > 0
        and known["channels"] > 0
        and known["python"] > 0
    )

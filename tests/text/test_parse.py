"""Reading a model's text: hand-worked cases, and no input that raises or takes forever."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.registry import UnknownName
from graft.text.calls import tool_calls
from graft.text.parse import (
    code_blocks,
    last_boxed,
    last_number,
    last_tag,
    tags,
)

LONG = 60_000  # characters; with quadratic time the suite's own limit strikes


def test_tags_come_in_the_order_they_open():
    text = "<think>a <answer>1</answer> b</think> <answer>2</answer>"
    found = tags(text, ["answer", "think"])
    assert [(tag.name, tag.content) for tag in found] == [
        ("think", "a <answer>1</answer> b"),
        ("answer", "1"),
        ("answer", "2"),
    ]
    assert [text[tag.start : tag.end] for tag in found][1] == "<answer>1</answer>"


def test_without_names_every_tag_counts():
    assert [tag.name for tag in tags("<a>1</a><b-2>2</b-2><c d>3</c d>")] == ["a", "b-2"]


@pytest.mark.parametrize(
    "text, content",
    [
        ("<answer> 4 </answer> then <answer>5</answer>", "5"),
        ("<answer>4</answer> then <answer>5", "4"),
        ("<answer>4<answer>5</answer>", "5"),
        ("</answer>4<answer>", None),
        ("<answer>4</answer> junk </answer>", "4"),
        ("", None),
    ],
)
def test_the_last_closed_tag_wins(text: str, content: str | None):
    assert last_tag(text, "answer") == content


def test_a_tag_name_is_not_a_pattern():
    assert last_tag("<axb>1</axb><a.b>2</a.b>", "a.b") == "2"


@pytest.mark.parametrize(
    "text, content",
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} and \fbox{2}", "2"),
        (r"\boxed {3}", "3"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{a \\}", r"a \\"),
        (r"\boxed{1} \boxed{2", None),
        (r"boxed{1}", None),
        (r"\boxed{}", ""),
    ],
)
def test_boxed_answers(text: str, content: str | None):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    "text, last",
    [
        ("about 1,234.5 m", "1234.5"),
        ("5-3 = 2, so x = -2.", "-2"),
        ("1,2,3", "3"),
        ("12345,678", "678"),
        ("costs $-.5", "-.5"),
        ("or +3e2", "3e2"),
        ("\u22127 degrees", "-7"),
        ("(4)-1", "1"),
        ("none", None),
    ],
)
def test_numbers(text: str, last: str | None):
    assert last_number(text) == last


def test_fenced_blocks():
    text = "First ```python\nprint(1)\n```\nthen\n  ~~~\n a```\n  ~~~\nand ```x``` inline\n```\ncut"
    blocks = code_blocks(text)
    assert [(b.language, b.code) for b in blocks] == [("python", "print(1)\n"), ("", " a```\n")]
    assert text[blocks[0].start : blocks[0].end] == "```python\nprint(1)\n```"
    assert [b.code for b in code_blocks(text, "python")] == ["print(1)\n"]


def test_a_longer_fence_holds_a_shorter_one_and_may_close_after_code():
    assert [b.code for b in code_blocks("````md\n```\nx\n```\n````")] == ["```\nx\n```\n"]
    assert [b.code for b in code_blocks("```py\nprint(1)```\nbye")] == ["print(1)"]


def test_tag_and_fenced_calls_carry_their_content():
    tagged = tool_calls("<think>no</think><python>1+1</python>", "tags", ["python"])
    assert [(call.name, call.content, call.error) for call in tagged] == [("python", "1+1", "")]
    fenced = tool_calls("```python\n1+1\n```\n```sh\nls\n```", "fenced", ["python"])
    assert [(call.name, call.content) for call in fenced] == [("python", "1+1\n")]


def test_hermes_calls_accept_arguments_as_object_and_as_text():
    text = (
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
        '<tool_call>{"name": "g", "arguments": "{\\"y\\": 2}"}</tool_call>'
        '<tool_call>{"name": "h"}</tool_call>'
    )
    calls = tool_calls(text, "hermes")
    assert [(c.name, c.arguments) for c in calls] == [("f", {"x": 1}), ("g", {"y": 2}), ("h", {})]
    assert [call.name for call in tool_calls(text, "hermes", ["g"])] == ["g"]


@pytest.mark.parametrize(
    "body, why",
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"arguments": {}}', '"name"'),
        ('{"name": "f", "arguments": [1]}', '"arguments" must be a JSON object'),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "not valid JSON"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', "surrogates"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_broken_hermes_call_is_kept_with_its_reason(body: str, why: str):
    (call,) = tool_calls(f"<tool_call>{body}</tool_call>", "hermes", ["f"])
    assert why in call.error and call.arguments == {}


def test_an_unknown_style_is_the_programs_fault():
    with pytest.raises(UnknownName, match="known: fenced, gem, hermes, mcp, tags"):
        tool_calls("", "xml")


def test_openais_own_form_and_llamas_are_hermes_calls_too():
    text = (
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": "{}"}}</tool_call>'
        '<tool_call>{"name": "g", "parameters": {"x": 1}}</tool_call>'
    )
    assert [(c.name, c.arguments) for c in tool_calls(text, "hermes")] == [
        ("f", {}),
        ("g", {"x": 1}),
    ]


@pytest.mark.parametrize(
    "text, name, content, rest",
    [
        ("a <python> 1+1 </python> b", "python", "1+1", " b"),
        ("```python\n1\n``` then <python>2</python>", "python", "1", " then <python>2</python>"),
        ("<python>1</python> then ```python\n2\n```", "python", "1", " then ```python\n2\n```"),
        ("<python>```python\n1\n```</python>", "python", "1", "</python>"),  # ends first
        ("```python print(1)```", "python", "print(1)", ""),
        ("```\npython\n1```", "python", "1", ""),
        ("<search>q</search><python>1</python>", "search", "q", "<python>1</python>"),
        ("<python>'<search>q</search>'</python>", "python", "'<search>q</search>'", ""),
        ("<python>1 <search>q</search>", "search", "q", ""),  # what never closes is no call
        ("</python><python>", None, "", ""),
        ("```pythonic\n1\n```", None, "", ""),
        ("```python\n1", None, "", ""),
        ("", None, "", ""),
    ],
)
def test_gems_rule_takes_the_first_call_as_tag_or_fence(
    text: str, name: str | None, content: str, rest: str
):
    calls = tool_calls(text, "gem", ["python", "search"])
    if name is None:
        assert calls == []
    else:
        (call,) = calls
        assert (call.name, call.content, text[call.end :]) == (name, content, rest)
    assert calls == tool_calls(text, "gem")


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_a_call_is_found_in_any_text_around_it(before: str, content: str, after: str):
    (call,) = tool_calls(f"{before}<t>{content}</t>{after}", "gem", ["t"])
    assert (call.content, call.end) == (content.strip(), len(before) + len(content) + 7)


def test_gems_mcp_form():
    text = 'so <tool_call> <tool_name> f </tool_name>\n<arguments>\n{"x": 1}\n</arguments></tool_call>.'
    (call,) = tool_calls(text, "mcp")
    assert (call.name, call.arguments, call.error, text[call.end :]) == ("f", {"x": 1}, "", ".")


@pytest.mark.parametrize(
    "body, why",
    [
        ("<arguments>{}</arguments>", "needs <tool_name>"),
        ("<tool_name>f</tool_name>", "needs <arguments>"),
        ("<tool_name>f</tool_name><arguments>[1]</arguments>", "must be a JSON object"),
        ("<tool_name>f</tool_name><arguments>{'x'}</arguments>", "not valid JSON"),
        ("<tool_name>f</tool_name><arguments>" + "[" * 100_000 + "</arguments>", "too deeply"),
    ],
)
def test_a_broken_mcp_call_is_kept_with_its_reason(body: str, why: str):
    (call,) = tool_calls(f"<tool_call>{body}</tool_call>", "mcp", ["g"])
    assert why in call.error and call.arguments == {}


WORDS = ["<a>", "</a>", "<tool_call>", "</tool_call>", "```", "~~~", "1,234", "e5", "\\boxed{"]
FRAGMENTS = st.sampled_from([*WORDS, '{"name": "f"}', *"`{}\\-., \né\x00\ud800"])


@given(st.lists(FRAGMENTS | st.text(max_size=4), max_size=40).map("".join))
def test_no_text_makes_a_parser_raise(text: str):
    for tag in tags(text):
        assert text[tag.start : tag.end] == f"<{tag.name}>{tag.content}</{tag.name}>"
    for block in code_blocks(text):
        assert block.code in text[block.start : block.end]
    boxed = last_boxed(text)
    assert boxed is None or f"{{{boxed}}}" in text
    number = last_number(text)
    assert number is None or not math.isnan(float(number))
    for style in ("tags", "hermes", "fenced", "mcp"):
        starts = [call.start for call in tool_calls(text, style)]
        assert starts == sorted(starts)
    for call in tool_calls(text, "gem", ["a", "tool_call"]):
        assert call.content in text[call.start : call.end]
    last_tag(text, "a")


@pytest.mark.parametrize(
    "unit",
    [*WORDS, *"`~<{\\1-. \n", "```x", "~~~a`", "```\n", "1,", "1e", "<a></a>", "<a>{</a>"],
)
def test_long_texts_are_read_in_linear_time(unit: str):
    text = unit * (LONG // len(unit)) + "`"
    for parse in (last_boxed, last_number):
        parse(text)
    for style in ("tags", "hermes", "fenced", "mcp"):
        tool_calls(text, style)
    tool_calls(text, "gem", ["a", "x", "tool_call"])

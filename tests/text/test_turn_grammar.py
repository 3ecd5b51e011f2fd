"""Turns whose text is structured: which thoughts, calls and texts the grammar accepts."""

from __future__ import annotations

import random
from typing import Any

import fastjsonschema
import pytest
import tokenizers

from graft.actions.matcher import StructureCompiler
from graft.structure import Structure, StructureError, allowed_by
from graft.text.call_opening import CallPieces, call_pieces
from graft.text.call_syntax import CallSyntax
from graft.text.chat import Chat
from graft.text.syntax_probe import syntax_of
from graft.text.template import TEMPLATES
from graft.text.tokenizer import FastTokenizer
from graft.text.turn import read_turn
from graft.text.turn_grammar import call_rules, call_structure, may_think, turn_structure
from tests.text.text_calls import CALLING, tokenizer_of

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SYNTAX = CallSyntax("json", "<tool_call>", "</tool_call>")
FOUR = Structure.json(
    {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"]}
)


def byte_tokenizer(*special: str, plain: tuple[str, ...] = ()) -> FastTokenizer:
    backend = FastTokenizer.bytes()._backend
    backend.add_special_tokens([*special])
    backend.add_tokens([tokenizers.AddedToken(text, special=False) for text in plain])
    return FastTokenizer(backend, {"eos_token": "<eos>"}, {"default": TEMPLATES["chatml"]})


def accepts(structure: Structure, tokenizer: FastTokenizer, text: str) -> bool:
    """Whether a whole turn may be this text."""
    compiler = StructureCompiler(tokenizer, tokenizer.vocab_size)
    matcher = compiler.matcher(structure, frozenset(tokenizer.eos_ids))
    try:
        matcher.write(tokenizer.encode(text))
    except StructureError:
        return False
    return matcher.state.is_accepting()


MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.mark.parametrize("marks", [{}, {"special": MARKS}, {"plain": MARKS}])
@pytest.mark.parametrize(
    ("text", "when"),
    [
        ('{"v": 4}', {"", "think", "call"}),
        ('{"v": "4"}', set[str]()),
        ('<think>a {"x" <b</think>\n\n{"v": 4}', {"think"}),
        ("<think>only a thought", set[str]()),
        ("<think>a</think>no", set[str]()),
        (CALL, {"call"}),
        (f"{CALL}\n{CALL}", {"call"}),
        (f'{{"v": 4}}{CALL}', set[str]()),
        ("I think it is 4", set[str]()),
    ],
)
def test_a_turn_is_a_thought_and_a_text_or_calls(
    text: str, when: set[str], marks: dict[str, tuple[str, ...]]
) -> None:
    tokenizer = byte_tokenizer(*marks.get("special", ()), plain=marks.get("plain", ()))
    for name in ("", "think", "call"):
        how: dict[str, Any] = {"may_think": name == "think", "may_call": name == "call"}
        structure = turn_structure(FOUR, SYNTAX, tokenizer, **how)
        assert accepts(structure, tokenizer, text) is (name in when), name
    both = turn_structure(FOUR, SYNTAX, tokenizer, may_think=True, may_call=True)
    assert accepts(both, tokenizer, text) is bool(when)


def test_a_thought_that_the_prompt_has_begun_is_ended_first() -> None:
    tokenizer = byte_tokenizer()
    syntax = CallSyntax("json", "<tool_call>", "</tool_call>", is_thinking=True)
    structure = turn_structure(FOUR, syntax, tokenizer, may_think=True, may_call=False)
    assert accepts(structure, tokenizer, 'so</think>\n{"v": 4}')
    assert not accepts(structure, tokenizer, '{"v": 4}')


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        (Structure.regex("[0-9]+/[0-9]+"), "1/23", "1/"),
        (Structure.choice(["yes", 'no "x"']), 'no "x"', "maybe"),
        (Structure.lark('start: "a" b\nb: "b"+'), "abb", "b"),
        (Structure.json(True), '["any", 1]', "any"),
    ],
)
def test_every_kind_of_structure_may_stand_beside_calls(
    text: Structure, good: str, bad: str
) -> None:
    tokenizer = byte_tokenizer()
    structure = turn_structure(text, SYNTAX, tokenizer, may_think=False, may_call=True)
    assert accepts(structure, tokenizer, good) and accepts(structure, tokenizer, CALL)
    assert not accepts(structure, tokenizer, bad)
    assert turn_structure(text, SYNTAX, tokenizer, may_think=False, may_call=False) == text


@pytest.mark.parametrize("marks", [{}, {"special": MARKS}, {"plain": MARKS}])
def test_calls_of_strict_tools_have_valid_arguments(marks: dict[str, tuple[str, ...]]) -> None:
    tokenizer = byte_tokenizer(*marks.get("special", ()), plain=marks.get("plain", ()))
    pieces = call_pieces(Chat(tokenizer), SYNTAX)
    assert pieces == CallPieces('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")
    schemas = {"add": {"properties": {"a": {"type": "integer"}}}, "say": {"const": {"b": "x"}}}
    assert pieces is not None
    held = call_rules(pieces, SYNTAX, tokenizer, schemas)
    call = call_structure(held, SYNTAX, tokenizer)
    turn = turn_structure(FOUR, SYNTAX, tokenizer, may_think=False, may_call=True, held=held)
    wrong = CALL.replace("1", "true"), CALL.replace("add", "sub"), CALL.replace('a"', 'a" ')
    said = CALL.replace("add", "say").replace('{"a": 1}', '{"b": "x"}')
    for text in (CALL, said):
        assert accepts(call, tokenizer, text) and accepts(turn, tokenizer, text)
    for text in wrong:
        assert not accepts(call, tokenizer, text) and not accepts(turn, tokenizer, text)
    two = f"{CALL}\n{said}"
    assert accepts(turn, tokenizer, two) and not accepts(call, tokenizer, two)
    if not marks:  # a mark of several tokens, of which the first has the end of another text
        assert accepts(call, tokenizer, f"So {CALL}") and not accepts(turn, tokenizer, f"So {CALL}")


def test_a_call_without_a_mark_is_an_object_with_a_name() -> None:
    tokenizer = byte_tokenizer()
    structure = turn_structure(FOUR, CallSyntax("json"), tokenizer, may_think=False, may_call=True)
    assert accepts(structure, tokenizer, '{"name":"add","parameters":{"a":1}}')
    assert accepts(structure, tokenizer, '{"v": 4}')


def test_channels_are_refused() -> None:
    with pytest.raises(StructureError, match="channels"):
        turn_structure(
            FOUR, CallSyntax(has_channels=True), byte_tokenizer(), may_think=False, may_call=False
        )


def test_only_a_vocabulary_with_the_marks_may_think() -> None:
    found = [
        may_think(chat := Chat(tokenizer), syntax_of(chat))
        for tokenizer in (byte_tokenizer(), byte_tokenizer(plain=("<think>", "</think>")))
    ]
    assert found == [False, True]


def test_random_calls_are_read_in_the_syntax_of_their_template() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2.5, None]}, "s": {"type": "string", "maxLength": 3}},
        "required": ["s", "n"],
        "additionalProperties": False,
    }
    held = set[str]()
    for name in CALLING:
        tokenizer: Any = tokenizer_of(name)
        chat = Chat(tokenizer)
        syntax = syntax_of(chat)
        if (pieces := call_pieces(chat, syntax)) is None:
            continue
        held.add(name)
        rules = call_rules(pieces, syntax, tokenizer, {"go": schema, "do": schema})
        structure = call_structure(rules, syntax, tokenizer)
        compiler = StructureCompiler(tokenizer, tokenizer.vocab_size)
        for seed in range(3):
            draw, matcher = random.Random(seed), compiler.matcher(structure, frozenset())
            tokens = tokenizer.encode(f"So {syntax.open}" if seed else syntax.open)
            matcher.write(tokens)
            tokens += matcher.force()
            while not matcher.is_over:
                row = allowed_by(matcher.draw().bits, tokenizer.vocab_size)
                tokens.append(draw.choice(row.nonzero()[0].tolist()))
                matcher.write(tokens[-1:])
                tokens += matcher.force()
            read = read_turn(tokenizer.decode(tokens), syntax)
            (call,) = read.calls
            assert call.name in ("go", "do") and not read.malformed
            fastjsonschema.validate(schema, call.arguments)
    assert held == {"chatml", "qwen3", "thinking", "mistral named", "deepseek"}


@pytest.mark.parametrize(
    ("text", "fits", "others"),
    [
        (Structure.lark('start: "a" | "b" start'), "bba", "b" + CALL),
        (Structure.lark('start : answer\nanswer: REST\nREST: "}" | "x"'), "}", "y"),
        (Structure.lark('?start: calls\ncalls: "a"'), "a", "b"),
        (Structure.regex("a\\/b"), "a/b", "a\\/b"),
        (Structure.regex("[/]{2}/"), "///", "//"),
    ],
)
def test_names_and_slashes_of_a_structure_are_its_own_beside_calls(
    text: Structure, fits: str, others: str
) -> None:
    tokenizer = byte_tokenizer(*MARKS)
    turn = turn_structure(text, SYNTAX, tokenizer, may_think=True, may_call=True)
    for structure in (text, turn):
        assert accepts(structure, tokenizer, fits)
        assert not accepts(structure, tokenizer, others)
    assert accepts(turn, tokenizer, CALL) and accepts(turn, tokenizer, f"<think>a</think>{fits}")

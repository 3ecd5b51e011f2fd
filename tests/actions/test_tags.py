"""Tools in tags: where a tag of several tokens is recognised, and what is allowed inside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.actions.actions import Actions, load_actions
from graft.text.tokenizer import FastTokenizer
from graft.types import NO_ACTION
from tests.actions.pieces import Pieces

PIECES = Pieces()
LETTERS = FastTokenizer.characters("<>/ab x123")
FILE = """
style: tags
tools:
  - name: one
    entry: ["<a<a>", " <a<a>", "<<b>"]
    exit: "</a>"
    words: ["<"]
    syntax: {arguments: {take: [items, items], between: "x", distinct: true}}
    groups: [{name: items, actions: ["1", "2", "3"]}]
  - name: two
    entry: "<a<b>"
    exit: "/b>"
    words: ["<a<b"]
    syntax: {arguments: {take: [items]}}
    groups: [{name: items}]
"""


@pytest.fixture(scope="module")
def actions(tmp_path_factory) -> Actions:
    path: Path = tmp_path_factory.mktemp("files") / "overlapping.yaml"
    path.write_text(FILE)
    return load_actions(str(path), LETTERS)


ENTRIES = {"<a<a>": "one", " <a<a>": "one", "<<b>": "one", "<a<b>": "two"}
EXITS = {"one": "</a>", "two": "/b>"}


def last_end(text: str, part: str) -> int:
    found = text.rfind(part)
    return -1 if found < 0 else found + len(part)


def inside(text: str) -> tuple[str, str] | None:
    """The tool whose entry ends later than any exit, and what was written since."""
    end, tag = max((last_end(text, tag), tag) for tag in ENTRIES)
    if end <= max(last_end(text, closing) for closing in EXITS.values()):
        return None
    return ENTRIES[tag], text[end:]


def expected(text: str) -> set[str]:
    """What may be drawn after this text, as characters."""
    found = inside(text)
    if found is None:
        return {LETTERS.decode([i]) for i in range(LETTERS.vocab_size)}
    tool, written = found
    items = {"1", "2", "3"} - set(written)
    if (tool, written.replace("x", "")) not in (("one", ""), ("two", "")) and not (
        tool == "one" and len(written) == 2
    ):
        items = set()
    return items | {EXITS[tool][0]}


@settings(max_examples=300)
@given(draws=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 9)), max_size=40))
def test_the_modes_follow_a_scan_of_the_whole_text(actions: Actions, draws):
    mode, text = actions.grammar.start, ""
    likely = list(ENTRIES)
    queue: list[str] = []
    for draw, choice in draws:
        offered = [LETTERS.decode([i]) for i in np.flatnonzero(actions.space.row(mode))]
        assert set(offered) == expected(text), text
        if inside(text) is None:  # mostly parts of tags, else none would ever be met
            queue = queue or list(likely[draw % 4][: 1 + choice] if choice < 8 else "x<a"[draw % 3])
            character = queue.pop(0)
        else:
            queue = []
            character = sorted(offered)[draw % len(offered)]
        token = LETTERS.encode(character)[0]
        written = LETTERS.decode(actions.grammar.written(mode, token))
        assert actions.grammar.is_exit(mode, token) == (
            inside(text) is not None and character == EXITS[inside(text)[0]][0]
        )
        mode = actions.grammar.step(mode, token)
        text += written


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ("<a<a>", "one"),
        ("<a<a<a>", "one"),  # the second "<a" begins anew
        ("<a<<a<a>", "one"),
        ("<a<a<b>", "two"),
        ("<<a<b>", "two"),
        ("<<<b>", "one"),
        ("<a<<b>", "one"),
        ("x <a<a>", "one"),
        ("<a>", None),
        ("<ax<a>", None),
        ("<a<a", None),
        ("<b>", None),
    ],
)
def test_an_entry_is_spotted_however_it_begins(actions: Actions, text, tool):
    tokens = LETTERS.encode(text)
    mode = actions.grammar.walk([*tokens, 0])[-1]
    found = [entry.tool for entry in actions.tool_entries if mode in entry.modes]
    assert found == ([tool] if tool else [])


def test_modes_of_a_small_tag_by_hand():
    actions = load_actions("compact-tags", FastTokenizer.characters("0123456789+-*=[];"))
    assert actions.space.num_modes == 5  # text; start, operator, zero, number
    actions = load_actions("sorting-tags", PIECES, tools=["compare"])
    # " <compare>" and "<compare>": 3 tokens each, so 1 + 2 + 2 modes of text
    rows = actions.space.allowed
    assert rows[:5].all() and not rows[5:].all(axis=1).any()
    assert len(rows) == 5 + 3  # no argument yet, one, both
    entry = actions.entry("compare")
    assert PIECES.decode(entry.tokens) == " <compare>"
    assert entry.actions == entry.tokens
    assert entry.modes == [0, 1, 2] and entry.mode == 5
    assert actions.words("compare") == PIECES.encode(" <compare")


def test_the_closing_tag_is_one_decision_and_always_allowed():
    actions = load_actions("sorting-tags", PIECES)
    done = actions.spell("swap", ("A", "B"))
    a, comma, b, closing, name, end = PIECES.encode(" A, B </swap>")
    assert done.tokens[3:] == [a, comma, b, closing, name, end]
    assert done.actions[3:] == [a, NO_ACTION, b, closing, NO_ACTION, NO_ACTION]
    entry = actions.tool_entries[1]
    assert entry.tool == "swap"
    for mode in entry.modes:
        assert actions.space.allows(mode, closing)
        assert actions.grammar.is_exit(mode, closing)
        assert actions.grammar.written(mode, closing) == (closing, name, end)
        assert actions.grammar.step(mode, closing) == 0
    full = done.modes[-1]
    assert np.flatnonzero(actions.space.row(full)).tolist() == [closing]


def test_closing_tags_mean_nothing_in_free_text():
    actions = load_actions("sorting-tags", PIECES)
    closing = PIECES.encode(" </")[0]
    assert not actions.grammar.is_exit(0, closing)
    assert actions.grammar.written(0, closing) == (closing,)

"""What a calculator allows next, against rules written down a second time without an automaton."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.actions.actions import Actions, load_actions
from tests.actions.pieces import Pieces

PIECES = Pieces()
DIGITS = "123456789"


def strict(written: list[str], symbol: str, depth: int) -> bool:
    """EARL's table, line by line; `written` without blanks."""
    if not written:
        return symbol in [*DIGITS, "("]
    before = written[-1]
    is_open = written.count("(") - written.count(")")
    match symbol:
        case "":
            return True
        case "+" | "-" | "*" | "/":
            return before.isdigit() or before == ")"
        case "0":
            return before not in "+-*/()"
        case "(":
            return not (before.isdigit() or before in ").") and is_open < depth
        case ")":
            return is_open > 0 and before not in "(+-*/"
        case ".":
            return before.isdigit()
        case "=":
            return is_open == 0 and (before.isdigit() or before == ")")
    return before != ")"


def complete(written: list[str], symbol: str, depth: int) -> bool:
    """Numbers as one writes them: by the number that stands at the end of the text."""
    text = "".join(written)
    is_open = text.count("(") - text.count(")")
    number = re.search(r"[0-9.]*$", text).group()
    is_value = text.endswith(")") or (number != "" and not number.endswith("."))
    awaits = not number and not text.endswith(")")
    match symbol:
        case "+" | "*" | "/":
            return is_value
        case "-":
            return is_value or text == "" or text.endswith("(")
        case "(":
            return awaits and is_open < depth
        case ")":
            return is_value and is_open > 0
        case "=":
            return is_value and is_open == 0
        case ".":
            return is_value and not text.endswith(")") and "." not in number
    return awaits or (number not in ("", "0"))


def calculator(folder: Path, options: str, style: str) -> Actions:
    name = "calculator-combined" + ("-tags" if style == "tags" else "")
    bundled = Path(load_actions.__code__.co_filename).parent / "files" / f"{name}.yaml"
    text = bundled.read_text().replace("syntax: expression", f"syntax: {{expression: {options}}}")
    path = folder / f"{style}-{abs(hash(options))}.yaml"
    path.write_text(text)
    return load_actions(str(path), PIECES)


@pytest.fixture(scope="module")
def calculators(tmp_path_factory) -> dict[tuple[str, bool, int], Actions]:
    folder = tmp_path_factory.mktemp("files")
    return {
        (style, is_complete, depth): calculator(
            folder, f"{{depth: {depth}, complete: {str(is_complete).lower()}}}", style
        )
        for style, is_complete, depth in [
            *(
                ("actions", is_complete, depth)
                for is_complete in (False, True)
                for depth in (1, 2, 8)
            ),
            ("tags", False, 2),
        ]
    }


def play(actions: Actions, draws: list[int], allows, depth: int) -> list[str] | None:
    """Take the drawn ones of the allowed actions; compare with `allows` at every step."""
    entry = actions.tool_entries[0]
    texts = {**entry.texts, **dict.fromkeys(entry.exits, "=")}
    is_tag = actions.space.extra == 0
    mode, written = entry.modes[0], []
    for draw in draws:
        offered = np.flatnonzero(actions.space.row(mode)).tolist()
        expected = [
            action
            for action, text in texts.items()
            if (is_tag and text == "=") or allows([s for s in written if s], text, depth)
        ]
        assert offered == sorted(expected), written
        action = offered[draw % len(offered)]
        is_exit = actions.grammar.is_exit(mode, action)
        assert is_exit == (texts[action] == "=")
        mode = actions.grammar.step(mode, action)
        if is_exit:
            assert mode == 0
            return written
        written.append(texts[action])
    return None


DRAWS = st.lists(st.integers(0, 1000), min_size=1, max_size=40)


@settings(max_examples=150)
@given(draws=DRAWS, depth=st.sampled_from([1, 2, 8]))
def test_strict_allows_what_earls_table_allows(calculators, draws, depth):
    play(calculators["actions", False, depth], draws, strict, depth)


@settings(max_examples=100)
@given(draws=DRAWS)
def test_tags_allow_the_same_blanks_and_always_the_exit(calculators, draws):
    play(calculators["tags", False, 2], draws, strict, 2)


@settings(max_examples=150)
@given(draws=DRAWS, depth=st.sampled_from([1, 2, 8]))
def test_complete_allows_numbers_as_one_writes_them(calculators, draws, depth):
    written = play(calculators["actions", True, depth], draws, complete, depth)
    if written is not None:
        ast.parse("".join(written), mode="eval")


def allows(actions: Actions, text: str) -> bool:
    try:
        actions.spell("calculator", tuple(text))
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "in_strict", "in_complete"),
    [
        ("12+6", True, True),
        ("(12+6)/3", True, True),
        ("1.5", True, True),
        ("100.05", True, True),
        ("1.2.3", True, False),  # EARL's fault, kept for reproduction
        ("(1.)", True, False),
        ("0", False, True),
        ("0.5*2", False, True),
        ("10-0", False, True),
        ("-3+4", False, True),
        ("2*(-3)", False, True),
        ("007", False, False),
        ("2*-3", False, False),
        ("--3", False, False),
        ("2(3)", False, False),
        ("(2)3", False, False),
        ("1+", False, False),
        ("()", False, False),
        ("(1", False, False),
        ("1)", False, False),
        (".5", False, False),
        ("1.", False, False),
        ("2**3", False, False),
        ("", False, False),
    ],
)
def test_expressions_by_hand(calculators, text, in_strict, in_complete):
    assert allows(calculators["actions", False, 8], text) is in_strict
    assert allows(calculators["actions", True, 8], text) is in_complete


def test_depth_bounds_the_open_parentheses(calculators):
    two = calculators["actions", False, 2]
    assert allows(two, "((1))") and allows(two, "(1)+((2)*3)")
    assert not allows(two, "(((1)))")
    assert allows(calculators["actions", False, 8], "((((((((1))))))))")
    assert not allows(calculators["actions", False, 8], "(((((((((1)))))))))")


def test_blanks_do_not_split_a_number_where_numbers_are_complete(tmp_path):
    tags = calculator(tmp_path, "{complete: true}", "tags")
    assert tags.spell("calculator", ("1", " ", "+", " ", "2", " "))
    with pytest.raises(ValueError, match=r"'2' \(number 2\) is not allowed there"):
        tags.spell("calculator", ("1", " ", "2"))

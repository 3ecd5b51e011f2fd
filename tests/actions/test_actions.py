"""Actions by hand: ids, modes, what is written, where a call ends, and how it is read."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from graft.actions.actions import Actions, load_actions
from graft.actions.listing import bundled
from graft.text.tokenizer import FastTokenizer
from graft.types import NO_ACTION
from tests.actions.pieces import Pieces

PIECES = Pieces()
V = PIECES.vocab_size


def ids(text: str) -> list[int]:
    return PIECES.encode(text)


def allowed(actions: Actions, mode: int) -> list[int]:
    return np.flatnonzero(actions.space.row(mode)).tolist()


@pytest.fixture(scope="module")
def sorting() -> Actions:
    return load_actions("sorting", PIECES)


def test_sizes_are_those_of_earl():
    sizes = {name: load_actions(name, PIECES).space.extra for name in bundled()}
    assert sizes["calculator"] == 18
    assert sizes["calculator-combined"] == 19
    assert sizes["check"] == 12
    assert sizes["sorting"] == 7
    assert {sizes[name] for name in sizes if name.endswith("-tags")} == {0}


def test_every_bundled_file_has_its_baseline():
    names = set(bundled())
    assert {"calculator", "calculator-combined", "sorting", "check", "compact"} <= names
    assert {f"{name}-tags" for name in names if not name.endswith("-tags")} <= names


def test_ids_follow_the_file_and_shared_groups_come_once(sorting: Actions):
    assert sorting.names == (" compare", " A", " B", " C", " D", " E", " swap")
    assert sorting.tools == ("compare", "swap")
    assert sorting.init_tokens == tuple(ids(name)[0] for name in sorting.names)
    names = load_actions("calculator-combined", PIECES).names
    assert names == (" calculate ", *(" + ", " - ", " * ", " / ", " (", ")"), *"0123456789.", " = ")


def test_modes_of_two_arguments(sorting: Actions):
    compare, a, b, e, swap = V, V + 1, V + 2, V + 5, V + 6
    items = list(range(a, e + 1))
    assert allowed(sorting, 0) == [*range(V), compare, swap]
    assert allowed(sorting, 1) == items  # compare, first argument
    assert allowed(sorting, 2) == items  # its second: an item may be compared with itself
    assert allowed(sorting, 3) == items  # swap, first
    assert allowed(sorting, 4) == items[1:]  # its second, after A
    assert allowed(sorting, 5) == [a, *items[2:]]  # after B
    assert sorting.space.num_modes == 4 + 5
    grammar = sorting.grammar
    assert grammar.walk([0, compare, a, b, 0]) == [0, 0, 1, 2, 0]
    assert grammar.walk([swap, b, a, 0]) == [0, 3, 5, 0]
    assert not grammar.is_exit(1, a) and grammar.is_exit(2, a) and grammar.is_exit(5, a)


@pytest.mark.parametrize("name", ["check", "check-tags"])
def test_every_sequence_of_arguments_is_allowed_as_the_tools_declare(name):
    """All pairs: compare takes any two items, swap two different ones, check one and a quality."""
    actions = load_actions(name, PIECES)
    properties = ["negative", "positive", "even", "odd"]
    if name == "check":
        properties = [f"is {quality}" for quality in properties]

    def is_right(tool: str, arguments: tuple[str, ...]) -> bool:
        if tool == "check":
            return arguments[0] in "ABCDE" and all(one in properties for one in arguments[1:])
        return all(one in "ABCDE" for one in arguments) and not (
            tool == "swap" and len({*arguments}) == 1
        )

    for tool in actions.tools:
        for arguments in product([*"ABCDE", *properties], repeat=2):
            try:
                done = actions.spell(tool, arguments)
            except ValueError:
                assert not is_right(tool, arguments), (tool, arguments)
            else:
                assert is_right(tool, arguments), (tool, arguments)
                assert actions.read(done.actions, done.modes) == (tool, arguments)
        with pytest.raises(ValueError):
            actions.spell(tool, ("A", "B", "C"))


def test_an_argument_writes_what_stands_between(sorting: Actions):
    grammar = sorting.grammar
    assert list(grammar.written(0, V)) == ids(" compare")
    assert list(grammar.written(1, V + 1)) == ids(" A and")
    assert list(grammar.written(2, V + 1)) == ids(" A")
    assert grammar.written(0, 3) == (3,)


def test_a_row_can_start_from_a_later_token():
    actions = load_actions("check", PIECES)
    starts = dict(zip(actions.names, actions.init_tokens, strict=True))
    assert [starts[" check if"]] == ids(" check")
    assert [starts[" is odd"]] == ids(" odd")
    assert ids(" is odd") == [*ids(" is"), *ids(" odd")]


def test_only_the_selected_tools_are_loaded():
    actions = load_actions("check", PIECES, tools=["check", "swap"])
    assert actions.tools == ("swap", "check")  # the file's order
    assert actions.names[:6] == (" swap", " A", " B", " C", " D", " E")
    assert actions.names[6:] == (" check if", " is negative", " is positive", " is even", " is odd")
    assert actions.spell("swap", ("A", "B")).actions[0] == V


def test_rows_beyond_the_tokenizer_are_allowed_nowhere():
    actions = load_actions("sorting", PIECES, vocab_size=V + 3)
    assert actions.space.vocab_size == V + 3
    assert not actions.space.allowed[:, V : V + 3].any()
    assert allowed(actions, 0) == [*range(V), V + 3, V + 9]
    tags = load_actions("sorting-tags", PIECES, vocab_size=V + 3)
    assert not tags.space.allowed[:, V:].any() and tags.space.allowed[0, :V].all()
    with pytest.raises(ValueError, match=r"5 rows .* tokens; they do not belong together"):
        load_actions("sorting", PIECES, vocab_size=5)


def test_a_call_is_spelled_decision_by_decision(sorting: Actions):
    done = sorting.spell("compare", ("A", "B"))
    assert PIECES.decode(done.tokens) == " compare A and B"
    assert done.actions == [V, V + 1, NO_ACTION, V + 2]
    assert done.modes == [0, 1, 1, 2] and done.mode == 0
    entry = sorting.entry("swap")
    assert (PIECES.decode(entry.tokens), entry.actions, entry.modes) == (" swap", [V + 6], [0])
    assert entry.mode == 3
    assert sorting.words("swap") == ids(" swap")


def test_a_calculation_is_spelled_with_its_exit():
    actions = load_actions("calculator", PIECES)
    done = actions.spell("calculator", ("1", "2", "+", "6"))
    assert PIECES.decode(done.tokens) == " calculate 12 + 6 = "
    taken = [actions.names[a - V] for a in done.actions if a != NO_ACTION]
    assert taken == [" calculate ", "1", "2", " + ", "6", " = "]
    assert done.mode == 0
    assert actions.read(done.actions, done.modes) == ("calculator", ("1", "2", "+", "6"))
    assert actions.render("calculator", "18") == "18\n"


@pytest.mark.parametrize(
    ("name", "tool", "arguments", "text"),
    [
        ("calculator", "calculator", tuple("(12+6)/3"), " calculate  (12 + 6) / 3 = "),
        ("calculator-combined", "calculator", tuple("1.5*4"), " calculate 1.5 * 4 = "),
        ("sorting", "swap", ("E", "A"), " swap E and A"),
        ("check", "check", ("C", "is even"), " check if C is even"),
        ("compact", "calculator", tuple("-22+0"), "[-22+0]"),
        ("calculator-tags", "calculator", tuple("12+6"), " <calculator>12 +6 </calculator>"),
        (
            "calculator-combined-tags",
            "calculator",
            ("1", ".", "5"),
            " <calculator>1.5 </calculator>",
        ),
        ("sorting-tags", "compare", ("A", "B"), " <compare> A, B </compare>"),
        ("check-tags", "check", ("A", "odd"), " <check> A, odd </check>"),
        ("compact-tags", "calculator", tuple("-22+0"), "[-22+0]"),
    ],
)
def test_reading_gives_back_what_was_spelled(name, tool, arguments, text):
    actions = load_actions(name, PIECES)
    done = actions.spell(tool, arguments)
    assert PIECES.decode(done.tokens) == text
    assert done.mode == 0
    assert actions.read(done.actions, done.modes) == (tool, arguments)
    for action, mode in zip(done.actions, done.modes, strict=True):
        assert action == NO_ACTION or actions.space.allows(mode, action)


def test_reading_takes_the_last_call_of_a_turn(sorting: Actions):
    first, second = sorting.spell("compare", ("A", "B")), sorting.spell("swap", ("C", "D"))
    text = [*ids("so so")]
    zeros = [0] * len(text)
    actions = [*text, *first.actions, *text, *second.actions]
    modes = [*zeros, *first.modes, *zeros, *second.modes]
    assert sorting.read(actions, modes) == ("swap", ("C", "D"))
    end = len(text) + len(first.actions)
    assert sorting.read(actions[:end], modes[:end]) == ("compare", ("A", "B"))
    with pytest.raises(ValueError, match="do not end with the exit"):
        sorting.read(actions[:-1], modes[:-1])
    with pytest.raises(ValueError, match="do not end with the exit"):
        sorting.read([], [])


def test_reading_leaves_out_blanks_and_may_find_no_arguments():
    actions = load_actions("calculator-tags", PIECES)
    done = actions.spell("calculator", ("1", "+", " ", "6"))
    assert PIECES.decode(done.tokens) == " <calculator>1 + 6 </calculator>"
    assert actions.read(done.actions, done.modes) == ("calculator", ("1", "+", "6"))
    empty = actions.spell("calculator", ())
    assert actions.read(empty.actions, empty.modes) == ("calculator", ())


def test_what_the_syntax_forbids_cannot_be_spelled(sorting: Actions):
    with pytest.raises(
        ValueError, match=r"'A' \(number 1\) is not allowed there; allowed: \['B', 'C'"
    ):
        sorting.spell("swap", ("A", "A"))
    with pytest.raises(ValueError, match="complete before 'C'"):
        sorting.spell("compare", ("A", "B", "C"))
    with pytest.raises(ValueError, match="not complete"):
        sorting.spell("compare", ("A",))
    with pytest.raises(ValueError, match="'F'"):
        sorting.spell("compare", ("F", "A"))
    with pytest.raises(ValueError, match="did you mean 'swap'"):
        sorting.spell("swop", ("A", "B"))
    with pytest.raises(ValueError, match=r"'12' \(number 0\)"):
        load_actions("calculator", PIECES).spell("calculator", ("12",))
    with pytest.raises(ValueError, match="not complete"):
        load_actions("calculator", PIECES).spell("calculator", ("1", "+"))


def test_an_answer_is_written_by_its_template(sorting: Actions):
    assert sorting.render("compare", "A < B") == ": A < B\n"
    assert sorting.render("swap", "B, A") == " => B, A\n"
    assert load_actions("compact", PIECES).render("calculator", "46") == "46;"
    tags = load_actions("sorting-tags", PIECES)  # there the environment has written it already
    assert tags.render("swap", " <result> B, A </result>") == " <result> B, A </result>"


def test_the_compact_calculator_on_single_characters():
    letters = FastTokenizer.characters("0123456789+-*=[];?")
    actions = load_actions("compact", letters)
    size = letters.vocab_size
    assert actions.names == ("[", *"+-*", *"0123456789", "]")
    assert actions.init_tokens == tuple(letters.encode("[+-*0123456789]"))
    done = actions.spell("calculator", tuple("12+34"))
    assert letters.decode(done.tokens) == "[12+34]"
    assert done.actions == [size + i for i in (0, 5, 6, 1, 7, 8, 14)]
    assert actions.grammar.is_exit(done.modes[-1], size + 14)
    with pytest.raises(
        ValueError, match=r"calculator.yaml, tool 'calculator', entry: ' calculate '"
    ):
        load_actions("calculator", letters)

"""Action files: what cannot work is refused with the place and the way out; EARL's are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from graft.actions.actions import Actions, load_actions
from graft.actions.fields import ActionsError
from graft.actions.listing import FILES
from graft.actions.syntax import SyntaxMove, SyntaxRules
from graft.text.tokenizer import FastTokenizer
from tests.actions.pieces import Pieces

PIECES = Pieces()

SWAP = """
tools:
  - name: swap
    entry: " swap"
    words: [" swap"]
    answer: ": {}"
    syntax: {arguments: {take: [items, items]}}
    groups:
      - {name: items, actions: [" A", " B"]}
"""
CHECK = """
  - name: check
    entry: " check"
    words: [" check"]
    syntax: {arguments: {take: [items]}}
    groups:
      - {name: items}
"""
TAGS = """
style: tags
tools:
  - name: swap
    entry: " <swap>"
    exit: " </swap>"
    words: [" <"]
    syntax: {arguments: {take: [items, items], between: ","}}
    groups:
      - {name: items, actions: [" A", " B"]}
"""


def load(text: str, tmp_path: Path, tools: tuple[str, ...] = ()) -> Actions:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return load_actions(str(path), PIECES, tools)


def test_the_examples_below_are_fine_as_they_are(tmp_path):
    assert load(SWAP, tmp_path).names == (" swap", " A", " B")
    assert load(SWAP + CHECK, tmp_path).names == (" swap", " A", " B", " check")
    assert load(TAGS, tmp_path).tools == ("swap",)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("tools:", "tolls:", r"mine.yaml: unknown key 'tolls'; did you mean 'tools'\?"),
        ("words:", "word:", r"tool 'swap': unknown key 'word'; did you mean 'words'\?"),
        ("- name: swap\n    ", "- ", r"mine.yaml, tool 1: the key 'name' is missing"),
        ('entry: " swap"\n    ', "", "tool 'swap': the key 'entry' is missing"),
        ('entry: " swap"', 'entry: ""', "tool 'swap', entry: the text is empty"),
        ('entry: " swap"', "entry: 3", '3 is not a text; put it in quotation marks, as in "3"'),
        ('entry: " swap"', 'entry: [" swap"]', "entry: .* is not a text"),
        ('words: [" swap"]', "words: []", "tool 'swap', words: the list is empty"),
        ('words: [" swap"]', 'words: " swap"', "words: ' swap' is not a list"),
        ('words: [" swap"]', 'words: [""]', "words: the text is empty"),
        ('answer: ": {}"', 'answer: ": "', r"answer: ': ' must have \{\} once"),
        ('answer: ": {}"', 'answer: "{}{}"', "once"),
        ('answer: ": {}"', 'exit: "x"', "'exit' is a closing tag"),
        ('[" A", " B"]', '[" A", " A"]', "group 'items': the tool already has an action 'A'"),
        ('[" A", " B"]', '[" A", "A"]', "the tool already has an action 'A'"),
        ('[" A", " B"]', '[" A", ""]', "group 'items', actions: the text is empty"),
        ('[" A", " B"]', "[0, 1]", "0 is not a text"),
        ('[" A", " B"]', "[]", "actions: the list is empty"),
        ('" B"]', "{text: ' B', init: 1}]", "init 1 of ' B', which has 1 tokens"),
        ('" B"]', "{text: ' B', init: -1}]", "init -1 of ' B' is neither"),
        ('" B"]', "{text: ' B', inti: 1}]", "unknown key 'inti'; did you mean 'init'"),
        ('" B"]', '"ß"]', "group 'items': 'ß' cannot be encoded"),
        (', actions: [" A", " B"]', "", "group 'items': no actions, and no tool above"),
        ("{name: items, ", "{nam: items, ", "unknown key 'nam'; did you mean 'name'"),
        ("take: [items, items]", "take: [items, item]", r"take has 'item'; .* are \['items'\]"),
        ("take: [items, items]", "take: []", "take is empty"),
        ("take: [items, items]", "tak: [items]", "syntax 'arguments': .*tak"),
        ("items]}", "items], between: 5}", "between=5: must be a text, in quotation marks"),
        ("items]}", "items], distinct: 'no'}", "distinct='no': must be true or false, without"),
        ("{arguments: {take: [items, items]}}", "builtins:len", "it returned 2"),
        ('answer: ": {}"', 'answer: "ß{}"', "tool 'swap', answer: 'ß' cannot be encoded"),
        ("{arguments: {take: [items, items]}}", "argument", "did you mean 'arguments'"),
        ("{arguments: {take: [items, items]}}", "[]", r"\[\] is neither a name nor"),
        ("{arguments: {take: [items, items]}}", "expression", "'A' is no part of an expression"),
        ("{arguments: {take: [items, items]}}", "nowhere:fn", "cannot import 'nowhere'"),
        (
            "- {name: items, a",
            '- {name: exit, actions: ["]"]}\n      - {name: items, a',
            "never allows",
        ),
        ("tools:", "style: tag\ntools:", "style 'tag' is neither 'actions' nor 'tags'"),
        ("tools:", "style: [tags]\ntools:", r"style \['tags'\] is neither 'actions' nor 'tags'"),
        ("tools:", "tools: []\nother:", "unknown key 'other'"),
        ("tools:", f"other: {'[' * 400}{']' * 400}\ntools:", "is not an action file"),
        ("tools:", "tools:\ntools:", "is not an action file"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, old, new, complaint):
    assert old in SWAP
    with pytest.raises(ActionsError, match=complaint):
        load(SWAP.replace(old, new, 1), tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("name: check", "name: swap", "two tools are named 'swap'"),
        ('entry: " check"', 'entry: " swap"', "' swap' enters 'swap' and 'check'"),
        ("{name: items}", "{name: item}", r"tool 'check', group 'item': .*did you mean 'items'\?"),
        ("{name: items}", '{name: items, actions: [" C"]}', "group 'items': listed a second time"),
        ("- {name: items}", "- {name: items}\n      - {name: items}", "has this group twice"),
        (
            "{arguments: {take: [items]}}\n    groups:\n      - {name: items}",
            '{arguments: {take: [others]}}\n    groups: [{name: others, actions: [" B"]}]',
            "' B' is already an action of the group 'items'",
        ),
    ],
)
def test_a_second_tool_must_fit_the_first(tmp_path, old, new, complaint):
    assert old in CHECK
    with pytest.raises(ActionsError, match=complaint):
        load(SWAP + CHECK.replace(old, new, 1), tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('" B"]', '" B C"]', "' B C' is 2 tokens"),
        ('" B"]', '" </"]', "also the action ' </'"),
        ('exit: " </swap>"\n    ', "", "the key 'exit' is missing"),
        ('exit: " </swap>"', 'exit: ""', "exit: the text is empty"),
        ("words:", 'answer: "{}"\n    words:', "delete 'answer'"),
        ('" <swap>"', '[" <", " <swap>"]', "' <swap>' cannot be reached, since ' <' in it"),
        ('" <swap>"', '[" <swap>", " <swap>"]', "enters 'swap' and 'swap'"),
        ('" <swap>"', "[]", "entry: the list is empty"),
        ("name: items, a", "name: exit, a", "only the closing tag exits"),
        ('between: ","', 'between: "ß"', "'ß' cannot be encoded"),
    ],
)
def test_a_bad_file_of_tags_is_refused(tmp_path, old, new, complaint):
    assert old in TAGS
    with pytest.raises(ActionsError, match=complaint):
        load(TAGS.replace(old, new, 1), tmp_path)


def test_a_call_must_have_an_end(tmp_path):
    text = (FILES / "calculator.yaml").read_text()
    with pytest.raises(ActionsError, match="no call can ever be completed"):
        load(text.replace('      - {name: exit, actions: [" = "]}\n', ""), tmp_path)
    with pytest.raises(ActionsError, match=r"after '\(' a call can never be completed"):
        load(text.replace('[" (", ")"]', '[" ("]'), tmp_path)
    with pytest.raises(ActionsError, match=r"never allows '\('"):
        load(text.replace("syntax: expression", "syntax: {expression: {depth: 0}}"), tmp_path)
    with pytest.raises(ActionsError, match="depth=-1: must be 0 or more"):
        load(text.replace("syntax: expression", "syntax: {expression: {depth: -1}}"), tmp_path)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(
        ActionsError, match=r"neither a file nor bundled .* Did you mean 'sorting'\?"
    ):
        load_actions("sortin", PIECES)
    with pytest.raises(ActionsError, match=r"mine.yaml has no tool 'swop'; did you mean 'swap'\?"):
        load(SWAP, tmp_path, ("swop",))
    with pytest.raises(ActionsError, match="holds a list"):
        load("- a", tmp_path)


class Mute(FastTokenizer):
    """Writes nothing for a blank, as tokenizers that strip their text do."""

    def encode_after(self, text: str, last: int | None = None) -> list[int]:
        return super().encode_after(text.strip(), last)


def test_an_action_without_tokens_is_refused(tmp_path):
    (tmp_path / "mute.yaml").write_text(SWAP.replace('" B"', '" "'))
    mute = Mute.characters("swapAB: ")
    with pytest.raises(ActionsError, match="group 'items': ' ' has no tokens"):
        load_actions(str(tmp_path / "mute.yaml"), mute)


def test_a_row_can_be_drawn(tmp_path):
    actions = load(SWAP.replace('" B"]', "{text: ' B', init: random}]"), tmp_path)
    assert actions.init_tokens[1:] == (PIECES.encode(" A")[0], None)


def count_to(symbols, limit=3):
    """Any symbol, `limit` times; a limit of 0 never ends and never repeats a state."""

    def move(count, symbol):
        return SyntaxMove(None, "") if count + 1 == limit else SyntaxMove(count + 1, "so")

    return SyntaxRules(0, move)


def test_a_syntax_of_ones_own(tmp_path):
    named = SWAP.replace("{arguments: {take: [items, items]}}", f"'{__name__}:count_to'")
    actions = load(named, tmp_path)
    done = actions.spell("swap", ("A", "A", "B"))
    assert PIECES.decode(done.tokens) == " swap Aso Aso B"
    with pytest.raises(ValueError, match="not complete"):
        actions.spell("swap", ("A", "A"))
    endless = named.replace("count_to'", "count_to': {limit: 0}}").replace("syntax: ", "syntax: {")
    with pytest.raises(ActionsError, match="more than 2000 states"):
        load(endless, tmp_path)


EARL = """
tool_list:
  - name: compare
    entry_desc: " compare"
    output_template: ": %s\\n"
    cpo_words: [" compare"]
    action_groups:
      - name: items
        actions: [{desc: ' A'}, {desc: ' B'}, {desc: ' C'}]
  - name: check
    entry_desc: " check if"
    init_weight_with: 1
    output_template: ": %s\\n"
    cpo_words: [" check"]
    action_groups:
      - name: items
      - name: properties
        actions:
          - desc: ' is even'
            init_weight_with: 1
"""
EARL_TAGS = """
tool_list:
  - name: swap
    earl: false
    entry_desc: " <swap>"
    exit_desc: " </swap>"
    output_template: " <result> %s </result>"
    cpo_words: [" <swap"]
    actions: [" A", " B", ","]
  - name: check
    earl: false
    entry_desc: " <check>"
    exit_desc: " </check>"
    cpo_words: [" <check"]
    actions: [" A", " B", ",", " even", " odd"]
  - name: calculator
    earl: false
    entry_desc: " <calculator>"
    exit_desc: " </calculator>"
    cpo_words: [" <"]
    actions: [" +", " ", "0", "1", "2", " (", ")"]
"""


def test_earls_own_files_are_read(tmp_path):
    actions = load(EARL, tmp_path)
    assert actions.names == (" compare", " A", " B", " C", " check if", " is even")
    assert actions.init_tokens[4:] == (PIECES.encode(" if")[0], PIECES.encode(" even")[0])
    assert PIECES.decode(actions.spell("compare", ("A", "C")).tokens) == " compare A and C"
    assert PIECES.decode(actions.spell("check", ("C", "is even")).tokens) == " check if C is even"
    assert actions.render("check", "True") == ": True\n"


def test_earls_groups_may_have_any_name(tmp_path):
    actions = load(EARL.replace("items", "symbols").replace("properties", "is it"), tmp_path)
    assert PIECES.decode(actions.spell("check", ("C", "is even")).tokens) == " check if C is even"


def test_earls_baselines_are_read_as_tags(tmp_path):
    actions = load(EARL_TAGS, tmp_path)
    assert actions.space.extra == 0 and actions.tools == ("swap", "check", "calculator")
    texts = {
        ("swap", ("A", "B")): " <swap> A, B </swap>",
        ("check", ("B", "odd")): " <check> B, odd </check>",
        ("calculator", tuple("(1+20)")): " <calculator> (1 +20) </calculator>",
    }
    for call, text in texts.items():
        done = actions.spell(*call)
        assert PIECES.decode(done.tokens) == text
        assert actions.read(done.actions, done.modes) == call
    with pytest.raises(ValueError, match="is not allowed there"):
        actions.spell("swap", ("A", "A"))
    assert actions.words("check") == PIECES.encode(" <check")


@pytest.mark.parametrize(
    ("text", "old", "new", "note"),
    [
        (EARL, "    entry_desc:", "    train_entry: false\n    entry_desc:", "'train_entry'"),
        (EARL, "name: items\n   ", "name: items\n        trainable: true\n   ", "'trainable'"),
        (EARL, "' is even'\n", "' is even'\n            trainable: true\n", "'trainable': EARL's"),
        (
            EARL_TAGS,
            "    earl: false\n",
            "    earl: false\n    is_sft_mode: sft\n",
            "'is_sft_mode'",
        ),
        (EARL_TAGS, '" (", ")"', '" (", ")", ","', "the action ',' is left out"),
    ],
)
def test_keys_without_meaning_in_earls_files_are_left_out_with_a_note(
    tmp_path, caplog, text, old, new, note
):
    """Three of EARL's seven files have such keys; the one for demonstrations has a comma too."""
    assert old in text
    read, plain = load(text.replace(old, new, 1), tmp_path), load(text, tmp_path)
    assert (read.names, read.tools) == (plain.names, plain.tools)
    assert (read.space.extra, read.init_tokens) == (plain.space.extra, plain.init_tokens)
    (message,) = caplog.messages
    assert note in message and "mine.yaml" in message


@pytest.mark.parametrize(
    ("text", "old", "new", "complaint"),
    [
        (EARL, "{desc: ' A'}", "{dsc: ' A'}", "unknown key 'dsc'; did you mean 'desc'"),
        (EARL, "name: check", "name: ask", "'ask' is none of calculator, compare, swap, check"),
        (EARL, "entry_desc", "entry_dsc", "unknown key 'entry_dsc'; did you mean 'entry_desc'"),
        (EARL, ': %s\\n"', ':"', "output_template: ':' must have %s once"),
        (EARL, "      - name: items\n      - name: prop", "      - name: prop", "check takes two"),
        (EARL, "action_groups", "actions", "unknown key 'actions'; did you mean 'action_groups'"),
        (EARL, "    entry_desc:", "    earl: 2\n    entry_desc:", "earl is 2"),
        (EARL_TAGS, "    earl: false\n", "", "unknown key 'exit_desc'"),
        (EARL_TAGS, "<result> %s </result>", "%s", "the environment writes the result"),
    ],
)
def test_what_earl_does_not_read_is_refused(tmp_path, text, old, new, complaint):
    assert old in text
    with pytest.raises(ActionsError, match=complaint):
        load(text.replace(old, new, 1), tmp_path)


def test_actions_and_tags_do_not_mix(tmp_path):
    with pytest.raises(ActionsError, match="split the file"):
        load(EARL + EARL_TAGS.replace("\ntool_list:\n", "").replace("check", "swap"), tmp_path)

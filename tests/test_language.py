"""The house rules about language, over the syntax tree of the packages.

A docstring opens with a noun phrase, a sentence or an imperative; a function is not named by a pronoun, a
particle or a bare participle; a limit is MAX_, never MOST_. Two habits are still in many files: variables
with such names, and "where it" for "if". Their ceilings are the counts of today: lower them, never raise.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("graft", "graft_envs", "graft_sandbox", "graft_search", "graft_interop")

MAX_ASSIGNED = {
    "one": 436, "found": 372, "seen": 138, "own": 96, "given": 114, "kept": 55, "left": 66,
    "most": 47, "begun": 17, "shown": 53, "behind": 5, "few": 5, "ends": 41,
}  # fmt: skip
"""Words that do not say what is computed or held, and the most assignments to such a name."""

MAX_WHERE_IT = 70

OPENING = re.compile(
    r"(above|after|also|among|around|as|at(?! (?:most|least)\b)|before|behind|below|beside|between|beyond|by"
    r"|during|for|from|in|inside|into|like|of|on|once|out|outside|over|per|since|through|to|under|until|when"
    r"|where|while|with|without)\b",
    re.IGNORECASE,
)
"""No docstring needs one of these first: subject or verb can stand before it. "At most 4 rows" is a noun."""

Nodes = list[ast.AST]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LOOKED_AT = (*DOCUMENTED, ast.Name)


def docstrings(nodes: Nodes) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def find_openings(nodes: Nodes) -> list[int]:
    """The lines of docstrings that open with a preposition or adverb."""
    return [line for line, text in docstrings(nodes) if OPENING.match(text)]


def find_functions(nodes: Nodes) -> list[int]:
    """The lines of functions and classes whose name is a key of MAX_ASSIGNED."""
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and node.name.strip("_").lower() in MAX_ASSIGNED
    ]


def find_limits(nodes: Nodes) -> list[int]:
    """The lines that assign a limit named MOST_."""
    return [name.lineno for name in stored(nodes) if name.id.lstrip("_").startswith("MOST_")]


def stored(nodes: Nodes) -> Iterator[ast.Name]:
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node


def count_assigned(nodes: Nodes) -> Counter[str]:
    return Counter(name.id for name in stored(nodes) if name.id in MAX_ASSIGNED)


def count_where_it(nodes: Nodes, source: str) -> int:
    """How often docstrings and comments say "where it"."""
    comments = re.findall(r"#.*", source)
    texts = [*(text for _, text in docstrings(nodes)), *comments]
    return sum(len(re.findall(r"\bwhere\s+it\b", text, re.IGNORECASE)) for text in texts)


def nodes_of(source: str) -> Nodes:
    """Those that the rules look at."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, LOOKED_AT)]


RULES = (find_openings, find_functions, find_limits)


@dataclass
class Survey:
    broken: dict[str, list[str]] = field(
        default_factory=lambda: {rule.__name__: [] for rule in RULES}
    )
    assigned: Counter[str] = field(default_factory=Counter)
    where_it: int = 0


@cache
def survey() -> Survey:
    """Read every file once; all trees together would fill the memory."""
    whole = Survey()
    for file in (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))):
        text = file.read_text(encoding="utf-8")
        nodes = nodes_of(text)
        for rule in RULES:
            places = [f"{file.relative_to(ROOT)}:{line}" for line in rule(nodes)]
            whole.broken[rule.__name__] += places
        whole.assigned += count_assigned(nodes)
        whole.where_it += count_where_it(nodes, text)
    return whole


@pytest.mark.parametrize("rule", RULES)
def test_no_file_breaks_a_rule(rule):
    assert survey().broken[rule.__name__] == []


def test_no_more_variables_have_such_names():
    counts = survey().assigned
    assert {k: n for k, n in counts.items() if n > MAX_ASSIGNED[k]} == {}


def test_no_more_texts_say_where_it():
    assert survey().where_it <= MAX_WHERE_IT


@pytest.mark.parametrize(
    ("find", "source", "lines"),
    [
        (find_openings, 'def size(row):\n    """Of a sequence."""', [2]),
        (find_openings, 'class Keys:\n    """Where a row keeps its answer."""', [2]),
        (find_openings, '"""From names to objects."""', [1]),
        (find_openings, 'def size(row):\n    """The size of a sequence."""', []),
        (find_openings, 'def cut(text):\n    """At most 4 characters of a text."""', []),
        (find_openings, 'def fold(row):\n    """Fold a row.\n\n    For each, once."""', []),
        (find_openings, 'def order(row):\n    """Inner rows come first."""', []),
        (find_functions, "async def one(item): ...\ndef _shown(value): ...", [1, 2]),
        (find_functions, "class Few: ...", [1]),
        (find_functions, "def describe_value(seen): ...\ndef find_one(): ...", []),
        (find_limits, "MOST_ROWS = 4\n_MOST_PAGES: int = 2\nMAX_ROWS = 8", [1, 2]),
    ],
)
def test_a_rule_catches(find, source, lines):
    assert find(nodes_of(source)) == lines


def test_counts_of_habits():
    source = (
        "seen = [one for one in rows]  # where it is\nrow.seen = found(seen)  # where items are"
    )
    nodes = nodes_of(source)
    assert count_assigned(nodes) == {"seen": 1, "one": 1}
    assert count_where_it(nodes, source) == 1
    folded = 'def f():\n    """Where\n    it is. The line where it is."""'
    assert count_where_it(nodes_of(folded), folded) == 2

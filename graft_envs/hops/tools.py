"""The tools of both syntaxes: graft's search over the facts of a town, and its python.

compact   kab M                   ->  mod            one document, its text alone
          342*37                  ->  12654          run as print(342*37)
words     mentor of Kara Voss     ->  Doc 1(Title: Kara Voss) The mentor of Kara Voss is Dara Lind.
                                      Doc 2(Title: Kara Voss) The boss of Kara Voss is ...
          print(342*37)           ->  12654
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from graft.tools import ERROR
from graft_envs.code.python_tool import PythonTool
from graft_envs.hops.facts import LETTERS, SEED, build_town
from graft_envs.text_ranking import TextRanking
from graft_search import Hit, SearchTool

TIMEOUT, MEMORY_MB = 2.0, 256  # of a program that only multiplies
TOPK = 2
_PRODUCT = re.compile(r"[0-9]{1,6}\*[0-9]{1,6}")


class TownFacts:
    """The facts of a town as documents; another process builds them again."""

    kind = ""

    def __init__(self, people: int) -> None:
        self.people = people
        self.fingerprint = f"hops-{self.kind}:{SEED}:{people}"

    def __reduce__(self) -> Any:
        return type(self), (self.people,)


class ExactFacts(TownFacts):
    """The one fact that a query names: "kab M" -> "mod". Other queries find nothing.

    A ranking by words does not work here: a query must name person and relation exactly.
    """

    kind = "exact"

    def open(self) -> None:
        facts = build_town(self.people, short=True).facts
        self._found = {
            f"{name} {LETTERS[relation]}": value for (name, relation), value in facts.items()
        }

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return [
            [Hit(query, query, self._found[query])] if query in self._found else []
            for query in queries
        ]


class RankedFacts(TownFacts):
    """Every fact as a document, ranked by BM25: "mentor of Kara Voss" finds hers first.

    The next ones share words with the query: another fact of hers, or one whose value is her name. Her
    own name is also in the title and so counts twice.
    """

    kind = "bm25"

    def open(self) -> None:
        facts = build_town(self.people, short=False).facts
        self._documents = [
            (name, f"The {relation} of {name} is {value}.")
            for (name, relation), value in facts.items()
        ]
        # "the", "of" and "is" are in every document: they rank nothing and would take most of the time
        self._index = TextRanking(
            [f"{name} {relation} {name} {value}" for (name, relation), value in facts.items()]
        )

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return [
            [Hit(str(number), *self._documents[number]) for number in self._index.search(q, topk)]
            for q in queries
        ]


class BareSearch(SearchTool):
    """Answers with the bare text of the best document."""

    def render(self, answer: Any) -> str:
        return answer[0].text if answer else f"{ERROR}no such fact"


class Products(PythonTool):
    """Runs "342*37" as print(342*37); refuses other programs, whose output could leave the alphabet."""

    def __call__(self, content: str) -> str:
        if not _PRODUCT.fullmatch(content):
            return f"{ERROR}not a product of two whole numbers of at most six digits"
        return super().__call__(f"print({content})")


@lru_cache(maxsize=8)  # without state: one pair serves every env of the process
def compact_tools(people: int) -> tuple[BareSearch, Products]:
    source = ExactFacts(people)
    return BareSearch(source, topk=1), Products(TIMEOUT, memory_mb=MEMORY_MB)


@lru_cache(maxsize=8)
def worded_tools(people: int) -> tuple[SearchTool, PythonTool]:
    source = RankedFacts(people)
    search = SearchTool(source, topk=TOPK, tag="")
    return search, PythonTool(TIMEOUT, memory_mb=MEMORY_MB)

"""An invented town: each person's boss, mentor and friend, and two numbers.

    Kara Voss   boss Tilo Brandt   mentor Dara Lind   friend Ines Marsh   salary 342   rent 817

Everything is drawn from one fixed seed, so no fact is known from elsewhere and every machine has the
same town. In the compact syntax the same people have names of three letters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from graft.envs.random_state import RandomState
from graft.envs.splits import SPLITS, split_of

LINKS = ("boss", "mentor", "friend")
"""Relations from a person to another one."""
NUMBERS = ("salary", "rent")
"""Relations from a person to a number."""
LETTERS = {relation: relation[0].upper() for relation in (*LINKS, *NUMBERS)}
"""The letters of the relations in the compact syntax."""
AMOUNTS = (100, 999)
SEED = 20_250_719
FEWEST = 50
"""Fewest people: with fewer a split might be empty."""

CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxz", "aeiou"
FIRST = (
    *("Ada", "Amir", "Anya", "Arlo", "Bela", "Boris", "Carla", "Cleo", "Dana", "Dara", "Devi"),
    *("Edda", "Elias", "Emil", "Esra", "Felix", "Flora", "Gina", "Greta", "Hana", "Hugo", "Ida"),
    *("Igor", "Ines", "Iris", "Ivan", "Jana", "Jonas", "Juno", "Kara", "Karl", "Kira", "Lara"),
    *("Lena", "Leo", "Lotte", "Luca", "Mara", "Milo", "Mina", "Nadia", "Nils", "Nora", "Olga"),
    *("Omar", "Oscar", "Paula", "Petra", "Quinn", "Remy", "Rosa", "Ruth", "Sami", "Selma", "Tara"),
    *("Tilo", "Tomas", "Uma", "Vera", "Viktor", "Wanda", "Yara", "Yusuf", "Zoe"),
)
LAST = (
    *("Abel", "Adler", "Baker", "Bauer", "Beck", "Berg", "Blum", "Brandt", "Busch", "Carter"),
    *("Conti", "Cruz", "Dahl", "Diaz", "Ebert", "Falk", "Fischer", "Frank", "Frost", "Garcia"),
    *("Grant", "Haas", "Hahn", "Hart", "Hauser", "Hill", "Holm", "Huber", "Ito", "Jensen"),
    *("Kaiser", "Keller", "Klein", "Koch", "Kraus", "Lang", "Lee", "Lind", "Lopez", "Marsh"),
    *("Mendez", "Meyer", "Moore", "Nagy", "Novak", "Olsen", "Park", "Peters", "Quist", "Reed"),
    *("Rossi", "Roth", "Sato", "Silva", "Sommer", "Stein", "Tanaka", "Unger", "Vogel", "Voss"),
    *("Wagner", "Walsh", "Weber", "Young"),
)
MAX_PEOPLE = len(FIRST) * len(LAST)


@dataclass(frozen=True, slots=True)
class Town:
    """People by name, and the facts about them."""

    names: Sequence[str]
    facts: Mapping[tuple[str, str], str]
    """("Kara Voss", "mentor") -> "Dara Lind", ("Kara Voss", "salary") -> "342"."""
    starts: Mapping[str, Sequence[str]]
    """Split -> the people that its questions begin with; later hops may reach anyone."""


@cache  # one town per process, shared by all envs
def build_town(people: int, short: bool) -> Town:
    """The town with `people` people; with names of a few letters if `short`, else "Kara Voss"."""
    if not FEWEST <= people <= MAX_PEOPLE:
        raise ValueError(f"people={people}: must be between {FEWEST} and {MAX_PEOPLE}")
    pool = short_names(people) if short else (f"{a} {b}" for a in FIRST for b in LAST)
    # separate generators: person number n has the same boss in both kinds of names
    names = RandomState(SEED).sample(list(pool), people)
    rng = RandomState(SEED + 1)
    facts: dict[tuple[str, str], str] = {}
    starts: dict[str, list[str]] = {split: [] for split in SPLITS}
    for number, name in enumerate(names):
        starts[split_of(f"person {number}")].append(name)
        for link in LINKS:
            other = rng.randrange(people - 1)
            facts[name, link] = names[other + (other >= number)]  # never the person itself
        for amount in NUMBERS:
            facts[name, amount] = str(rng.randint(*AMOUNTS))
    return Town(names, facts, starts)


def short_names(people: int) -> Iterator[str]:
    """bab, bac, ...: consonants and vowels in turn, as few letters as give `people` names."""
    for length in itertools.count(3):
        letters = [VOWELS if place % 2 else CONSONANTS for place in range(length)]
        names = ["".join(name) for name in itertools.product(*letters)]
        if len(names) >= people:
            return iter(names)
    raise AssertionError("counting does not end")

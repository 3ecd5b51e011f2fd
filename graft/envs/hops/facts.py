"""A made town: who is whose boss, mentor and friend, and two numbers of everybody.

    Kara Voss   boss Tilo Brandt   mentor Dara Lind   friend Ines Marsh   salary 342   rent 817

Everything is drawn from one fixed seed, so nothing can be guessed and every machine has the same
town. The same people have names of three letters in the compact syntax.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from graft.envs.random_state import RandomState
from graft.envs.splits import SPLITS, split_of

LINKS = ("boss", "mentor", "friend")
"""What leads from a person to another one."""
NUMBERS = ("salary", "rent")
"""What leads from a person to a number."""
LETTERS = {relation: relation[0].upper() for relation in (*LINKS, *NUMBERS)}
"""How the compact syntax writes them."""
AMOUNTS = (100, 999)
SEED = 20_250_719
FEWEST = 50
"""People without whom one of the splits might have nobody to ask about."""

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
MOST = len(FIRST) * len(LAST)


@dataclass(frozen=True, slots=True)
class Town:
    """People by name, and what is true of them."""

    names: Sequence[str]
    facts: Mapping[tuple[str, str], str]
    """("Kara Voss", "mentor") -> "Dara Lind", ("Kara Voss", "salary") -> "342"."""
    starts: Mapping[str, Sequence[str]]
    """Split -> whom its questions begin with; the way may then lead to anybody."""


@cache  # one town per process, whatever the number of envs
def build_town(people: int, short: bool) -> Town:
    """The town of so many people; with names of a few letters if `short`, else "Kara Voss"."""
    if not FEWEST <= people <= MOST:
        raise ValueError(f"people={people}: must be between {FEWEST} and {MOST}")
    pool = short_names(people) if short else (f"{a} {b}" for a in FIRST for b in LAST)
    # a generator each: the same number has the same boss by either name
    names = RandomState(SEED).sample(list(pool), people)
    rng = RandomState(SEED + 1)
    facts: dict[tuple[str, str], str] = {}
    starts: dict[str, list[str]] = {split: [] for split in SPLITS}
    for number, name in enumerate(names):
        starts[split_of(f"person {number}")].append(name)
        for link in LINKS:
            other = rng.randrange(people - 1)
            facts[name, link] = names[other + (other >= number)]  # anybody but oneself
        for amount in NUMBERS:
            facts[name, amount] = str(rng.randint(*AMOUNTS))
    return Town(names, facts, starts)


def short_names(people: int) -> Iterator[str]:
    """bab, bac, ...: as few letters as make so many names, consonants and vowels in turn."""
    for length in itertools.count(3):
        letters = [VOWELS if place % 2 else CONSONANTS for place in range(length)]
        names = ["".join(name) for name in itertools.product(*letters)]
        if len(names) >= people:
            return iter(names)
    raise AssertionError("counting does not end")

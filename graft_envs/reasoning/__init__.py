r"""The datasets of reasoning-gym as environments: one question, one answer in \boxed{}.

The library only runs in worker processes. Some of its scorers `eval` what the policy wrote, or count
to a number in it; some generators print, draw from the global `random`, or depend on the order of a
set. A worker refuses the first, has a time limit for the second, and isolates the rest: equal settings
give equal items in every run.

    make("rg:chain_sum", min_terms=5, max_terms=9)      difficulty: settings of the dataset
    make("rg:composite", datasets=["gcd", "lcm"])       a mixture
"""

from __future__ import annotations

import ast
import base64
import json
import pickle
import random
import re
import zlib
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

from graft.envs.base import BaseEnv, Trace, salted, with_request
from graft.envs.entry import EnvEntry
from graft.envs.splits import check_split, split_of
from graft.rewards.answers import in_words
from graft.rewards.worker_pool import NoWorkers, WorkerError, WorkerPool
from graft.text.parse import last_boxed
from graft.types import Author, Turn
from graft_envs.reasoning.checks import score_item

_LISTED = """
ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation
binary_matrix bitwise_arithmetic boxnet caesar_cipher calendar_arithmetic chain_sum circuit_logic
codeio coin_flip color_cube_rotation complex_arithmetic composite count_bits count_primes countdown
course_schedule cryptarithm decimal_arithmetic decimal_chain_sum dice emoji_mystery
family_relationships figlet_font fraction_simplification futoshiki game_of_life
game_of_life_halting gcd graph_color group_anagrams gsm_symbolic intermediate_integration
isomorphic_strings jugs kakurasu knight_swap knights_knaves largest_island lcm leg_counting
letter_counting letter_jumble list_functions mahjong_puzzle manipulate_matrix maze mini_sudoku
modulo_grid n_queens needle_haystack number_filtering number_format number_sequence number_sorting
palindrome_generation palindrome_partitioning path_star polynomial_equations
polynomial_multiplication pool_matrix power_function prime_factorization products
propositional_logic puzzle24 quantum_lock ransom_note rearc rectangle_count rotate_matrix
rotten_oranges rubiks_cube rush_hour self_reference sentence_reordering shortest_path
simple_equations simple_geometry simple_integration sokoban spell_backward spiral_matrix
string_insertion string_manipulation string_splitting string_synthesis sudoku survo syllogism
time_intervals tower_of_hanoi tsumego word_ladder word_sequence_reversal word_sorting zebra_puzzles
"""

NAMES = tuple(_LISTED.split())
"""The datasets of reasoning-gym 0.1.25, written out so that listing them needs no import."""

MIXTURE = ("chain_sum", "gcd", "letter_counting", "number_sorting")
"""What rg:composite mixes if nothing else is named."""

REASONING: dict[str, EnvEntry] = {
    f"rg:{name}": EnvEntry(
        "graft_envs.reasoning:Reasoning", {"name": name}, needs=("package:reasoning-gym",)
    )
    for name in NAMES
}

REQUEST = "Give the final answer in \\boxed{}."

GENERATE_LIMIT = 60.0  # seconds; the slowest items take one
SCORE_LIMIT = 5.0
MAX_ANSWER = 20_000  # characters; no dataset asks for more
MAX_TRIES = 1000  # items looked at until one is of the wanted split
BLOCK = 500  # items of one library dataset; some of those cannot be made much larger

WORKERS = WorkerPool("graft_envs.reasoning:warm", size=4)


class ReasoningItem(NamedTuple):
    """One question. `entry` is the library's record of it, which only a worker unpickles."""

    question: str
    gold: str | None
    entry: str
    is_plain: bool
    """Scored by comparing texts, which needs no worker."""
    split: str
    """Decided by its question."""


class Reasoning(BaseEnv):
    """Reward: the score of the dataset's own scorer, from 0 to 1; 0 without a box, and 0 for answers that
    solve nothing but that the scorer pays for: see `graft_envs.reasoning.checks`.

    `size` items are generated from `dataset_seed`, each on first use, and shared by all envs with
    the same settings; size=10**9 costs nothing more. One in ten, by its text, is held out as split
    "test". `request` follows the question; "" shows the question alone, as GEM does. Further arguments are
    those of the dataset: its sizes and difficulty.
    """

    blocking = True
    saved = (*BaseEnv.saved, "idx")

    def __init__(
        self,
        name: str,
        *,
        size: int = 500,
        dataset_seed: int = 42,
        split: str = "train",
        request: str = REQUEST,
        **config: Any,
    ) -> None:
        super().__init__()
        if find_spec("reasoning_gym") is None:
            raise ImportError(
                f'env rg:{name} needs the reasoning-gym package: pip install "graft-rl[envs]"'
            )
        if size < 1:
            raise ValueError(f"size={size}: must be 1 or more")
        self.name = name
        self.size = size
        self.split = check_split(split)
        self.dataset_seed, self.config, self.request = dataset_seed, config, request
        self.idx = 0
        if config:  # a wrong setting is reported here and not in the first episode
            item(self.settings, 0)

    @property
    def settings(self) -> str:
        """What fixes the items. With a salt their seed is not the one that the library is published with."""
        seed = self.dataset_seed
        if self.task_salt:  # 31 bits: numpy takes no more than 32
            seed = salted(seed, self.task_salt) >> 22
        return json.dumps([self.name, min(self.size, BLOCK), seed, self.config], sort_keys=True)

    def pose(self) -> str:
        for _ in range(MAX_TRIES):
            self.idx = self.rng.randrange(self.size)
            found = item(self.settings, self.idx)
            if found.split == self.split:
                self.answer = found.gold
                return with_request(found.question, self.request)
        raise ValueError(
            f"rg:{self.name}: none of {MAX_TRIES} items is of the {self.split} split; "
            f"make size={self.size} larger, or widen its settings"
        )

    def respond(self, action: str) -> Turn:
        answer = last_boxed(action) or ""
        has_answer = bool(answer.strip())  # some scorers accept an empty box
        score = self._score(spellings(answer)) if has_answer and len(answer) <= MAX_ANSWER else 0.0
        return Turn(reward=score, terminated=True, info={"has_answer": has_answer})

    def _score(self, answers: list[str]) -> float:
        found = item(self.settings, self.idx)
        if found.is_plain and found.gold is not None:
            return max(text_score(answer, found.gold) for answer in answers)
        try:
            arguments = (self.settings, found.entry, answers)
            return WORKERS.call("graft_envs.reasoning:score", *arguments, timeout=SCORE_LIMIT)
        except NoWorkers:  # the answer was not scored, so it must not count as wrong
            raise
        except WorkerError:  # the scorer ran out of time or memory
            return 0.0

    def demonstrate(self, rng: random.Random) -> Trace:
        if self.answer is None:
            return super().demonstrate(rng)
        return [(Author.POLICY, f"\\boxed{{{self.answer}}}")]

    def describe(self) -> dict[str, Any]:
        return {"dataset": self.name, "idx": self.idx}

    def sample_random_action(self) -> str:
        return f"\\boxed{{{self.action_rng().randint(0, 100)}}}"


def spellings(answer: str) -> list[str]:
    r"""The readings of a boxed text, the text itself first: for the scorers every blank is part of
    the answer, and models often write words as \text{...} there.

    >>> spellings(r" \text{Ann}")
    [' \\text{Ann}', '\\text{Ann}', 'Ann']
    """
    if "\\" not in answer and answer == answer.strip():
        return [answer]
    return list(dict.fromkeys([answer, answer.strip(), in_words(answer)]))


def text_score(answer: str, gold: str) -> float:
    """1 for the gold text itself, its share of the characters for an answer that contains it, else 0.

    >>> text_score("so it is 12", "12")
    0.18181818181818182
    """
    if answer == gold:
        return 1.0
    return len(gold) / len(answer) if answer and gold in answer else 0.0


@lru_cache(maxsize=4096)
def item(settings: str, idx: int) -> ReasoningItem:
    """Item `idx` of the dataset with these settings."""
    try:
        found = WORKERS.call("graft_envs.reasoning:generate", settings, idx, timeout=GENERATE_LIMIT)
    except WorkerError as error:
        name, size, seed, config = json.loads(settings)
        raise ValueError(
            f"rg:{name} with size={size}, dataset_seed={seed}, {config} gives no item: {error}"
        ) from error
    return ReasoningItem(*found)


# what follows runs in a worker


def warm() -> None:
    """Import the library, and keep its scorers from executing the policy's text."""
    import sympy
    from reasoning_gym.algorithmic import binary_matrix, spiral_matrix, string_insertion
    from reasoning_gym.games import countdown, n_queens, puzzle24

    for module in (binary_matrix, spiral_matrix, string_insertion, n_queens):
        vars(module)["eval"] = ast.literal_eval  # they expect a literal list
    parse_formula = sympy.parse_expr

    def parse_checked(text: str, *args: Any, **kwargs: Any) -> Any:
        check_formula(text)
        return parse_formula(text, *args, **kwargs)

    for module in (sympy, countdown, puzzle24):  # sympy's parser calls `eval` too
        vars(module)["parse_expr"] = parse_checked


_FORMULA = re.compile(r"[0-9A-Za-z+\-*/^()., \t]*", re.ASCII)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*")
_FUNCTIONS = re.compile(r"a?(?:sin|cos|tan)|sinh|cosh|tanh|sec|csc|cot|exp|log|ln|sqrt|Abs|pi")


def check_formula(text: str) -> None:
    """ValueError unless this is arithmetic with single letters and known functions."""
    if not _FORMULA.fullmatch(text) or re.search(r"\.\s*[A-Za-z]", text):
        raise ValueError("not a formula")
    for name in _NAME.findall(text):
        if len(name) > 1 and not _FUNCTIONS.fullmatch(name):
            raise ValueError(f"unknown name {name!r}")


@lru_cache(maxsize=32)
def _dataset(settings: str, block: int) -> Any:
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    name, size, seed, config = json.loads(settings)
    if name == "composite":
        mixed = config.get("datasets", MIXTURE)
        if not mixed:
            raise ValueError('it mixes other datasets; name them: datasets=["gcd", "lcm"]')
        parts = [part if isinstance(part, dict) else {"name": part} for part in mixed]
        config["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}, **one}) for one in parts]
    # items of seed s are often drawn with s, s + 1, ...: the next block starts after them
    return reasoning_gym.create_dataset(name, size=size, seed=seed + block * BLOCK, **config)


def generate(settings: str, idx: int) -> ReasoningItem:
    import numpy
    from reasoning_gym.dataset import ProceduralDataset

    block, place = divmod(idx, BLOCK)
    dataset = _dataset(settings, block)
    # a few draw from the global generators: seed those by the item alone
    seed = zlib.crc32(f"{settings} {idx}".encode())
    random.seed(seed)
    numpy.random.seed(seed)
    entry = dataset[place]
    is_plain = type(dataset).score_answer is ProceduralDataset.score_answer
    packed = base64.b64encode(pickle.dumps(entry)).decode()
    question = entry["question"]
    return ReasoningItem(question, entry["answer"], packed, is_plain, split_of(question))


def score(settings: str, packed: str, answers: list[str]) -> float:
    """The score of the best of several spellings of one answer; 0 if none can be parsed."""
    entry = pickle.loads(base64.b64decode(packed))  # written by `generate`, above
    dataset = _dataset(settings, 0)
    return max(score_item(dataset.score_answer, answer, entry) for answer in answers)

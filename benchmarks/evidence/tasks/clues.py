"""Results of which some have to be interpreted and the others say nothing, in single characters.

    >                        the prompt
    ?     k;                 a call, and a clue: the next turn begins with the digit that k stands for
    7?    .;                 that digit and the next call; a distractor, after which nothing is to be decided
    ?     m;
    4?    .;
    !                        the end: 1.0 if every clue was read right

What a letter stands for is in no prompt. The teacher knows it some of the time, so that a policy that
imitates it is unsure after a clue, sure after a distractor, and can learn the letters from rewards.
"""

from __future__ import annotations

import random

from graft.envs.base import BaseEnv, Trace
from graft.envs.splits import check_split, split_of
from graft.types import Author, Turn

LETTERS = "bcdfghjklm"
DIGITS = "3907152846"
"""Letter number n stands for digit number n of these."""
NOTHING = "."


class Clues(BaseEnv):
    """`clues` of `results` results are letters, the others distractors; in an order drawn for the task."""

    env_id = "clues"
    stop = ("?",)
    observe_as = "inline"
    alphabet = "".join(sorted({*LETTERS, *DIGITS, *">?!;.?"}))
    saved = (*BaseEnv.saved, "results", "is_right")

    def __init__(self, *, results: int = 6, clues: int = 3, split: str = "train") -> None:
        super().__init__()
        if not 1 <= clues <= results:
            raise ValueError(f"clues={clues}: must be 1 to results={results}")
        self.num_results, self.num_clues = results, clues
        self.split = check_split(split)
        self.max_turns = results + 1
        self.results: list[str] = []
        self.is_right = True

    def pose(self) -> str:
        while True:
            letters = self.rng.sample(LETTERS, self.num_clues)
            self.results = [*letters, *NOTHING * (self.num_results - self.num_clues)]
            self.rng.shuffle(self.results)
            if split_of("".join(self.results)) == self.split:
                self.is_right = True
                return ">"

    def respond(self, action: str) -> Turn:
        is_last = self.turns == self.num_results
        self.is_right &= action == self._note(self.turns) + ("!" if is_last else "?")
        if is_last or not action.endswith("?"):
            reward = float(self.is_right and is_last)
            return Turn(reward=reward, terminated=True, info={"is_right": reward > 0})
        return Turn(f"{self.results[self.turns]};", info={"tool": "look", "tool_ok": True})

    def demonstrate(self, rng: random.Random, right_rate: float = 0.5) -> Trace:
        """Read each clue right with probability `right_rate`, else write any other digit."""
        trace: Trace = []
        for number in range(self.num_results + 1):
            note = self._note(number)
            if note and rng.random() >= right_rate:
                note = rng.choice(DIGITS.replace(note, ""))
            if number == self.num_results:
                return [*trace, (Author.POLICY, f"{note}!")]
            trace.append((Author.POLICY, f"{note}?"))
            trace.append((Author.ENV, f"{self.results[number]};"))
        return trace

    def _note(self, turn: int) -> str:
        """What a right turn begins with: the digit of the result before it, "" after a distractor."""
        before = self.results[turn - 1] if turn else NOTHING
        return "" if before == NOTHING else DIGITS[LETTERS.index(before)]

"""The environment: ten drawers, each locked until a note names it. The last note has a letter on it.

    3?          the prompt: begin at drawer 3
    [3] 7;      a call of the tool, and its result: the note says drawer 7
    [7] c;      this note has a letter on it
    c           the answer

The policy is a tiny model that reads single characters; the last section of README.md says what changes
for a real one.
"""

import graft
from graft.envs.splits import split_of
from graft.tools.formats import CallStyle
from graft.types import Author

LETTERS = "abcdefgh"


class Drawers(graft.BaseEnv):
    # the characters of prompts, calls, results and answers: the vocabulary of a model from scratch
    alphabet = f"0123456789{LETTERS}?[];x"
    # one turn without a call ends the attempt; calls are counted by the tool's own limit below
    max_turns = 1
    # how a call is written; without "styles" it is <open>3</open>, and without "instructions" the
    # prompt explains the tool, as a real model needs it
    tool_options = {
        "styles": {"open": CallStyle(open="[", close="]", result="{};", error="x;", spent="x;")},
        "instructions": "",
        "max_uses": 4,
    }

    def __init__(self, *, hops=(1, 3), split="train"):
        super().__init__()
        self.hops = tuple(hops)  # drawers on the way, at least and at most
        self.split = split  # "train" or "test": held-out evaluation asks for the other one

    def pose(self):
        """Draw a task from self.rng, set the answer, return the prompt."""
        while True:
            self.path = self.rng.sample(range(10), self.rng.randint(*self.hops))
            self.answer = self.rng.choice(LETTERS)
            # a hash of the task decides its split, so no held-out task is ever trained
            if split_of(f"{self.path}{self.answer}") == self.split:
                break
        self.opened = 0  # the state that the tool changes; every attempt has its own copy
        self.locked = 0
        return f"{self.path[0]}?"

    @graft.tool
    def open(self, drawer: int) -> str:
        """Open a drawer and read the note in it.

        Args:
            drawer: Its number.
        """
        if self.opened == len(self.path) or drawer != self.path[self.opened]:
            self.locked += 1
            return "x"  # locked: no note has named it yet
        self.opened += 1
        return str(self.path[self.opened]) if self.opened < len(self.path) else self.answer

    def respond(self, action):
        """Answer a turn without a call. `info` of the last turn reaches the reward."""
        is_right = action.strip() == self.answer
        return graft.Turn(reward=float(is_right), terminated=True, info={"locked": self.locked})

    def demonstrate(self, rng, open_rate=0.3):
        """The teacher of the warm-up: opens the drawers in a share of the cases, else guesses."""
        if rng.random() >= open_rate:
            return [(Author.POLICY, rng.choice(LETTERS))]
        trace = []
        for number, drawer in enumerate(self.path, 1):
            note = self.path[number] if number < len(self.path) else self.answer
            trace += [(Author.POLICY, f"[{drawer}]"), (Author.ENV, f"{note};")]
        return [*trace, (Author.POLICY, self.answer)]

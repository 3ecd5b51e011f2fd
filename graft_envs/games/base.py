r"""The base class of games: a boxed move per turn, a turn limit, a board.

    task    rules, then the board and a request for a move
    policy  "Half of what is left: \boxed{10}"
    env     "Turn 1: 10. The hidden number is higher.", then the board and a request again

A subclass writes `draw_instance` (draw the instance), `rules`, `board`, and `move` (one parsed action). The
board is the end of every observation and repeated as `info["suffix"]`, so that a history wrapper can
drop outdated boards. `teacher_moves` are the moves of a program that plays the game.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self

from graft.envs.base import BaseEnv, Trace
from graft.types import Author, Turn

BOX = "\\boxed{"
MAX_ECHO = 40  # characters of an action that feedback repeats

new_turn = tuple.__new__
"""`new_turn(Turn, values)` skips Turn's defaults and costs half as much; every step makes one."""

MoveResult = tuple[str, float, bool]
"""Feedback, reward, whether the game is over. A plain tuple, because every step makes one."""


class Game(BaseEnv):
    """Turns of `\\boxed{...}`; 1.0 in all for a won game.

    An action that cannot be parsed ends the game with `format_error`. One that breaks the rules
    earns 0, changes nothing and uses up its turn. The turn limit is a rule of the game: its Turn is
    both terminated and truncated.
    """

    box: ClassVar[str] = BOX
    """`graft play` writes it before what the user types."""
    pattern: ClassVar[re.Pattern[str]]
    r"""Matches a whole box, from its "\boxed{" on; its groups go to `move`. The last match counts.

    It must take linear time: policies write a megabyte of blanks.
    """
    format_error = -0.1
    SIZES: ClassVar[tuple[tuple[int, ...], ...]] = ()
    """Rows of sizes, max_turns last; sizes given as None are drawn from them with each instance."""
    saved = (*BaseEnv.saved, "max_turns", "earned")

    def __init__(self, max_turns: int | None, **sizes: int | None) -> None:
        """The `sizes`, given or drawn, become attributes."""
        super().__init__()
        if max_turns is not None and max_turns < 1:
            raise ValueError(f"max_turns={max_turns}: must be 1 or more")
        self.max_turns = max_turns
        self.size_names = (*sizes, "max_turns")
        self.sizes: tuple[tuple[int, ...], ...] = ()
        self.is_fixed = False  # whether all instances have the same sizes, and so the same rules
        if sizes:
            self.sizes = playable_sizes(self.SIZES, **sizes, max_turns=max_turns)
            self.is_fixed = len(self.sizes) == 1
            known = self.size_names if self.is_fixed else sizes  # max_turns is drawn too
            vars(self).update(zip(known, self.sizes[0], strict=False))
        self.fixed_rules = ""
        self.earned = 0.0
        self.opening = ""  # the first board of the episode
        self.has_one_group = self.pattern.groups == 1
        self.match = self.pattern.match  # on the instance: a shorter attribute lookup

    def draw_instance(self) -> None:
        """Draw the instance from `self.rng` and set `self.answer`, in plain data."""
        raise NotImplementedError(f"{type(self).__name__} must write draw_instance()")

    def rules(self) -> str:
        """Goal, sizes, turn limit, form of the answer, and one example."""
        raise NotImplementedError(f"{type(self).__name__} must write rules()")

    def board(self) -> str:
        """The current position, and a request for the next move."""
        raise NotImplementedError(f"{type(self).__name__} must write board()")

    def move(self, *groups: Any, **_: Any) -> MoveResult:  # a subclass names the groups
        """Play one parsed action."""
        raise NotImplementedError(f"{type(self).__name__} must write move()")

    def teacher_moves(self, rng: random.Random) -> Iterator[str]:
        """A teacher's moves from here on, without boxes; each is played before the next is requested.

        So the teacher reads the result of a move from the game itself. `rng` decides between equally
        good moves. The iterator may end before the game does.
        """
        raise NotImplementedError(f"{type(self).__name__} has no teacher: write teacher_moves()")

    def demonstrate(self, rng: random.Random) -> Trace:
        """The teacher's game to its end, played on a copy of this one.

        Guess the number, hidden 7 of 1..10:

            policy  \\boxed{5}
            env     Turn 1: 5. The hidden number is higher. ...
            policy  \\boxed{7}
        """
        return self.played(lambda twin: twin.teacher_moves(rng))

    def played(self, moves_of: Callable[[Self], Iterator[str]]) -> Trace:
        """The rest of the game on a copy, by the moves that `moves_of` draws from it."""
        if self.is_over:
            raise RuntimeError(f"env {self.env_id!r}: no game is running; call reset() first")
        twin = self.fork()
        trace: Trace = []
        for move in moves_of(twin):
            action = f"{BOX}{move}}}"
            turn = twin.step(action)
            trace += [(Author.POLICY, action), (Author.ENV, turn.observation)]
            if turn.is_over:
                break
        return trace[:-1]  # without the answer to the last move

    def reward_at_limit(self, reward: float) -> float:
        """The reward of the last turn, if the move itself did not end the game."""
        return reward

    def earn(self, score: float) -> float:
        """The reward that raises this episode's sum of rewards to `score`.

        Because differences are paid, the rewards of a won game add up to 1.0 to the last bit: three
        thirds are 0.333..., 0.333... and the rest up to 1.
        """
        reward = score - self.earned
        self.earned += reward
        return reward

    def pose(self) -> str:
        self.earned = 0.0
        if len(self.sizes) > 1:
            row = self.rng.choice(self.sizes)
            vars(self).update(zip(self.size_names, row, strict=True))
        self.draw_instance()
        self.opening = board = self.board()
        rules = self.fixed_rules or self.rules()
        if self.is_fixed:  # writing them costs as much as a turn
            self.fixed_rules = rules
        return f"{rules}\n{board}"

    def margins(self) -> dict[str, Any]:
        return {"suffix": self.opening}

    def state_key(self) -> str:
        """The position: what it has drawn and what was played, without the number of turns."""
        return self.saved_beyond(Game.saved)

    def step(self, action: str) -> Turn:
        # one function and not respond() within BaseEnv.step, which a small game would measurably notice
        if self.is_over:
            raise RuntimeError(f"env {self.env_id!r}: no game is running; call reset() first")
        self.turns = number = self.turns + 1
        # nearly always the last box matches; at -1 (no box) the pattern does not match
        found = self.match(action, action.rfind(BOX)) or last_box(self.pattern, action)
        if found is None:
            self.is_over = True
            text = f"Turn {number}: no action in the required form was found; the game is over."
            values = (text, self.format_error, True, number == self.max_turns, {})
            return new_turn(Turn, values)
        # unpacking a tuple costs as much as matching; most games have one group
        played = self.move(found[1]) if self.has_one_group else self.move(*found.groups())
        feedback, reward, is_over = played
        if is_over:
            self.is_over = True
            return new_turn(Turn, (f"Turn {number}: {feedback}", reward, True, False, {}))
        if number == self.max_turns:
            self.is_over = True
            text = f"Turn {number}: {feedback}\nAll {number} turns are used up; the game is over."
            return new_turn(Turn, (text, self.reward_at_limit(reward), True, True, {}))
        board = self.board()
        text = f"Turn {number}: {feedback}\n{board}"
        return new_turn(Turn, (text, reward, False, False, {"suffix": board}))


def invalid(why: str) -> MoveResult:
    """The result of a move that breaks the rules: nothing happens, the turn is used up."""
    return f"{why} This move is invalid.", 0.0, False


def last_box(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    r"""The last place where `pattern` matches a box: "\boxed{3} or \boxed{7}" -> the 7."""
    at = text.rfind(BOX)
    while at >= 0:
        if found := pattern.match(text, at):
            return found
        at = text.rfind(BOX, 0, at)
    return None


def whole(digits: str) -> int:
    """The number; 10^18 if it is too long for any board, because the conversion would be slow."""
    return int(digits) if len(digits) <= 18 else 10**18


def echo(text: str) -> str:
    """`text` as feedback repeats it: "ab" -> "ab", a megabyte -> its start."""
    return text if len(text) <= MAX_ECHO else f"{text[:MAX_ECHO]}..."


def playable_sizes(
    known: Sequence[tuple[int, ...]], **given: int | None
) -> tuple[tuple[int, ...], ...]:
    """The sizes that instances are drawn in, max_turns last: one row if all are given.

    A None is filled in from the rows of `known` that agree with the given sizes; a given max_turns
    replaces theirs. With known = (3, 10), (5, 15):

        word_length=4, max_turns=9          (4, 9)
        word_length=5, max_turns=None       (5, 15)
        word_length=None, max_turns=9       (3, 9), (5, 9)
    """
    wanted = tuple(given.values())
    if all(value is not None for value in wanted):
        return (wanted,)  # pyright: ignore[reportReturnType]
    *sizes, max_turns = wanted
    rows = tuple(
        (*row[:-1], max_turns or row[-1])
        for row in known
        if all(size in (None, value) for size, value in zip(sizes, row[:-1], strict=True))
    )
    if not rows:
        stated = ", ".join(f"{name}={value}" for name, value in given.items())
        drawn = ", ".join(map(str, known))
        raise ValueError(
            f"{stated}: a None is drawn from the rows ({', '.join(given)}) = {drawn}, and none "
            "of them fits the others; give all values"
        )
    return rows

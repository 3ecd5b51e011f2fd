r"""Tic-tac-toe for two seats: 1 for a win, -1 for a loss, 0 for a draw; an illegal move loses.

Cells are numbered 1 to 9 by rows. In the syntax "words" a move is \boxed{5}. The syntax "compact" is
for models that read single characters:

    task    x                   the seat, then the board
            .........:
    policy  5;                  ends at ";", inside the policy's own turn
    env     o...x....:          the opponent has taken 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

from graft.envs.multi_agent.base import MultiAgentEnv, read_move
from graft.types import Turn

EMPTY = "."
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
SYNTAXES = ("words", "compact")


def winner(cells: str) -> str:
    """The mark of three in a row, or "".

    >>> winner("XXX.O.O..")
    'X'
    """
    for a, b, c in LINES:
        if cells[a] != EMPTY and cells[a] == cells[b] == cells[c]:
            return cells[a]
    return ""


@cache  # 5,478 positions can be reached
def value(cells: str, mark: str) -> int:
    """What `mark`, which moves next, reaches against perfect play: 1 a win, 0 a draw, -1 a loss."""
    if winner(cells):
        return -1  # the other one has just won
    if EMPTY not in cells:
        return 0
    other = "O" if mark == "X" else "X"
    return max(-value(placed(cells, at, mark), other) for at in free(cells))


def placed(cells: str, at: int, mark: str) -> str:
    return cells[:at] + mark + cells[at + 1 :]


def free(cells: str) -> list[int]:
    return [at for at, cell in enumerate(cells) if cell == EMPTY]


def minimax(game: Any, agent: str, rng: Random) -> str:
    """A best move; among equally good ones, one at random."""
    cells, other = game.cells, "O" if agent == "X" else "X"
    values = {at: -value(placed(cells, at, agent), other) for at in free(cells)}
    best = max(values.values())
    return game.spelled(rng.choice([at for at, worth in values.items() if worth == best]))


class TicTacToe(MultiAgentEnv):
    """X moves first. `syntax` is "words" or, for small models from scratch, "compact"."""

    agents = ("X", "O")
    PLAYERS = {"minimax": minimax}
    teacher = "minimax"
    saved = (*MultiAgentEnv.saved, "cells")

    def __init__(self, *, syntax: str = "words", **seats: Any) -> None:
        if syntax not in SYNTAXES:
            raise ValueError(f"syntax={syntax!r}: must be one of {', '.join(SYNTAXES)}")
        super().__init__(**seats)
        self.is_compact = syntax == "compact"
        if self.is_compact:
            self.stop, self.observe_as = (";",), "inline"
        self.cells = EMPTY * 9

    @property
    def alphabet(self) -> str:
        return "xo.:;\n123456789" if self.is_compact else ""

    def pose(self) -> dict[str, str]:
        self.cells = EMPTY * 9
        if self.is_compact:
            return {"X": f"x\n{self._board()}", "O": "o"}
        return {
            agent: (
                f"Tic-tac-toe. You play {agent}, and X moves first. Cells are numbered 1 to 9 by rows, "
                "from the top left. Three of your marks in a row, column or diagonal win. A move that is "
                "not a free cell loses the game.\nWrite your move as \\boxed{cell}, for example "
                "\\boxed{5}." + (f"\n{self._board()}" if agent == "X" else "")
            )
            for agent in self.agents
        }

    def respond(self, actions: Mapping[str, str]) -> Mapping[str, Turn]:
        ((mark, action),) = actions.items()
        move = action.removesuffix(";").strip() if self.is_compact else read_move(action)
        if len(move) != 1 or move not in "123456789" or self.cells[int(move) - 1] != EMPTY:
            return self.lose([mark])
        self.cells = placed(self.cells, int(move) - 1, mark)
        other = self._other(mark)
        if winner(self.cells):
            return self._ended({mark: 1.0, other: -1.0}, f"{mark} took {move} and wins.")
        if EMPTY not in self.cells:
            return self._ended({mark: 0.0, other: 0.0}, f"{mark} took {move}. A draw.")
        news = self._board() if self.is_compact else f"{mark} took {move}.\n{self._board()}"
        return {other: Turn(news)}

    def lose(self, agents: Sequence[str]) -> Mapping[str, Turn]:
        rewards = {one: -1.0 if one in agents else 1.0 for one in self.agents}
        return self._ended(rewards, f"{agents[0]} made no legal move and loses.")

    def legal_actions(self, agent: str) -> Sequence[str]:
        return [self.spelled(at) for at in free(self.cells)]

    def spelled(self, at: int) -> str:
        return f"{at + 1};" if self.is_compact else f"\\boxed{{{at + 1}}}"

    def _ended(self, rewards: Mapping[str, float], text: str) -> dict[str, Turn]:
        return {
            agent: Turn(text, reward, terminated=True, info={"is_win": reward > 0})
            for agent, reward in rewards.items()
        }

    def _other(self, mark: str) -> str:
        return self.agents[1 - self.agents.index(mark)]

    def _board(self) -> str:
        if self.is_compact:
            return f"{self.cells.lower()}:"
        rows = (" ".join(self.cells[at : at + 3]) for at in (0, 3, 6))
        return "\n".join((*rows, "Your move:"))

"""Move a tower of disks from one peg to another, never a larger disk onto a smaller one."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import lru_cache

from graft_envs.games.base import Game, MoveResult, invalid

PEGS = "ABC"


class TowerofHanoi(Game):
    """1.0 when all disks are on C; at the turn limit the share of the disks that are there.

    Two disks: "A B", "A C", "B C" solves it. n disks take 2^n - 1 moves.
    """

    pattern = re.compile(r"\\boxed\{\s*+([ABCabc])\s*+,?+\s*+([ABCabc])\s*+\}", re.ASCII)
    SIZES = ((3, 10), (4, 20), (5, 35))  # num_disks, max_turns
    saved = (*Game.saved, "num_disks", "pegs")
    num_disks: int

    def __init__(self, *, num_disks: int | None = 4, max_turns: int | None = 20) -> None:
        super().__init__(max_turns, num_disks=num_disks)
        if not 1 <= self.num_disks <= 100:
            raise ValueError(f"{num_disks=}: must be from 1 to 100")
        self.pegs: dict[str, list[int]] = {peg: [] for peg in PEGS}
        """The disks on each peg by size, bottom to top."""

    def draw_instance(self) -> None:
        self.pegs = {"A": list(range(self.num_disks, 0, -1)), "B": [], "C": []}

    def rules(self) -> str:
        return (
            f"Tower of Hanoi with {self.num_disks} disks, disk 1 being the smallest, and three pegs A, "
            "B and C. All disks are on A; bring them to C. A move takes the top disk of one peg to "
            "another peg; no disk may lie on a smaller one.\n"
            f"You have {self.max_turns} turns. Write each move as \\boxed{{from to}}, for example "
            "\\boxed{A C}. What happened so far is shown to you."
        )

    def board(self) -> str:
        pegs = self.pegs
        return picture(tuple(pegs["A"]), tuple(pegs["B"]), tuple(pegs["C"]))

    def move(self, source: str, target: str) -> MoveResult:
        source, target = source.upper(), target.upper()
        here, there = self.pegs[source], self.pegs[target]
        if not here:
            return invalid(f"{source} {target}: there is no disk on {source}.")
        if here is there:
            return invalid(f"{source} {target}: the disk is there already.")
        if there and there[-1] < here[-1]:
            return invalid(f"{source} {target}: disk {here[-1]} is larger than disk {there[-1]}.")
        disk = here.pop()
        there.append(disk)
        if len(self.pegs["C"]) == self.num_disks:
            return f"{source} {target}. All disks are on C.", 1.0, True
        return f"{source} {target}. Disk {disk} moved.", 0.0, False

    def reward_at_limit(self, reward: float) -> float:
        return len(self.pegs["C"]) / self.num_disks

    def teacher_moves(self, rng: random.Random) -> Iterator[str]:
        """The shortest solution, from any position."""
        return self.bring(self.num_disks, "C")

    def bring(self, disk: int, target: str) -> Iterator[str]:
        """The moves that bring a disk and all smaller ones to `target`."""
        if not disk:
            return
        here = next(peg for peg in PEGS if disk in self.pegs[peg])
        if here != target:
            (spare,) = set(PEGS) - {here, target}
            yield from self.bring(disk - 1, spare)
            yield f"{here} {target}"
        yield from self.bring(disk - 1, target)

    def sample_random_action(self) -> str:
        tops = {peg: disks[-1] if disks else self.num_disks + 1 for peg, disks in self.pegs.items()}
        legal = [f"{one} {other}" for one in PEGS for other in PEGS if tops[one] < tops[other]]
        return f"\\boxed{{{self.action_rng().choice(legal or ['A C'])}}}"


@lru_cache(4096)  # formatting three lists costs more than the rest of a turn
def picture(*pegs: tuple[int, ...]) -> str:
    rows = [" ".join(map(str, disks)) or "empty" for disks in pegs]
    lines = [f"{peg}: {row}" for peg, row in zip(PEGS, rows, strict=True)]
    return "The pegs, disks from bottom to top:\n" + "\n".join(lines) + "\nYour next move:"

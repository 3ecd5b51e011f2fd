"""The grammar: an automaton over modes, the mode in which the next token is drawn.

"[" opens a calculator, digits and + are allowed inside, "]" closes it

    mode 0 --"["--> mode 1 --"]"--> mode 0        any other action leaves the mode as it is

    grammar = Automaton(start=0, transitions={(0, id("[")): 1, (1, id("]")): 0})
    tokens  a [ 2 + 3 ] b
    modes   0 0 1 1 1 1 0       the mode each token was drawn in
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from graft.actions.space import ActionSpace


@dataclass(frozen=True, slots=True)
class Automaton:
    """(mode, action) -> next mode; other actions lead to `default[mode]`, or stay in the mode.

    A mode for exactly one token has a default that leaves it: {1: 2} means that after any action
    in mode 1 the next token is drawn in mode 2.
    """

    start: int = 0
    transitions: Mapping[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    default: Mapping[int, int] = field(default_factory=dict[int, int])
    writes: Mapping[tuple[int, int], tuple[int, ...]] = field(
        default_factory=dict[tuple[int, int], tuple[int, ...]]
    )
    """The tokens that (mode, action) writes into the context, if not just the action itself."""
    exits: frozenset[tuple[int, int]] = frozenset()
    """(mode, action) after which the environment answers."""

    def step(self, mode: int, action: int) -> int:
        """The mode after `action` was taken in `mode`."""
        following = self.transitions.get((mode, action))
        return self.default.get(mode, mode) if following is None else following

    def written(self, mode: int, action: int) -> tuple[int, ...]:
        """What the model reads of this decision."""
        return self.writes.get((mode, action)) or (action,)

    def is_exit(self, mode: int, action: int) -> bool:
        return (mode, action) in self.exits

    def walk(self, actions: Iterable[int], mode: int | None = None) -> list[int]:
        """The mode that each action is taken in, from `mode` (or the start) on."""
        modes: list[int] = []
        mode = self.start if mode is None else mode
        for action in actions:
            modes.append(mode)
            mode = self.step(mode, action)
        return modes

    def check(self, space: ActionSpace) -> None:
        """Raise if a mode is outside `space`, or a transition is for an action that its mode forbids."""
        modes = {self.start, *self.default, *self.default.values(), *self.transitions.values()}
        modes.update(mode for mode, _ in self.transitions)
        outside = sorted(mode for mode in modes if not 0 <= mode < space.num_modes)
        if outside:
            raise ValueError(f"the grammar uses modes {outside}; the space has {space.num_modes}")
        for mode, action in self.transitions:
            if not space.allows(mode, action):
                raise ValueError(
                    f"a transition leaves mode {mode} by action {action}, which that mode forbids"
                )
        for mode, action in (*self.writes, *self.exits):
            if not 0 <= mode < space.num_modes or not space.allows(mode, action):
                raise ValueError(
                    f"the grammar has an entry for action {action} in mode {mode}, which forbids it"
                )
        foreign = {token for tokens in self.writes.values() for token in tokens}
        if foreign and not 0 <= min(foreign) <= max(foreign) < space.vocab_size:
            raise ValueError(
                f"a decision writes token {max(foreign)}; the vocabulary has {space.vocab_size}"
            )
        for mode in range(space.num_modes if space.extra else 0):
            for action in np.flatnonzero(space.row(mode)[space.vocab_size :]) + space.vocab_size:
                if not self.writes.get((mode, int(action))):
                    raise ValueError(
                        f"action {action} is beyond the vocabulary and writes nothing in mode "
                        f"{mode}; the model could not see the choice"
                    )

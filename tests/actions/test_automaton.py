"""Automata: the mode each action is taken in."""

from __future__ import annotations

import numpy as np
import pytest

from graft.actions.grammar import Automaton
from graft.actions.space import ActionSpace

A, OPEN, TWO, PLUS, CLOSE = range(5)
CALCULATOR = Automaton(0, {(0, OPEN): 1, (1, CLOSE): 0})


def test_brackets_switch_the_mode_back_and_forth() -> None:
    assert CALCULATOR.walk([A, OPEN, TWO, PLUS, TWO, CLOSE, A]) == [0, 0, 1, 1, 1, 1, 0]
    assert CALCULATOR.step(1, OPEN) == 1 and CALCULATOR.step(0, CLOSE) == 0


def test_a_default_leaves_a_mode_after_any_action() -> None:
    grammar = Automaton(start=2, transitions={(2, A): 2}, default={2: 3, 3: 0})
    assert grammar.walk([A, A, TWO, PLUS, OPEN, CLOSE]) == [2, 2, 2, 3, 0, 0]
    assert grammar.walk([A], mode=3) == [3]


def test_check_finds_modes_and_actions_the_space_does_not_have() -> None:
    allowed = np.array([[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]], dtype=bool)
    space = ActionSpace(5, allowed=allowed)
    CALCULATOR.check(space)
    with pytest.raises(ValueError, match=r"modes \[2, 7\]"):
        Automaton(7, default={0: 2}).check(space)
    with pytest.raises(ValueError, match="leaves mode 0 by action 4"):
        Automaton(0, {(0, CLOSE): 1}).check(space)

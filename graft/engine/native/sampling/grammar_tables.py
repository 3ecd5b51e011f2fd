"""A grammar as tables on the device: many of its steps without the host.

    V rows of the head, K kinds of actions, L lines (modes, and one for those without a grammar)

    action 9 enters a tool (mode 1) and writes the tokens 4 5; action 3 exits it

        kind [V]        which column of the tables an action has: kind[9] = 1, kind[3] = 2, and 0
                        for all that the grammar does not mention
        table [3, L, K] mode afterwards     line 0: 0 1 0     line 1: 1 1 0
                        place in script     line 0: 0 1 0     line 1: 0 0 0     0: writes itself
                        whether it exits    line 0: 0 0 0     line 1: 0 0 1
        script [S]      END 4 5 END         what decisions write, each closed by END

A row that has drawn action 9 is fed 4; then it writes 5 instead of drawing, and draws again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from graft.actions.grammar import Automaton
from graft.actions.space import ActionSpace
from graft.engine.native.sampling.masks import Masks
from graft.protocols import Grammar

END = -1
LEAST_KINDS = 32
LEAST_SCRIPT = 256
"""Sizes of tables are rounded up, so that a captured step serves the next grammar too."""


class GrammarTables(NamedTuple):
    """On the device, at addresses that graphs remember."""

    kind: Tensor  # [V] int32
    table: Tensor  # [3, L, K] int32
    script: Tensor  # [S] int32


class DeviceGrammar:
    """The tables of the grammar in use; those of the next one are written over them."""

    def __init__(self, space: ActionSpace, masks: Masks, device: torch.device) -> None:
        self.space, self.masks, self.device = space, masks, device
        self._buffers: dict[tuple[int, int], GrammarTables] = {}
        self._loaded: dict[tuple[int, int], Automaton] = {}
        self._sizes = (0, 0)
        self._known: Grammar | None = None
        self._is_sound = False

    def follows(self, grammar: Grammar) -> bool:
        """Whether the device can follow it: an automaton that is at home in this space."""
        if grammar is not self._known:
            self._known, self._is_sound = grammar, isinstance(grammar, Automaton)
            if isinstance(grammar, Automaton):
                try:
                    grammar.check(self.space)
                except ValueError:  # its requests are told when the host comes to the fault
                    self._is_sound = False
        return self._is_sound

    def load(self, grammar: Automaton) -> tuple[int, int]:
        """Put the grammar's tables on the device; their sizes (K, S), which `tables` asks for."""
        if self._loaded.get(self._sizes) is grammar:
            return self._sizes
        arrays = tabulate(grammar, self.masks.num_lines, self.masks.width)
        self._sizes = sizes = arrays[1].shape[2], len(arrays[2])
        if sizes not in self._buffers:
            self._buffers[sizes] = GrammarTables(
                *(torch.zeros(a.shape, dtype=torch.int32, device=self.device) for a in arrays)
            )
        if self._loaded.get(sizes) is not grammar:
            for buffer, array in zip(self._buffers[sizes], arrays, strict=True):
                buffer.copy_(torch.from_numpy(array))
            self._loaded[sizes] = grammar
        return sizes

    def tables(self, sizes: tuple[int, int]) -> GrammarTables | None:
        """Of these sizes, whatever they hold; None for the sizes (0, 0) of no grammar."""
        return self._buffers.get(sizes)


def tabulate(
    grammar: Automaton, lines: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """kind, table and script; the last line is that of rows without a grammar."""
    mentioned = sorted(
        {action for _, action in (*grammar.transitions, *grammar.writes, *grammar.exits)}
    )
    column = {action: number for number, action in enumerate(mentioned, 1)}
    kind = np.zeros(width, dtype=np.int32)
    kind[mentioned] = np.arange(1, len(mentioned) + 1)
    table = np.zeros((3, lines, round_up(len(column) + 1, LEAST_KINDS)), dtype=np.int32)
    after, place, is_exit = table
    for line in range(lines):
        after[line] = grammar.default.get(line, line) if line < lines - 1 else line
    for (mode, action), following in grammar.transitions.items():
        after[mode, column[action]] = following
    script = [END]
    for (mode, action), tokens in grammar.writes.items():
        if tokens and tokens != (action,):
            place[mode, column[action]] = len(script)
            script += [*tokens, END]
    for mode, action in grammar.exits:
        is_exit[mode, column[action]] = 1
    padding = round_up(len(script), LEAST_SCRIPT) - len(script)
    return kind, table, np.array(script + [END] * padding, dtype=np.int32)


def round_up(number: int, least: int) -> int:
    """The next power of two, `least` or more."""
    return max(1 << (number - 1).bit_length(), least)

"""A grammar as tables on the device: many of its steps without the host.

    V rows of the head, K columns of actions, M rows: the modes, and one for requests without a grammar

    action 9 enters a tool (mode 1) and writes the tokens 4 5; action 3 exits it

        action_column [V]   the column of an action: 1 for 9, 2 for 3, and 0 for every action that
                            the grammar does not mention
        table [3, M, K]     mode afterwards     row 0: 0 1 0     row 1: 1 1 0
                            start in script     row 0: 0 1 0     row 1: 0 0 0     0: writes itself
                            whether it exits    row 0: 0 0 0     row 1: 0 0 1
        script [S]          END 4 5 END         what actions write, each closed by END

A request that has drawn action 9 is fed 4; then it writes 5 instead of drawing, and draws again.
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
MIN_COLUMNS = 32
MIN_SCRIPT = 256
"""Sizes of tables are rounded up, so that a captured graph serves the next grammar too."""


class GrammarTables(NamedTuple):
    """The tables on the device, at fixed addresses, which captured graphs read."""

    action_column: Tensor  # [V] int32
    table: Tensor  # [3, M, K] int32
    script: Tensor  # [S] int32


class DeviceGrammar:
    """The tables of the grammar in use; the next grammar of the same sizes overwrites them."""

    def __init__(self, space: ActionSpace, masks: Masks, device: torch.device) -> None:
        self.space, self.masks, self.device = space, masks, device
        self._buffers: dict[tuple[int, int], GrammarTables] = {}
        self._loaded: dict[tuple[int, int], Automaton] = {}
        self._sizes = (0, 0)
        self._known: Grammar | None = None
        self._is_valid = False

    def can_follow(self, grammar: Grammar) -> bool:
        """Whether the device can follow it: an `Automaton` that is valid in this action space."""
        if grammar is not self._known:
            self._known, self._is_valid = grammar, isinstance(grammar, Automaton)
            if isinstance(grammar, Automaton):
                try:
                    grammar.check(self.space)
                except ValueError:  # the host fails its requests where it meets the fault
                    self._is_valid = False
        return self._is_valid

    def load(self, grammar: Automaton) -> tuple[int, int]:
        """Copy the grammar's tables to the device; their sizes (K, S), which `tables` takes."""
        if self._loaded.get(self._sizes) is grammar:
            return self._sizes
        arrays = tabulate(grammar, self.masks.num_rows, self.masks.width)
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
        """The tables of these sizes; None for the sizes (0, 0) of no grammar."""
        return self._buffers.get(sizes)


def tabulate(
    grammar: Automaton, rows: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """action_column, table and script; the last row is that of requests without a grammar."""
    mentioned = sorted(
        {action for _, action in (*grammar.transitions, *grammar.writes, *grammar.exits)}
    )
    column = {action: number for number, action in enumerate(mentioned, 1)}
    action_column = np.zeros(width, dtype=np.int32)
    action_column[mentioned] = np.arange(1, len(mentioned) + 1)
    table = np.zeros((3, rows, round_up(len(column) + 1, MIN_COLUMNS)), dtype=np.int32)
    after, script_start, is_exit = table
    for row in range(rows):
        after[row] = grammar.default.get(row, row) if row < rows - 1 else row
    for (mode, action), following in grammar.transitions.items():
        after[mode, column[action]] = following
    script = [END]
    for (mode, action), tokens in grammar.writes.items():
        if tokens and tokens != (action,):
            script_start[mode, column[action]] = len(script)
            script += [*tokens, END]
    for mode, action in grammar.exits:
        is_exit[mode, column[action]] = 1
    padding = round_up(len(script), MIN_SCRIPT) - len(script)
    return action_column, table, np.array(script + [END] * padding, dtype=np.int32)


def round_up(number: int, least: int = 1) -> int:
    """The next power of two, `least` or more; 0 stays 0."""
    return max(1 << (number - 1).bit_length(), least) if number else 0

"""The table of an action space as the engine reads it: as wide as the head, one line per mode.

    V rows of the head: the vocabulary, actions beyond it, padding

    vocabulary a b c, action "call", padding _            a b c call _
        mode 0  a token or the call                       1 1 1  1   0
        mode 1  inside the call: b or c                   0 1 1  0   0
        plain   who follows no grammar                    1 1 1  0   0

Nobody can say what an action beyond the vocabulary writes but a grammar, so whoever has none draws
tokens only. Inside a tool a few actions are allowed, and only their rows of the head are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graft.actions.space import ActionSpace
from graft.engine.native.scheduler import SampleRequest
from graft.models.shape import ModelShape

NARROW = 256
"""Actions of a narrow mode at most; more than a quarter of the head is never narrow."""


FEW = 1024
"""Columns that a mode may forbid to be told by them rather than by its whole line."""


@dataclass(frozen=True, slots=True)
class Narrow:
    """What narrow modes allow, all of them together: `columns` [n] of the head."""

    lines: frozenset[int]
    columns: Tensor
    allowed: Tensor
    """[lines, n] bool, those columns of the table."""
    place: dict[int, int]
    """Where in `columns` an action stands."""


class Masks:
    """`allowed` [modes + 1, V] bool; None: one mode, and the head has nothing but tokens."""

    def __init__(self, space: ActionSpace, shape: ModelShape, device: torch.device) -> None:
        self.width = shape.head_rows
        self.num_lines = space.num_modes + 1
        self.plain = space.num_modes
        self.allowed: Tensor | None = None
        self.narrow: Narrow | None = None
        self.forbidden: list[tuple[int, Tensor | None]] = []
        """Of each line: the first one that is equal to it, and what it forbids, where that is little."""
        if space.allowed is None and self.width == shape.vocab_size:
            return
        table = np.zeros((self.num_lines, self.width), dtype=np.bool_)
        for mode in range(space.num_modes):
            table[mode, : space.num_actions] = space.row(mode)
        table[self.plain, : space.vocab_size] = table[0, : space.vocab_size]
        self.allowed = torch.from_numpy(table).to(device)
        known: dict[bytes, tuple[int, Tensor | None]] = {}
        for line, row in enumerate(table):
            few = np.flatnonzero(~row)
            columns = torch.from_numpy(few).to(device) if len(few) <= FEW else None
            self.forbidden.append(known.setdefault(row.tobytes(), (line, columns)))
        is_narrow = table.sum(axis=1) <= min(NARROW, self.width // 4)
        if is_narrow.any():
            columns = np.flatnonzero(table[is_narrow].any(axis=0))
            self.narrow = Narrow(
                frozenset(np.flatnonzero(is_narrow).tolist()),
                torch.from_numpy(columns).to(device),
                torch.from_numpy(table[:, columns]).to(device),
                {action: place for place, action in enumerate(columns.tolist())},
            )

    def forbidden_to_all(self, requests: list[SampleRequest]) -> Tensor | None:
        """The few columns that every one of these may not draw; None if they differ, or many are."""
        if not self.forbidden:
            return None
        kinds = {self.forbidden[self.line(request)][0] for request in requests}
        return self.forbidden[kinds.pop()][1] if len(kinds) == 1 else None

    def line(self, request: SampleRequest) -> int:
        """The line of the table that the request's next draw obeys."""
        return self.plain if request.grammar is None else request.mode

"""The table of an action space as the engine uses it: as wide as the head, one row per mode.

    V rows of the head: the vocabulary, actions beyond it, padding

    vocabulary a b c, action "call", padding _            a b c call _
        mode 0  a token or the call                       1 1 1  1   0
        mode 1  inside the call: b or c                   0 1 1  0   0
        plain   without a grammar                         1 1 1  0   0

Only a grammar defines what an action beyond the vocabulary writes, so a request without one draws
tokens only. Inside a tool a few actions are allowed, and only their rows of the head are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graft.actions.space import ActionSpace
from graft.engine.native.drafts.verification import DrawPlace
from graft.engine.native.request import SampleRequest
from graft.models.shape import ModelShape
from graft.transfer import transfer

MAX_SUBSET = 256
"""Actions of a mode, at most, for which only a subset of the head is computed; and a quarter of it."""

MAX_FORBIDDEN = 1024
"""Columns that a mode forbids, at most, to be masked one by one rather than by its whole row."""

MIN_SLOTS = 64
"""Rows for structures, at least: another table is another capture of every graph."""


@dataclass(frozen=True, slots=True)
class HeadSubset:
    """What the modes `rows`, which allow few actions, allow together: `columns` [n] of the head."""

    rows: frozenset[int]
    columns: Tensor
    allowed: Tensor
    """[modes + 1, n] bool, those columns of the table."""
    index: dict[int, int]
    """Action -> its index in `columns`."""


class Masks:
    """`allowed` [modes + 1, V] bool; None: one mode, and every row of the head is an allowed token."""

    def __init__(self, space: ActionSpace, shape: ModelShape, device: torch.device) -> None:
        self.width, self.device = shape.head_rows, device
        self.num_rows = space.num_modes + 1
        self.plain_row = space.num_modes
        self.allowed: Tensor | None = None
        self.subset: HeadSubset | None = None
        self._written: dict[int | None, bytes] = {}
        """Of each row for structures, its bits; equal ones are mostly one object."""
        self.forbidden: list[tuple[int, Tensor | None]] = []
        """Of each row: the first row equal to it, and the columns it forbids, where they are few."""
        if space.allowed is None and self.width == shape.vocab_size:
            return
        table = np.zeros((self.num_rows, self.width), dtype=np.bool_)
        for mode in range(space.num_modes):
            table[mode, : space.num_actions] = space.row(mode)
        table[self.plain_row, : space.vocab_size] = table[0, : space.vocab_size]
        self.allowed = torch.from_numpy(table).to(device)
        known: dict[bytes, tuple[int, Tensor | None]] = {}
        for number, row in enumerate(table):
            few = np.flatnonzero(~row)
            columns = torch.from_numpy(few).to(device) if len(few) <= MAX_FORBIDDEN else None
            self.forbidden.append(known.setdefault(row.tobytes(), (number, columns)))
        is_small = table.sum(axis=1) <= min(MAX_SUBSET, self.width // 4)
        if is_small.any():
            columns = np.flatnonzero(table[is_small].any(axis=0))
            self.subset = HeadSubset(
                frozenset(np.flatnonzero(is_small).tolist()),
                torch.from_numpy(columns).to(device),
                torch.from_numpy(table[:, columns]).to(device),
                {action: index for index, action in enumerate(columns.tolist())},
            )

    def write(self, requests: list[SampleRequest]) -> Tensor:
        """Copy what structures allow these requests into their rows; the numbers [n] of the changed ones."""
        assert self.allowed is not None
        requests = [each for each in requests if self._written.get(each.slot) is not each.allowed]
        if not requests:
            return torch.empty(0, dtype=torch.int64)
        self._written |= {each.slot: each.allowed for each in requests}
        packed = np.zeros((len(requests), -(-self.width // 8)), dtype=np.uint8)
        for row, request in enumerate(requests):
            bits = np.frombuffer(request.allowed, np.uint8)[: packed.shape[1]]
            packed[row, : len(bits)] = bits
        arrays = {"packed": packed, "rows": np.array([*map(self.row, requests)], np.int64)}
        moved = transfer({k: torch.from_numpy(v) for k, v in arrays.items()}, self.allowed.device)
        shifts = torch.arange(8, dtype=torch.uint8, device=self.allowed.device)
        flags = (moved["packed"][:, :, None] >> shifts & 1).flatten(1)[:, : self.width]
        self.allowed[moved["rows"]] = flags.bool()
        return moved["rows"]

    def assign(self, requests: list[SampleRequest]) -> bool:
        """Give each request under a structure a row of its own; whether that made another table.

        The rows come after all others, so a request draws under its row by the number of it, as under a mode.
        """
        for slot, request in enumerate(requests):
            request.slot = slot
        count = len(requests)
        spare = 0 if self.allowed is None else len(self.allowed) - self.num_rows
        if count <= spare:
            return False
        shape = (max(MIN_SLOTS, 1 << (count - 1).bit_length()), self.width)
        more = torch.zeros(shape, dtype=torch.bool, device=self.device)
        table = self.allowed
        if table is None:
            table = more.new_ones(self.num_rows, self.width)
        self.allowed = torch.cat([table[: self.num_rows], more])
        self._written.clear()
        return True

    def forbidden_to_all(self, places: list[DrawPlace]) -> Tensor | None:
        """The columns that may not be drawn at all of these places; None if they differ, or are many."""
        if not self.forbidden:
            return None
        rows = {self.forbidden[self.place_row(place)][0] for place in places}
        return self.forbidden[rows.pop()][1] if len(rows) == 1 else None

    def row(self, request: SampleRequest) -> int:
        """The row of the table that masks the next draw of the request."""
        return self._row(request, request.mode)

    def place_row(self, place: DrawPlace) -> int:
        """The row of the table that masks the draw at a place."""
        return self._row(place.request, place.mode)

    def _row(self, request: SampleRequest, mode: int) -> int:
        if request.slot is not None:
            return self.num_rows + request.slot
        return self.plain_row if request.grammar is None else mode

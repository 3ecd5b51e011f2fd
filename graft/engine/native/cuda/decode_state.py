"""What the device knows of the rows of a burst, one line each, at addresses that graphs remember.

B rows, P pages of a row
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from graft.engine.native.cuda.kernels.decode import ITEM_FIELDS
from graft.engine.native.cuda.kernels.draw import FIELDS, DrawField
from graft.engine.native.kv.sharing import PageSharing
from graft.engine.native.sampling.masks import Masks
from graft.engine.native.sampling.uniforms import row_keys
from graft.engine.native.scheduler import SampleRequest
from graft.transfer import transfer

MOST_STEPS = 128
"""Of one burst, all its segments together."""


class GraphKey(NamedTuple):
    """What a captured step depends on besides the contents of its buffers."""

    rows: int
    splits: int
    slots: int
    items: int
    lines: int
    stops: int
    has_cut: bool
    rules: tuple[int, int] = (0, 0)
    """Sizes of the grammar's tables, see `rules`."""


class DecodeState:
    """The buffers of one size of batch; those nobody needs are never made."""

    def __init__(self, rows: int, pages: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.device = device
        self.state = zeros(FIELDS, rows, dtype=torch.int64)
        self.table = zeros(rows, pages, dtype=torch.int32)
        self.inv_temperature = zeros(rows)  # 1 / temperature
        self.cuts = zeros(3, rows)  # top-k, top-p, min-p
        self.results = zeros(3, MOST_STEPS, rows)  # action, log-prob, entropy
        self.row = torch.arange(rows, dtype=torch.int64, device=device)
        self._items: dict[int, Tensor] = {}
        self._stops: dict[int, Tensor] = {}

    def items(self, many: int) -> Tensor:
        """Room for so many work items, [n, 5]; see `sharing`."""
        if many not in self._items:
            self._items[many] = self.table.new_zeros(many, ITEM_FIELDS)
        return self._items[many]

    def stops(self, many: int) -> Tensor:
        """Room for so many stop tokens of each row, [B, n]."""
        if many not in self._stops:
            self._stops[many] = self.table.new_zeros(len(self.row), many)
        return self._stops[many]

    def forget(self, key: GraphKey) -> None:
        """No row is alive, no item is left of an earlier burst: a step changes nothing."""
        self.state.zero_()
        self.items(key.items).zero_()

    def write(
        self,
        key: GraphKey,
        requests: list[SampleRequest],
        sharing: PageSharing,
        table: np.ndarray,
        seed: int,
        masks: Masks,
    ) -> None:
        """Tell the device about the rows of a burst, in one copy. None of them owes a description."""
        many = len(requests)
        sequences = [request.sequence for request in requests]
        samplings = [request.sampling for request in requests]
        keys = np.array([request.key for request in requests], dtype=np.uint64)
        state = np.zeros((FIELDS, key.rows), dtype=np.int64)  # rows nobody uses have length 0
        state[DrawField.TOKEN, :many] = [s.tokens[s.cached] for s in sequences]
        state[DrawField.POSITION, :many] = [s.cached for s in sequences]
        state[DrawField.LENGTH, :many] = state[DrawField.POSITION, :many] + 1
        state[DrawField.ROOM, :many] = [r.room - len(r.logprobs) for r in requests]
        state[DrawField.FORCED, :many] = [r.sampling.min_tokens - len(r.logprobs) for r in requests]
        state[DrawField.KEY, :many] = row_keys(seed, keys).view(np.int64)
        state[DrawField.GREEDY, :many] = [s.temperature == 0 for s in samplings]
        state[DrawField.MODE, :many] = [masks.line(request) for request in requests]
        state[DrawField.TAIL, :many] = sharing.tails
        state[DrawField.SHARED, :many] = sharing.slots
        inv_temperature = np.ones(key.rows, dtype=np.float32)
        inv_temperature[:many] = [1.0 / (s.temperature or 1.0) for s in samplings]
        items = np.zeros((key.items, ITEM_FIELDS), dtype=np.int32)
        items[: len(sharing.items)] = sharing.items
        stops = np.full((key.rows, key.stops), -1, dtype=np.int32)
        cuts = np.zeros((3, key.rows), dtype=np.float32)
        cuts[0], cuts[1] = masks.width, 1.0  # everything stays
        for row, request in enumerate(requests if key.stops else ()):
            stops[row, : len(request.stop_tokens)] = list(request.stop_tokens)
        for row, s in enumerate(samplings if key.has_cut else ()):
            if s.temperature > 0:
                cuts[:, row] = (s.top_k or masks.width, s.top_p, s.min_p)
        targets = {
            "state": (state, self.state),
            "table": (table.astype(np.int32), self.table[:many, : table.shape[1]]),
            "coolness": (inv_temperature, self.inv_temperature),
            "items": (items, self.items(key.items)),
            "stops": (stops, self.stops(key.stops)),
            "cuts": (cuts, self.cuts),
        }
        arrays = {name: torch.from_numpy(array) for name, (array, _) in targets.items()}
        moved = transfer(arrays, self.device)
        for name, (_, buffer) in targets.items():
            buffer.copy_(moved[name])

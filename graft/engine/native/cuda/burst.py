"""A burst on the device: its buffers, and the segments that the host reads while the next one runs.

B rows (requests that draw), P pages of a row
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from graft.engine.native.cuda.kernels.decode import ITEM_FIELDS, LOG2_E
from graft.engine.native.cuda.kernels.drafts import DraftState
from graft.engine.native.cuda.kernels.draw import FIELDS, DrawField
from graft.engine.native.drafts.attempts import DraftTexts
from graft.engine.native.kv.sequences import SequenceTree
from graft.engine.native.kv.sharing import PageSharing
from graft.engine.native.kv.states import States
from graft.engine.native.request import Draw, SampleRequest
from graft.engine.native.sampling.masks import Masks
from graft.engine.native.sampling.uniforms import row_keys
from graft.transfer import transfer

NO_TAIL = 1 << 20
"""The tail of an unused row begins after all others: a program that has it beside them begins with theirs."""
SPARE_ITEMS = 4
"""For so many rows a graph may have one work item that is unused."""
SLOT_FIELDS = 5
"""Numbers that `States.slots_ahead` gives for a row, in a model with recurrent layers."""
MAX_STEPS = 128
"""Of one burst, all its segments together."""


class GraphKey(NamedTuple):
    """The sizes and switches that a captured step is specialised for."""

    rows: int
    splits: int
    slots: int
    items: int
    tile_rows: int
    stops: int
    is_truncated: bool
    is_penalized: bool = False
    grammar_sizes: tuple[int, int] = (0, 0)
    """Of the grammar's tables, see `DeviceGrammar.load`."""
    tail_rows: int = 1
    is_matched: bool = False
    """The host finds what structures allow between the last hidden state and the draw: a graph each."""
    in_order: bool = False
    """Attention and log-probs have the bits of the learner's, see `learner_scores`."""
    drafts: int = 0
    """Of the rows, those for drafted tokens; see `kernels.drafts`."""

    def serves(self, other: GraphKey) -> bool:
        """Whether its step computes that of `other` in about the same time: capturing another takes longer
        than a few steps."""
        spare = self.items - other.items
        has_room = 0 <= spare <= max(self.rows // SPARE_ITEMS, 8) and self.stops >= other.stops
        has_room &= self.slots == other.slots or (self.in_order and self.slots > other.slots)
        return has_room and self == other._replace(
            items=self.items, stops=self.stops, slots=self.slots
        )


class DecodeState:
    """The buffers of one batch size, at fixed addresses, which captured graphs read.

    `items`, `stops` and `seen` are allocated on first use.
    """

    def __init__(
        self,
        rows: int,
        pages: int,
        width: int,
        device: torch.device,
        draft: DraftState | None,
        states: States | None = None,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.device = device
        self.state = zeros(FIELDS, rows, dtype=torch.int64)
        self.table = zeros(rows, pages, dtype=torch.int32)
        self.inv_temperature = zeros(rows)  # 1 / temperature
        self.truncations = zeros(3, rows)  # top-k, top-p, min-p
        self.penalty = zeros(rows)  # repetition penalty
        # of rows whose log-probs the learner can compute (`learner_scores`)
        self.exponents = zeros(rows)  # log2 e / temperature, as the learner divides
        self.picked = zeros(3, rows, dtype=torch.int64)  # action, mode, step of the last draw
        self.is_plain = zeros(rows, dtype=torch.int32)  # neither a penalty nor a truncation
        self.results = zeros(3, MAX_STEPS, rows)  # action, log-prob, entropy
        self.row = torch.arange(rows, dtype=torch.int64, device=device)
        self.states = states
        self.slots_ahead = zeros(SLOT_FIELDS, rows, dtype=torch.int64)  # see `States`
        self._width, self.draft = width, draft
        self._context_mask: Tensor | None = None
        self.hidden: Tensor | None = None
        """[B, D] hidden states, where the draw is a graph of its own."""
        self._items: dict[int, Tensor] = {}
        self._stops: dict[int, Tensor] = {}

    def items(self, count: int) -> Tensor:
        """A buffer for `count` work items, [n, 5]; see `kv.sharing`."""
        if count not in self._items:
            self._items[count] = self.table.new_zeros(count, ITEM_FIELDS)
        return self._items[count]

    def stops(self, count: int) -> Tensor:
        """A buffer for `count` stop tokens of each row, [B, n]."""
        if count not in self._stops:
            self._stops[count] = self.table.new_zeros(len(self.row), count)
        return self._stops[count]

    def keep(self, hidden: Tensor) -> None:
        """Copy hidden states to where the graph of the draw reads them."""
        if self.hidden is None:
            self.hidden = torch.empty_like(hidden)
        self.hidden.copy_(hidden)

    @property
    def context_mask(self) -> Tensor:
        """[B, V] bool: the tokens of each row's context, for the repetition penalty."""
        if self._context_mask is None:
            shape = (len(self.row), self._width)
            self._context_mask = torch.zeros(shape, dtype=torch.bool, device=self.device)
        return self._context_mask

    def clear(self, key: GraphKey) -> None:
        """No row is alive and no work item is left of an earlier burst: a step then changes nothing."""
        self.state.zero_()
        self.items(key.items).zero_()
        if self.draft is not None:
            self.draft.counts.zero_()

    def write(
        self,
        key: GraphKey,
        requests: list[SampleRequest],
        sharing: PageSharing,
        table: np.ndarray,
        seed: int,
        masks: Masks,
        steps: int,
        draft_texts: DraftTexts | None,
    ) -> None:
        """Copy the rows of a burst to the device in one transfer; no row is inside a script."""
        count = len(requests)
        sequences = [request.sequence for request in requests]
        samplings = [request.sampling for request in requests]
        keys = np.array([request.key for request in requests], dtype=np.uint64)
        state = np.zeros((FIELDS, key.rows), dtype=np.int64)  # unused rows have length 0
        state[DrawField.TOKEN, :count] = [s.tokens[s.cached] for s in sequences]
        state[DrawField.POSITION, :count] = [s.cached for s in sequences]
        state[DrawField.LENGTH, :count] = state[DrawField.POSITION, :count] + 1
        most_drawn = steps if self.draft is not None else MAX_STEPS
        state[DrawField.BUDGET, :count] = [min(r.budget_left, most_drawn) for r in requests]
        state[DrawField.FORCED, :count] = [
            r.sampling.min_tokens - len(r.logprobs) if r.must_go_on else 0 for r in requests
        ]
        state[DrawField.KEY, :count] = row_keys(seed, keys).view(np.int64)
        state[DrawField.GREEDY, :count] = [s.temperature == 0 for s in samplings]
        state[DrawField.MODE, :count] = [masks.row(request) for request in requests]
        state[DrawField.TAIL] = NO_TAIL
        state[DrawField.TAIL, :count] = sharing.tails
        state[DrawField.SHARED, :count] = sharing.slots
        inv_temperature = np.ones(key.rows, dtype=np.float32)
        inv_temperature[:count] = [1.0 / (s.temperature or 1.0) for s in samplings]
        items = np.zeros((key.items, ITEM_FIELDS), dtype=np.int32)
        items[: len(sharing.items)] = sharing.items
        stops = np.full((key.rows, key.stops), -1, dtype=np.int32)
        truncations = np.zeros((3, key.rows), dtype=np.float32)
        truncations[0], truncations[1] = masks.width, 1.0  # keeps every token
        for row, request in enumerate(requests if key.stops else ()):
            stops[row, : len(request.stop_tokens)] = list(request.stop_tokens)
        for row, s in enumerate(samplings if key.is_truncated else ()):
            if s.temperature > 0:
                truncations[:, row] = (s.top_k or masks.width, s.top_p, s.min_p)
        penalty = np.ones(key.rows, dtype=np.float32)
        penalty[:count] = [s.repetition_penalty for s in samplings]
        targets = {
            "state": (state, self.state),
            "table": (table.astype(np.int32), self.table[:count, : table.shape[1]]),
            "inv_temperature": (inv_temperature, self.inv_temperature),
            "items": (items, self.items(key.items)),
            "stops": (stops, self.stops(key.stops)),
            "truncations": (truncations, self.truncations),
            "penalty": (penalty, self.penalty),
        }
        if self.states is not None:
            slots = np.zeros((SLOT_FIELDS, key.rows), dtype=np.int64)
            ahead = [self.states.slots_ahead(s.carried, s.cached) for s in sequences]
            slots[:, :count] = np.array(ahead).T
            targets["slots_ahead"] = slots, self.slots_ahead
        if key.in_order:
            exponents = np.ones(key.rows)
            exponents[:count] = [LOG2_E / (s.temperature or 1.0) for s in samplings]
            targets["exponents"] = (exponents.astype(np.float32), self.exponents)
            is_plain = np.zeros(key.rows, dtype=np.int32)
            is_plain[:count] = [
                s.repetition_penalty == 1 and not s.is_truncating for s in samplings
            ]
            targets["is_plain"] = (is_plain, self.is_plain)
        if self.draft is not None and draft_texts is not None:
            self.draft.counts.zero_()
            for name, part in draft_texts._asdict().items():
                buffer = getattr(self.draft, name)
                whole = buffer[: len(part)]
                targets[name] = part, whole if part.ndim == 1 else whole[:, : part.shape[1]]
        arrays = {name: torch.from_numpy(array) for name, (array, _) in targets.items()}
        moved = transfer(arrays, self.device)
        for name, (_, buffer) in targets.items():
            buffer.copy_(moved[name])
        if key.is_penalized:
            columns = [
                row * self._width + token
                for row, sequence in enumerate(sequences)
                for token in set(sequence.tokens)
            ]
            self.context_mask.zero_().view(-1)[torch.tensor(columns, device=self.device)] = True


class BurstSegment(NamedTuple):
    """Some steps of a burst, whose results are being copied to the host."""

    first: int  # step of the burst
    results: Tensor  # [3, steps, B]
    drawn: Tensor  # [B] tokens of the burst so far
    drafted: Tensor | None  # [B, 6] see `DraftState.counts`
    steps: int
    is_done: torch.cuda.Event | None


class InflightBurst:
    """The rows of a burst, and the segments that were launched but not read.

    `replay` takes a step; `prepare` is the part of it before the draw, where that is a graph of its own.
    """

    def __init__(
        self,
        requests: list[SampleRequest],
        decode_state: DecodeState,
        prepare: Callable[[], None] | None,
        replay: Callable[[], None],
        steps: int,
        tree: SequenceTree,
    ) -> None:
        self.tree = tree
        self.requests, self.decode_state = requests, decode_state
        self.prepare, self.replay = prepare, replay
        self.left, self.launched, self.steps = steps, 0, steps
        self.has_drafts = decode_state.draft is not None
        self.steps_read, self.drafted = 0, list[int]()
        """Steps of the segment that was read last; sums of `DraftState.counts`."""
        self.is_new = False
        """Whether its graph was captured for it."""
        self.pending: deque[BurstSegment] = deque()
        self._drawn = [0] * len(requests)

    def launch(self, steps: int, first: int | None = None) -> None:
        """Start up to `steps` more steps; every row that is alive draws one token in each. Results are
        copied from step `first` on, if rows are still to be read from there."""
        steps = min(steps, self.left)
        for _ in range(steps):
            self.replay()
        first = self.launched if first is None else first
        self.launched += steps
        self.left -= steps
        # a row that is alive draws one token a step, so a step is an index into its results
        results = self.decode_state.results[:, first : self.launched]
        if self.has_drafts:  # it may have drawn more; what it draws has its number in the burst
            first = 0
            results = self.decode_state.results[:, : self.steps, : len(self.requests)]
        drawn = self.decode_state.state[DrawField.DRAWN]
        is_done = torch.cuda.Event() if results.is_cuda else None
        draft = self.decode_state.draft
        drafted = None if draft is None else _to_host(draft.counts)
        self.pending.append(
            BurstSegment(first, _to_host(results), _to_host(drawn), drafted, steps, is_done)
        )
        if is_done is not None:
            is_done.record()

    @property
    def is_ready(self) -> bool:
        """Whether the oldest segment is complete."""
        is_done = self.pending[0].is_done
        return is_done is None or is_done.query()

    @property
    def is_spent(self) -> bool:
        """Whether most rows have drawn all that they may."""
        drawing = [
            drawn < min(self.steps, request.budget_left + drawn)
            for drawn, request in zip(self._drawn, self.requests, strict=True)
            if not request.is_over
        ]
        return self.has_drafts and 2 * sum(drawing) <= len(drawing)

    def read(self, rows: Sequence[int] | None = None) -> list[Draw]:
        """The draws of the oldest segment, for requests that are not over; `rows`: for these alone."""
        segment = self.pending.popleft()
        if segment.is_done is not None:
            segment.is_done.synchronize()
        rows = range(len(self.requests)) if rows is None else rows
        if segment.drafted is not None:
            self.drafted = segment.drafted.sum(0).tolist()
        drawn = segment.drawn.tolist()
        first, last = segment.first, segment.first + segment.results.shape[1]
        if self.has_drafts:  # of the whole burst, what is new
            first, last = min(self._drawn[row] for row in rows), max(drawn[row] for row in rows)
        new_steps = slice(first - segment.first, last - segment.first)
        # numpy, not torch: tolist() of a transposed array takes a tenth of the time
        results = segment.results.numpy()[:, new_steps, list(rows)].transpose(0, 2, 1)
        tokens = results[0].astype(np.int64).tolist()
        logprobs, entropies = results[1:].tolist()
        draws: list[Draw] = []
        for at, row in enumerate(rows):
            request, before = self.requests[row], self._drawn[row]
            self._drawn[row] = drawn[row]
            number = drawn[row] - before
            if number and not request.is_over:  # else it ended or was cancelled meanwhile
                self.tree.advance(request.sequence, number)
                new = slice(before - first, drawn[row] - first)
                draws.append(Draw(request, tokens[at][new], logprobs[at][new], entropies[at][new]))
        longest = max((len(draw.actions) for draw in draws), default=1)
        self.steps_read = segment.steps if self.has_drafts else longest
        return draws


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, complete when the stream reaches it."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)

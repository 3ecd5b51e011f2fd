"""Steps on a GPU: prompts in chunks, then bursts of decoding that never wait for the host.

    B rows (sequences that draw), P pages of a row

A burst feeds every row its own draws for a number of steps: tokens, positions, lengths and the test
for stop tokens live on the device (`kernels.draw`), and one step, from embedding to drawn token, is
a CUDA graph that is replayed. The host writes down the rows before (`Lines`), and reads what was
drawn segment by segment, each while the next one runs. Graphs are captured on first use, for batches
rounded up to `SIZES`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graft.actions.space import ActionSpace
from graft.engine.native.kernels.cut import cut
from graft.engine.native.kernels.decode import decode, scratch
from graft.engine.native.kernels.draw import FIELDS, State, draw
from graft.engine.native.kernels.extend import BLOCK, extend
from graft.engine.native.runner import Draw
from graft.engine.native.scheduler import Request, Work
from graft.engine.native.sharing import Sharing, share
from graft.engine.native.tree import Tree
from graft.engine.native.uniforms import row_keys
from graft.models.decoder import Decoder
from graft.models.place import Place

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Batches that graphs are captured for; larger ones go on in multiples of 512."""
FILLS = (16, 64, 256, 1024)
"""Tokens of prompts up to which they are computed by a graph, padded to one of these."""
MOST_STEPS = 128
"""Of one burst, all its segments together."""
PATIENCE = 4
"""Chunks of prompts that may run in a row before those who draw get their turn."""
PROGRAMS = 512
"""Parts that a batch's tails are cut into, over all heads: about four to a multiprocessor."""
MOST_SPLITS = 8


class Key(NamedTuple):
    """What a captured step depends on besides the contents of its buffers."""

    rows: int
    splits: int
    slots: int
    items: int
    lines: int
    stops: int
    has_cut: bool


@dataclass(slots=True)
class Lines:
    """The device's memory of one size of batch; graphs hold its addresses."""

    state: Tensor  # [FIELDS, B] int64
    table: Tensor  # [B, P] int32
    coolness: Tensor  # [B]
    cuts: Tensor  # [3, B] float32: top-k, top-p, min-p
    results: Tensor  # [3, MOST_STEPS, B]: token, log-prob, entropy
    row: Tensor  # [B] 0, 1, 2, ...

    @classmethod
    def of(cls, rows: int, pages: int, device: torch.device) -> Lines:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            state=zeros(FIELDS, rows, dtype=torch.int64),
            table=zeros(rows, pages, dtype=torch.int32),
            coolness=zeros(rows),
            cuts=zeros(3, rows),
            results=zeros(3, MOST_STEPS, rows),
            row=torch.arange(rows, dtype=torch.int64, device=device),
        )


class Chunk(NamedTuple):
    """T tokens of prompts and tools' answers, as arrays or on the device."""

    tokens: Any  # [T]
    rows: Any  # [T] line of the table
    positions: Any  # [T]
    blocks: Any  # [n, 4], see `kernels.extend`
    table: Any  # [rows, P]

    def map(self, function: Callable[[Any], Any]) -> Chunk:
        return Chunk(*map(function, self))


class Segment(NamedTuple):
    """Some steps of a burst on their way to the host."""

    first: int
    results: Tensor  # [3, steps, B]
    drawn: Tensor  # [B] tokens of the burst so far
    is_done: torch.cuda.Event | None


class Flight:
    """A burst under way: its rows, and the segments that were launched and not yet read."""

    def __init__(
        self, requests: list[Request], lines: Lines, replay: Callable[[], None], steps: int
    ) -> None:
        self.requests, self.lines, self.replay = requests, lines, replay
        self.left, self.launched = steps, 0
        self.pending: deque[Segment] = deque()
        self._drawn = [0] * len(requests)

    def launch(self, steps: int) -> None:
        steps = min(steps, self.left)
        for _ in range(steps):
            self.replay()
        first, self.launched = self.launched, self.launched + steps
        self.left -= steps
        results = self.lines.results[:, first : self.launched]
        drawn = self.lines.state[State.DRAWN]
        if not results.is_cuda:
            self.pending.append(Segment(first, results.clone(), drawn.clone(), None))
            return
        segment = Segment(first, _copy_to_host(results), _copy_to_host(drawn), torch.cuda.Event())
        assert segment.is_done is not None
        segment.is_done.record()
        self.pending.append(segment)

    def read(self) -> list[Draw]:
        """What the oldest segment drew, for those who still want it."""
        segment = self.pending.popleft()
        if segment.is_done is not None:
            segment.is_done.synchronize()
        many = len(self.requests)
        before, self._drawn = self._drawn, segment.drawn[:many].tolist()
        # numpy, not torch: its lists of a transposed table take a tenth of the time
        results = segment.results.numpy()[:, :, :many].transpose(0, 2, 1)
        tokens = results[0].astype(np.int64).tolist()
        logprobs, entropies = results[1:].tolist()
        draws: list[Draw] = []
        for row, request in enumerate(self.requests):
            number = self._drawn[row] - before[row]
            if number and not request.is_over:  # else it ended, or its caller gave up, on the way
                request.sequence.cached += number
                draws.append(
                    (request, tokens[row][:number], logprobs[row][:number], entropies[row][:number])
                )
        return draws


def _copy_to_host(tensor: Tensor) -> Tensor:
    """A copy that is complete when the stream comes by."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class BurstRunner:
    """Holds the decoder (the trainer's own module) and turns planned work into drawn tokens."""

    def __init__(self, decoder: Decoder, tree: Tree, space: ActionSpace, seed: int) -> None:
        self.decoder, self.tree, self.seed = decoder, tree, seed
        self.device = decoder.device
        self.group = decoder.shape.heads // decoder.shape.kv_heads
        self.widest = -(-decoder.shape.max_positions // tree.pages.size)
        self.allowed = None  # [modes, V]
        if space.allowed is not None:
            self.allowed = torch.tensor(space.allowed, device=self.device)
        self._lines: dict[int, Lines] = {}
        self._items: dict[int, Tensor] = {}
        self._stops: dict[tuple[int, int], Tensor] = {}
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self._fills: dict[int, tuple[Chunk, Tensor, torch.cuda.CUDAGraph]] = {}
        self._pool: tuple[int, int] | None = None
        self._waited = 0

    @torch.no_grad()  # not inference_mode: the trainer must be able to use what we touch
    def run(
        self, works: list[Work], steps: int, segment: int, go_on: Callable[[], bool]
    ) -> Iterator[list[Draw]]:
        """Compute the prompts among the works, or let the others draw up to `steps` tokens each.

        Every `segment` steps there are draws to take; another segment begins if `go_on()`, asked
        before the last one is read, so that the device never waits for the host.
        """
        prompts = [work for work in works if work.request is None]
        drawing = [work for work in works if work.request is not None]
        self.tree.pages.flush_copies()
        if prompts:
            self._extend(prompts)
            self._waited += 1
        if not drawing or (prompts and self._waited < PATIENCE):
            yield []
            return
        self._waited = 0
        flight = self._start(drawing, steps)
        flight.launch(segment)
        while flight.pending:
            if flight.left and go_on():
                flight.launch(segment)
            yield flight.read()

    def rest(self) -> None:
        """Nothing runs. Graphs and their memory stay: the next step comes soon."""

    def _extend(self, works: list[Work]) -> None:
        """Compute tokens nobody draws after: keys and values are all that is wanted of them."""
        count = np.array([work.count for work in works])
        start = np.array([work.sequence.cached for work in works])
        first = count.cumsum() - count
        number = int(count.sum())
        per = -(-count // BLOCK)  # blocks of each sequence
        of = np.arange(len(works)).repeat(per)
        begin = (np.arange(len(of)) - (per.cumsum() - per).repeat(per)) * BLOCK
        width = max(len(work.sequence.pages) for work in works)
        tokens = [t for w in works for t in w.sequence.tokens[w.sequence.cached :][: w.count]]
        chunk = Chunk(
            tokens=np.array(tokens),
            rows=np.arange(len(works)).repeat(count),
            positions=np.arange(number) + (start - first).repeat(count),
            blocks=np.stack(
                [first[of] + begin, np.minimum(count[of] - begin, BLOCK), start[of] + begin, of],
                axis=1,
            ),
            table=self._table([work.sequence.row for work in works], width),
        )
        size = next((size for size in FILLS if size >= number), 0)
        if size and self.device.type == "cuda":
            self._fill(size, chunk)
        else:
            self._compute(chunk.map(self._put), torch.ones(len(works), device=self.device))
        for work in works:
            work.sequence.cached += work.count

    def _fill(self, size: int, chunk: Chunk) -> None:
        """A short chunk through a graph: launched one by one its kernels would wait for the host."""
        if size not in self._fills:
            self._fills[size] = self._capture_fill(size)
        buffers, alive, graph = self._fills[size]
        rows = np.zeros(size, dtype=np.float32)
        rows[: len(chunk.table)] = 1.0
        self._put(rows, alive)
        for array, buffer in zip(chunk, buffers, strict=True):
            whole = np.zeros((buffer.shape[0], *array.shape[1:]), dtype=array.dtype)
            whole[: len(array)] = array
            if array is chunk.rows:
                whole[len(array) :] = size - 1 if len(chunk.table) < size else 0
            target = buffer[:, : array.shape[1]] if array.ndim == 2 else buffer
            target.copy_(self._put(whole))
        graph.replay()

    def _capture_fill(self, size: int) -> tuple[Chunk, Tensor, torch.cuda.CUDAGraph]:
        """Buffers for up to `size` tokens of up to `size` sequences, and the graph that reads them."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        buffers = Chunk(
            tokens=zeros(size),
            rows=zeros(size),
            positions=zeros(size),
            blocks=zeros(size + size // BLOCK, 4, dtype=torch.int32),
            table=zeros(size, self.widest, dtype=torch.int32),
        )
        alive = zeros(size, dtype=torch.float32)
        return buffers, alive, self._record(lambda: self._compute(buffers, alive))

    def _compute(self, chunk: Chunk, alive: Tensor) -> None:
        pool = self.tree.pages.pool
        blocks = chunk.blocks.int()

        def attend(layer: int, q: Tensor, *_: None) -> Tensor:
            return extend(q, pool[layer, 0], pool[layer, 1], chunk.table, blocks)

        place = Place(pool, chunk.table, chunk.rows, chunk.positions, alive)
        self.decoder(chunk.tokens, chunk.positions, attend, place)

    def _start(self, works: list[Work], steps: int) -> Flight:
        """Write the rows down; nothing runs yet."""
        size = batch_size(len(works))
        splits = num_splits(size, self.tree.pages.kv_heads)
        width = max(len(work.sequence.pages) for work in works)
        table = self._table([work.sequence.row for work in works], width)
        sharing = share(table, self.group, self.tree.pages.kv_heads, splits)
        works = [works[i] for i in sharing.order.tolist()]
        requests = [work.request for work in works if work.request is not None]
        samplings = [request.sampling for request in requests]
        shared = int(sharing.slots.max())
        key = Key(
            rows=size,
            splits=splits,
            slots=splits + (round_up(shared) if shared else 0),
            items=round_up(len(sharing.items)) if len(sharing.items) else 0,
            lines=sharing.lines,
            stops=round_up(max(len(request.stop_tokens) for request in requests)),
            has_cut=any(s.is_truncating and s.temperature > 0 for s in samplings),
        )
        lines = self._lines.get(size)
        if lines is None:
            lines = self._lines[size] = Lines.of(size, self.widest, self.device)
        replay = self._replay(key, lines)
        self._write_down(key, lines, requests, sharing, table[sharing.order])
        return Flight(requests, lines, replay, min(steps, MOST_STEPS))

    def _write_down(
        self, key: Key, lines: Lines, requests: List[Request], sharing: Sharing, table: np.ndarray
    ) -> None:
        """Tell the device about the rows of a burst."""
        many = len(requests)
        state = np.zeros((FIELDS, key.rows), dtype=np.int64)  # rows nobody uses have length 0
        sequences = [request.sequence for request in requests]
        samplings = [request.sampling for request in requests]
        state[State.TOKEN, :many] = [s.tokens[s.cached] for s in sequences]
        state[State.POSITION, :many] = [s.cached for s in sequences]
        state[State.LENGTH, :many] = state[State.POSITION, :many] + 1
        state[State.ROOM, :many] = [r.room - len(r.logprobs) for r in requests]
        state[State.FORCED, :many] = [r.sampling.min_tokens - len(r.logprobs) for r in requests]
        keys = np.array([request.key for request in requests], dtype=np.uint64)
        state[State.KEY, :many] = row_keys(self.seed, keys).view(np.int64)
        state[State.GREEDY, :many] = [s.temperature == 0 for s in samplings]
        state[State.MODE, :many] = [request.mode for request in requests]
        state[State.TAIL, :many] = sharing.tails
        state[State.SHARED, :many] = sharing.slots
        self._put(state, lines.state)
        lines.table[:many, : table.shape[1]].copy_(self._put(table))
        coolness = np.ones(key.rows, dtype=np.float32)
        coolness[:many] = [1.0 / (s.temperature or 1.0) for s in samplings]
        self._put(coolness, lines.coolness)
        if key.items:
            items = np.zeros((key.items, sharing.items.shape[1]), dtype=np.int32)
            items[: len(sharing.items)] = sharing.items
            self._put(items, self._items[key.items])
        if key.stops:
            stops = np.full((key.rows, key.stops), -1, dtype=np.int32)
            for row, request in enumerate(requests):
                stops[row, : len(request.stop_tokens)] = list(request.stop_tokens)
            self._put(stops, self._stops[key.rows, key.stops])
        if key.has_cut:
            everything = self.decoder.shape.vocab_size
            cuts = np.tile(np.float32([[everything], [1.0], [0.0]]), (1, key.rows))
            for row, s in enumerate(samplings):
                if s.temperature > 0:
                    cuts[:, row] = (s.top_k or everything, s.top_p, s.min_p)
            self._put(cuts, lines.cuts)

    def _replay(self, key: Key, lines: Lines) -> Callable[[], None]:
        """A call that takes one step; captured where there is a device to capture on."""
        if key.items and key.items not in self._items:
            self._items[key.items] = torch.zeros(
                (key.items, 5), dtype=torch.int32, device=self.device
            )
        if key.stops and (key.rows, key.stops) not in self._stops:
            self._stops[key.rows, key.stops] = torch.zeros(
                (key.rows, key.stops), dtype=torch.int32, device=self.device
            )
        if self.device.type != "cuda":  # Triton's interpreter
            return lambda: self._step(key, lines)
        if key not in self._graphs:
            self._graphs[key] = self._capture(key, lines)
        return self._graphs[key].replay

    def _capture(self, key: Key, lines: Lines) -> torch.cuda.CUDAGraph:
        lines.state.zero_()  # rows of length 0: the steps below change nothing
        if key.items:  # what another batch left there may name rows that this one has not
            self._items[key.items].zero_()
        return self._record(lambda: self._step(key, lines))

    def _record(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            step()  # compiles kernels, lets libraries set themselves up
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        return graph

    def _step(self, key: Key, lines: Lines) -> None:
        """From each row's token to its next one."""
        state, pages = lines.state, self.tree.pages
        shape = self.decoder.shape
        items = self._items[key.items] if key.items else state[:0]
        stops = self._stops[key.rows, key.stops] if key.stops else state[:0].T
        space = scratch(
            key.rows if key.slots > 1 else 0, key.slots, shape.heads, shape.head_dim, self.device
        )

        def attend(layer: int, q: Tensor, *_: None) -> Tensor:
            return decode(
                q,
                pages.pool[layer, 0],
                pages.pool[layer, 1],
                lines.table,
                state[State.LENGTH],
                state[State.TAIL],
                items,
                state[State.SHARED],
                splits=key.splits,
                slots=key.slots,
                rows=key.lines,
                space=space,
            )

        position = state[State.POSITION]
        place = Place(pages.pool, lines.table, lines.row, position, state[State.LENGTH])
        hidden = self.decoder(state[State.TOKEN], position, attend, place)
        logits = self.decoder.logits(hidden)
        floors = None
        if key.has_cut:
            floors = cut(logits, state, lines.coolness, stops, *lines.cuts, allowed=self.allowed)
        draw(
            logits,
            state,
            lines.coolness,
            stops,
            lines.results,
            allowed=self.allowed,
            floors=floors,
        )

    def _table(self, rows: list[int], width: int) -> np.ndarray:
        return self.tree.table[rows, :width].astype(np.int32)

    def _put(self, array: np.ndarray, into: Tensor | None = None) -> Tensor:
        """The array on the device, through pinned memory so that nobody waits."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        if into is None:
            return tensor.to(self.device, non_blocking=True)
        return into.copy_(tensor, non_blocking=True)


def batch_size(rows: int) -> int:
    """The captured size for so many rows."""
    return next((size for size in SIZES if size >= rows), -(-rows // 512) * 512)


def num_splits(rows: int, kv_heads: int) -> int:
    """Parts of a tail: with few rows, more programs to read them."""
    wanted = -(-PROGRAMS // (rows * kv_heads))
    return min(round_up(wanted) if wanted > 1 else 1, MOST_SPLITS)


def round_up(number: int) -> int:
    """The next power of two; 0 stays 0."""
    return 0 if number == 0 else 1 << (number - 1).bit_length()

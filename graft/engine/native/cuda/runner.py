"""Steps on a GPU: prompts in chunks, then bursts of decoding that never wait for the host.

    B rows (sequences that draw)

A burst feeds every row its own draws for a number of steps: tokens, positions, lengths, the test
for stop tokens and the grammar (`DeviceGrammar`) live on the device (`kernels.draw`), and one step, from
embedding to drawn token, is a CUDA graph that is replayed. The host writes down the rows before
(`DecodeState`), and reads what was drawn segment by segment, each while the next one runs (`InflightBurst`).
Graphs are captured on first use, for batches rounded up to `SIZES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from graft.actions.grammar import Automaton
from graft.actions.space import ActionSpace
from graft.engine.native.cpu.runner import Draw
from graft.engine.native.cuda.decode_state import MOST_STEPS, DecodeState, GraphKey
from graft.engine.native.cuda.graphs import Graphs
from graft.engine.native.cuda.inflight import InflightBurst
from graft.engine.native.cuda.kernels.cut import cut
from graft.engine.native.cuda.kernels.decode import decode, scratch
from graft.engine.native.cuda.kernels.draw import DrawField, draw, occupied_chunks
from graft.engine.native.cuda.prefill import Prefill
from graft.engine.native.kv.sequences import SequenceTree
from graft.engine.native.kv.sharing import share
from graft.engine.native.sampling.grammar_tables import DeviceGrammar
from graft.engine.native.sampling.masks import Masks
from graft.engine.native.scheduler import PlannedWork, SampleRequest
from graft.models.decoder import Decoder
from graft.models.kv_slots import KVSlots
from graft.protocols import Grammar

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Batches that graphs are captured for; larger ones go on in multiples of 512."""
PATIENCE = 4
"""Chunks of prompts that may run in a row before those who draw get their turn."""
PROGRAMS = 512
"""Parts that a batch's tails are cut into, over all heads: about four to a multiprocessor."""
MOST_SPLITS = 8


class CudaRunner:
    """Holds the decoder (the trainer's own module) and turns planned work into drawn tokens."""

    bursts = True

    def __init__(
        self, decoder: Decoder, tree: SequenceTree, space: ActionSpace, masks: Masks, seed: int
    ) -> None:
        self.decoder, self.tree, self.masks, self.seed = decoder, tree, masks, seed
        self.device = decoder.device
        self.group = decoder.shape.heads // decoder.shape.kv_heads
        self.rules = DeviceGrammar(space, masks, self.device)
        self.occupied = None if masks.allowed is None else occupied_chunks(masks.allowed)
        self.graphs = Graphs() if self.device.type == "cuda" else None  # else: the interpreter
        self.prompts = Prefill(decoder, tree, self.graphs)
        self._lines: dict[int, DecodeState] = {}
        self._captured: dict[GraphKey, Callable[[], None]] = {}
        self._waited = 0

    @torch.no_grad()  # not inference_mode: the trainer must be able to use what we touch
    def run(
        self, works: list[PlannedWork], steps: int, segment: int, go_on: Callable[[], bool]
    ) -> Iterator[list[Draw]]:
        """Compute the prompts among the works, or let the others draw up to `steps` tokens each.

        Every `segment` steps there are draws to take; another segment begins if `go_on()`, asked
        before the last one is read, so that the device never waits for the host.
        """
        prompts = [work for work in works if work.request is None]
        drawing = [work for work in works if work.request is not None]
        self.tree.pages.flush_copies()
        if prompts:
            self.prompts.compute(prompts)
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

    def follows(self, grammar: Grammar) -> bool:
        """Whether the device can do without the host while a request follows this grammar."""
        return self.rules.follows(grammar)

    def rest(self) -> None:
        """Nothing runs. Graphs and their memory stay: the next step comes soon."""

    def _start(self, works: list[PlannedWork], steps: int) -> InflightBurst:
        """Write the rows down; nothing runs yet."""
        size, kv_heads = batch_size(len(works)), self.tree.pages.kv_heads
        splits = num_splits(size, kv_heads)
        width = max(len(work.sequence.pages) for work in works)
        table = self.tree.table[[work.sequence.row for work in works], :width]
        sharing = share(table, self.group, kv_heads, splits)
        works = [works[i] for i in sharing.order.tolist()]
        requests = [work.request for work in works if work.request is not None]
        samplings = [request.sampling for request in requests]
        key = GraphKey(
            rows=size,
            splits=splits,
            slots=splits + round_up(int(sharing.slots.max())),
            items=round_up(len(sharing.items)),
            lines=sharing.lines,
            stops=round_up(max(len(request.stop_tokens) for request in requests)),
            has_cut=any(s.is_truncating and s.temperature > 0 for s in samplings),
            rules=self._load_grammar(requests),
        )
        if size not in self._lines:
            self._lines[size] = DecodeState(size, self.prompts.widest, self.device)
        lines = self._lines[size]
        replay = self._replay(key, lines)
        lines.write(key, requests, sharing, table[sharing.order], self.seed, self.masks)
        return InflightBurst(requests, lines, replay, min(steps, MOST_STEPS))

    def _load_grammar(self, requests: list[SampleRequest]) -> tuple[int, int]:
        """Sizes of the tables of the one grammar of these rows; (0, 0): the host follows theirs."""
        grammars = {id(r.grammar): r.grammar for r in requests if r.grammar is not None}
        grammar = next(iter(grammars.values()), None)
        if len(grammars) > 1 or not isinstance(grammar, Automaton) or not self.follows(grammar):
            return 0, 0
        return self.rules.load(grammar)

    def _replay(self, key: GraphKey, lines: DecodeState) -> Callable[[], None]:
        """A call that takes one step; captured where there is a device to capture on."""
        if self.graphs is None:
            return lambda: self._step(key, lines)
        if key not in self._captured:
            lines.forget(key)  # the steps of the recording must touch nobody
            self._captured[key] = self.graphs.record(lambda: self._step(key, lines))
        return self._captured[key]

    def _step(self, key: GraphKey, lines: DecodeState) -> None:
        """From each row's token to its next one."""
        state, pool, shape = lines.state, self.tree.pages.pool, self.decoder.shape
        items, stops = lines.items(key.items), lines.stops(key.stops)
        rows = key.rows if key.slots > 1 else 0  # a single slot is written straight to the output
        space = scratch(rows, key.slots, shape.heads, shape.head_dim, self.device)

        def attend(layer: int, q: Tensor, *_: None) -> Tensor:
            return decode(
                q,
                pool[layer, 0],
                pool[layer, 1],
                lines.table,
                state[DrawField.LENGTH],
                state[DrawField.TAIL],
                items,
                state[DrawField.SHARED],
                splits=key.splits,
                slots=key.slots,
                rows=key.lines,
                space=space,
            )

        position = state[DrawField.POSITION]
        place = KVSlots(pool, lines.table, lines.row, position, state[DrawField.LENGTH])
        hidden = self.decoder(state[DrawField.TOKEN], position, attend, place)
        logits = self.decoder.logits(hidden)
        asked = (logits, state, lines.inv_temperature, stops)
        allowed = self.masks.allowed
        floors = cut(*asked, *lines.cuts, allowed=allowed) if key.has_cut else None
        draw(
            *asked,
            lines.results,
            allowed=allowed,
            occupied=self.occupied,
            floors=floors,
            rules=self.rules.tables(key.rules),
        )


def batch_size(rows: int) -> int:
    """The captured size for so many rows."""
    return next((size for size in SIZES if size >= rows), -(-rows // 512) * 512)


def num_splits(rows: int, kv_heads: int) -> int:
    """Parts of a tail: with few rows, more programs to read them."""
    return min(round_up(-(-PROGRAMS // (rows * kv_heads))), MOST_SPLITS)


def round_up(number: int) -> int:
    """The next power of two; 0 stays 0."""
    return 0 if number == 0 else 1 << (number - 1).bit_length()

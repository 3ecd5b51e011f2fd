"""Steps on a GPU: chunked prefill, then decoding in a burst that never waits for the host.

    B rows (requests that draw)

A burst feeds every row its own draws for a number of steps: tokens, positions, lengths, the test
for stop tokens and the grammar (`DeviceGrammar`) are on the device (`kernels.draw`), and one step, from
embedding to drawn token, is a CUDA graph that is replayed. The host writes the rows before the burst
(`DecodeState`), and reads each segment of draws while the next one runs (`InflightBurst`). Graphs are
captured on first use, for batches rounded up to `SIZES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from graft.actions.grammar import Automaton
from graft.actions.space import ActionSpace
from graft.engine.native.cuda.burst import MAX_STEPS, DecodeState, GraphKey, InflightBurst
from graft.engine.native.cuda.graphs import Graphs
from graft.engine.native.cuda.kernels.decode import decode, scratch
from graft.engine.native.cuda.kernels.drafts import PEERS, DraftState, accept, propose
from graft.engine.native.cuda.kernels.draw import DrawField, draw, occupied_chunks
from graft.engine.native.cuda.kernels.learner_scores import LearnerScores
from graft.engine.native.cuda.kernels.segments import decode_segments
from graft.engine.native.cuda.kernels.truncation import truncation_floors
from graft.engine.native.cuda.prefill import Prefill
from graft.engine.native.cuda.recurrence import BurstPaths
from graft.engine.native.drafts.attempts import FinishedTexts, texts_of
from graft.engine.native.drafts.drafter import DraftCounts
from graft.engine.native.drafts.gain import BurstPace
from graft.engine.native.drafts.index import DraftSource
from graft.engine.native.kv.segment_sharing import num_segments, share_segments
from graft.engine.native.kv.sequences import SequenceTree
from graft.engine.native.kv.sharing import find_sharing
from graft.engine.native.request import Draw, SampleRequest
from graft.engine.native.sampling.grammar_tables import DeviceGrammar, round_up
from graft.engine.native.sampling.masks import Masks
from graft.engine.native.sampling.sampler import penalize
from graft.engine.native.scheduler import BurstPlan, PlannedWork
from graft.models.decoder import Decoder
from graft.models.kernels.head_rows import logits_in_rows
from graft.models.kv_slots import KVSlots
from graft.protocols import Grammar

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Batches that graphs are captured for; larger ones are multiples of 512."""
MAX_PREFILL_STEPS = 4
"""Prefill steps in a row, at most, while requests wait to draw."""
PROGRAMS = 512
"""Parts that the tails of a batch are split into, over all heads: about four to a multiprocessor."""
MAX_SPLITS = 8
ORDERED_PROGRAMS, MAX_ORDERED_SPLITS = 2048, 16
"""The same in the order of positions, where a part is a segment at least: of 1,024, 2,048 and 4,096 none was
faster at all batches."""
MIN_SLOTS = 8
"""Segments of the longest row, at least: each number of slots is a graph of its own."""
PLAIN_STEPS = 8
"""Steps after which rows without a structure are read, beside rows that the host follows step by step."""
MAX_DRAFT_BASE = 64
"""Rows of a burst, at most, beside which tokens are drafted: with more, each draft makes products longer."""
MAX_TEXT = 4096
"""Tokens of a row that are searched, the latest."""
MAX_ARCHIVE = 1 << 18
"""Tokens of finished attempts that a burst searches."""
DECIDE_AT = 0.9
"""Share of a segment's time after which the next one is decided, where callers are on the event loop."""


class CudaRunner:
    """Holds the decoder (the trainer's own module) and turns planned work into drawn tokens."""

    has_bursts = True

    def __init__(
        self, decoder: Decoder, tree: SequenceTree, space: ActionSpace, masks: Masks, seed: int
    ) -> None:
        self.decoder, self.tree, self.masks, self.seed = decoder, tree, masks, seed
        self.device = decoder.device
        self.group = decoder.shape.heads // decoder.shape.kv_heads
        self.grammar = DeviceGrammar(space, masks, self.device)
        self.graphs = Graphs() if self.device.type == "cuda" else None  # else: the interpreter
        self.prefill = Prefill(decoder, tree, self.graphs)
        self.in_order = decoder.order is not None
        self._read_masks()
        self._states: dict[tuple[int, int], DecodeState] = {}
        """By rows, and those of them for drafted tokens."""
        self.attempts: FinishedTexts | None = None
        self.draft_counts: DraftCounts | None = None
        """Both None: nothing is drafted."""
        self.pace = BurstPace()
        self._archive: Tensor | None = None
        self._captured: dict[GraphKey, tuple[Callable[[], None] | None, Callable[[], None]]] = {}
        """The graphs of a step: the part before the draw where that is apart, and the rest."""
        self._prefill_steps = 0
        self._segment_seconds = 0.0
        """From one segment to the next."""
        self._restart_seconds = 0.0
        """From the end of a burst to the start of the next one."""
        self._read_at: float | None = None
        self.shares_loop = False
        self.num_steps = 1

    @torch.no_grad()  # not inference_mode: the trainer uses these tensors too
    def run(self, works: list[PlannedWork], plan: BurstPlan) -> Iterator[list[Draw] | None]:
        """Compute the prefill works, or draw the tokens of a plan for each of the others.

        Yields the draws of every segment; the next one starts if `plan.go_on()`, before the last one is
        read, so that the device does not wait for the host. Else prompts and results that
        `plan.plan_ahead()` finds follow it, and are computed while the host reads, plans and starts the
        next burst. If the event loop has other work (`shares_loop`), None is yielded while the device
        computes, and the decision is taken late: callers of finished samples, which may be other
        processes, have that long to come back.
        """
        prefill = [work for work in works if work.request is None]
        drawing = [work for work in works if work.request is not None]
        self.tree.flush_copies()
        self.num_steps = 1
        if prefill:
            self.prefill.compute(prefill)
            self._prefill_steps += 1
        if not drawing or (prefill and self._prefill_steps < MAX_PREFILL_STEPS):
            yield []
            return
        self._prefill_steps = 0
        burst = self._start(drawing, plan)
        if burst.prepare is not None:
            yield from self._run_matched(burst, plan)
            return
        started = perf_counter()
        num_drawn, num_rows = 0, len(burst.requests)
        burst.launch(plan.segment)
        if self._read_at is not None:
            self._restart_seconds = perf_counter() - self._read_at
        while burst.pending:
            began = perf_counter()
            if self.shares_loop:  # once at least, however late the host is
                yield None
            while self.shares_loop and not burst.is_ready:
                if perf_counter() - began > DECIDE_AT * self._segment_seconds:
                    break
                yield None
            if burst.left and plan.go_on() and not burst.is_spent:
                burst.launch(plan.segment)
            elif ahead := plan.plan_ahead():
                self.tree.flush_copies()
                self.prefill.compute(ahead)
            while self.shares_loop and not burst.is_ready:
                yield None
            draws = burst.read()
            self.num_steps = burst.steps_read
            self._read_at = perf_counter()
            num_drawn += sum(len(draw.actions) for draw in draws)
            self._segment_seconds = self._read_at - began
            yield draws
        self._measure(burst, num_drawn / num_rows, perf_counter() - started)

    def _measure(self, burst: InflightBurst, drawn: float, seconds: float) -> None:
        """Take over how fast a burst was, in which each row drew so many tokens, and what was drafted."""
        draft = burst.decode_state.draft
        rows = len(burst.decode_state.row) if draft is None else len(draft.best)
        if not burst.is_new:
            self.pace.add(rows, draft is not None, burst.launched, drawn, seconds)
        if draft is not None and self.draft_counts is not None:
            counts = burst.drafted
            for number, source in enumerate(DraftSource):
                proposed, accepted = counts[number], counts[number + len(DraftSource)]
                self.draft_counts.add(source, proposed, accepted)

    def _run_matched(self, burst: InflightBurst, plan: BurstPlan) -> Iterator[list[Draw] | None]:
        """Draw step by step: while the device computes the states of a step, the host adds the draws of the
        one before, and finds what structures allow in this one. Rows without one are read less often."""
        assert burst.prepare is not None
        matched = [row for row, each in enumerate(burst.requests) if each.matcher is not None]
        first = 0  # step that all rows are read from
        burst.prepare()
        while True:
            self._write_structures(burst.requests)
            burst.launch(1, first)
            if has_next := burst.left > 0 and plan.go_on():
                burst.prepare()
            while self.shares_loop and not burst.is_ready:
                yield None
            is_whole = not has_next or burst.launched - first == PLAIN_STEPS
            draws = burst.read(None if is_whole else matched)
            first = burst.launched if is_whole else first
            self.num_steps = 1
            self._read_at = perf_counter()
            yield draws
            if not has_next:
                return

    @property
    def mean_drawn(self) -> float:
        """Tokens that a row draws in a step, a little more than lately."""
        return 1.0 if self.attempts is None else self.pace.drawn

    def can_follow(self, grammar: Grammar) -> bool:
        """Whether the device can follow this grammar without the host."""
        return self.grammar.can_follow(grammar)

    def should_restart(self, num_waiting: int, num_running: int) -> bool:
        """Whether requests that wait should end a burst now: a restart costs every row some time, and
        another segment costs those that wait its whole length."""
        if not self.shares_loop:
            return num_waiting > 0
        return num_waiting * self._segment_seconds > num_running * self._restart_seconds

    def on_idle(self) -> None:
        """Graphs and their memory stay for the next step."""
        self._read_at = None

    def _start(self, works: list[PlannedWork], plan: BurstPlan) -> InflightBurst:
        """Write the rows to the device; nothing runs yet."""
        base, kv_heads = batch_size(len(works)), self.tree.pages.kv_heads
        extra = self._draft_rows(works, base) if plan.steps > 1 else 0
        size = base + extra
        splits = num_splits(size, kv_heads, self.in_order)
        width = max(len(work.sequence.pages) for work in works)
        table = self.tree.table[[work.sequence.row for work in works], :width]
        if self.in_order:
            lengths = np.array([work.sequence.cached + 1 for work in works])
            sharing = share_segments(table, lengths, self.group, kv_heads)
            slots = max(round_up(num_segments(int(lengths.max()) + MAX_STEPS)), MIN_SLOTS)
        else:
            sharing = find_sharing(table, self.group, kv_heads, splits)
            slots = splits + round_up(int(sharing.slots.max()))
        works = [works[i] for i in sharing.order.tolist()]
        requests = [work.request for work in works if work.request is not None]
        matched = [request for request in requests if request.matcher is not None]
        if matched and self.masks.assign(matched):
            self._captured.clear()
            self._read_masks()
        samplings = [request.sampling for request in requests]
        key = GraphKey(
            rows=size,
            splits=splits,
            slots=slots,
            items=round_up(len(sharing.items)),
            tile_rows=sharing.tile_rows,
            tail_rows=1 if extra else sharing.tail_rows,
            stops=round_up(max(len(request.stop_tokens) for request in requests)),
            is_truncated=any(s.is_truncating and s.temperature > 0 for s in samplings),
            is_penalized=any(s.repetition_penalty != 1 for s in samplings),
            grammar_sizes=self._load_grammar(requests),
            is_matched=bool(matched),
            in_order=self.in_order,
            drafts=extra,
        )
        if (size, extra) not in self._states:
            widest, width = self.prefill.widest, self.masks.width
            draft = self._draft_state(base, extra) if extra else None
            more = self.device, draft, self.tree.states
            self._states[size, extra] = DecodeState(size, widest, width, *more)
        decode_state = self._states[size, extra]
        if key not in self._captured:
            key = next((known for known in self._captured if known.serves(key)), key)
        is_new = key not in self._captured
        graphs = self._graphs_of(key, decode_state)
        steps = min(plan.draws if extra else plan.steps, MAX_STEPS)
        texts = None
        if decode_state.draft is not None and self.attempts is not None:
            width = decode_state.draft.texts.shape[1] - MAX_STEPS - 1
            texts = texts_of(requests, self.attempts, PEERS, MAX_ARCHIVE, width)
        how = self.seed, self.masks, steps, texts
        decode_state.write(key, requests, sharing, table[sharing.order], *how)
        burst = InflightBurst(requests, decode_state, *graphs, steps, self.tree)
        burst.is_new = is_new
        return burst

    def _draft_rows(self, works: list[PlannedWork], base: int) -> int:
        """Rows for drafted tokens beside `base` others; 0: none are drafted, or it does not pay."""
        if self.attempts is None or not self.in_order or base > MAX_DRAFT_BASE:
            return 0
        requests = [work.request for work in works if work.request is not None]
        for request in requests:  # these follow their grammar and their context draw by draw
            is_plain = request.grammar is None and request.matcher is None
            if not is_plain or request.sampling.repetition_penalty != 1:
                return 0
        return draft_rows(base) if self.pace.should_draft(base) else 0

    def _draft_state(self, base: int, extra: int) -> DraftState:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        if self._archive is None:
            self._archive = zeros(MAX_ARCHIVE)
        return DraftState(
            texts=zeros(base, MAX_TEXT),
            offsets=zeros(base),
            peers=zeros(base, PEERS),
            archive=self._archive,
            spans=zeros(base, 3),
            best=zeros(base, dtype=torch.int64),
            fed=zeros(extra, dtype=torch.int64),
            counts=zeros(base, 2 * len(DraftSource)),
        )

    def _read_masks(self) -> None:
        """Make what is made from the table of masks."""
        allowed = self.masks.allowed
        self.occupied = None if allowed is None else occupied_chunks(allowed)
        self.scores = LearnerScores(allowed) if self.in_order else None

    def _write_structures(self, requests: list[SampleRequest]) -> None:
        """Copy the rows of structures to the device, where captured graphs read them."""
        requests = [r for r in requests if r.matcher is not None and not r.is_over]
        rows, allowed = self.masks.write(requests), self.masks.allowed
        if not len(rows):
            return
        assert allowed is not None and self.occupied is not None
        self.occupied[rows] = occupied_chunks(allowed[rows])
        if self.scores is not None:
            self.scores.write(rows, allowed[rows])

    def _load_grammar(self, requests: list[SampleRequest]) -> tuple[int, int]:
        """Sizes of the tables of the one grammar of these rows; (0, 0): none, or the host follows it."""
        grammars = {id(r.grammar): r.grammar for r in requests if r.grammar is not None}
        grammar = next(iter(grammars.values()), None)
        is_matched = any(request.matcher is not None for request in requests)
        if len(grammars) > 1 or is_matched:
            return 0, 0
        if not isinstance(grammar, Automaton) or not self.can_follow(grammar):
            return 0, 0
        return self.grammar.load(grammar)

    def _graphs_of(
        self, key: GraphKey, decode_state: DecodeState
    ) -> tuple[Callable[[], None] | None, Callable[[], None]]:
        """Functions that take one step: captured graphs on a GPU."""
        if key not in self._captured:
            decode_state.clear(key)  # the steps of the capture must change nothing
            record = self.graphs.record if self.graphs is not None else lambda step: step
            prepare = None
            if key.is_matched:
                prepare = record(lambda: decode_state.keep(self._states_of(key, decode_state)))
            self._captured[key] = prepare, record(lambda: self._step(key, decode_state))
        return self._captured[key]

    def _step(self, key: GraphKey, decode_state: DecodeState) -> None:
        """One token for each row."""
        if key.is_matched:
            assert decode_state.hidden is not None
            self._draw(key, decode_state, decode_state.hidden)
        elif (draft := decode_state.draft) is not None:
            state, s = decode_state.state, decode_state
            buffers = s.inv_temperature, s.exponents, s.is_plain, s.truncations, s.stops(key.stops)
            size = self.tree.pages.size
            propose(draft, state, s.table, buffers, size, self.decoder.shape.vocab_size)
            before = state[:, : len(draft.best)].clone()
            self._draw(key, decode_state, self._states_of(key, decode_state))
            accept(draft, state, before, decode_state.results)
        else:
            self._draw(key, decode_state, self._states_of(key, decode_state))

    def _states_of(self, key: GraphKey, decode_state: DecodeState) -> Tensor:
        """Hidden states [B, D] after the last token of each row."""
        state, shape = decode_state.state, self.decoder.own_shape
        kv = self.tree.pages
        pool = kv.pool
        items = decode_state.items(key.items)
        # with one slot `decode` writes the output directly
        rows = key.rows if key.slots > 1 or key.in_order else 0
        space = scratch(rows, key.slots, shape.heads, shape.head_dim, self.device)

        def attend(layer: int, q: Tensor, k: None, v: None, sinks: Tensor | None = None) -> Tensor:
            pages = pool[layer, 0], pool[layer, 1], decode_state.table
            length, tail = state[DrawField.LENGTH], state[DrawField.TAIL]
            how = {
                "splits": key.splits,
                "slots": key.slots,
                "tile_rows": key.tile_rows,
                "space": space,
                "window": shape.window_of(layer),
                "sinks": sinks,
            }
            if key.in_order:
                how["tail_rows"], how["scales"] = key.tail_rows, kv.scales_of(layer)
                return decode_segments(q, *pages, length, tail, items, **how)
            return decode(q, *pages, length, tail, items, state[DrawField.SHARED], **how)

        position = state[DrawField.POSITION]
        lengths = state[DrawField.LENGTH]
        if (states := self.tree.states) is not None:
            of_rows = decode_state.slots_ahead, position, lengths
            attend.paths = BurstPaths(states, *of_rows)  # type: ignore[attr-defined]
        kv_slots = KVSlots(pool, decode_state.table, decode_state.row, position, lengths, kv.scales)
        return self.decoder(state[DrawField.TOKEN], position, attend, kv_slots)

    def _draw(self, key: GraphKey, decode_state: DecodeState, hidden: Tensor) -> None:
        """A draw for each row after its hidden state [B, D]."""
        state, stops, scores = decode_state.state, decode_state.stops(key.stops), self.scores
        if scores is None:
            whole = logits = self.decoder.logits(hidden)
        else:
            whole, logits = logits_in_rows(*self.decoder.biased(hidden), self.decoder.order)
        if key.is_penalized:
            logits = penalize(logits, decode_state.context_mask, decode_state.penalty)
        inputs = (logits, state, decode_state.inv_temperature, stops)
        allowed = self.masks.allowed
        floors = None
        if key.is_truncated:
            floors = truncation_floors(*inputs, *decode_state.truncations, allowed=allowed)
        picked = None if scores is None else decode_state.picked.fill_(-1)
        draw(
            *inputs,
            decode_state.results,
            allowed=allowed,
            occupied=self.occupied,
            floors=floors,
            grammar=self.grammar.tables(key.grammar_sizes),
            picked=picked,
        )
        if scores is not None:
            scores.replace(decode_state, whole, logits.shape[1])
        if key.is_penalized:  # the next input of each row
            decode_state.context_mask.scatter_(1, state[DrawField.TOKEN, :, None], True)


def batch_size(rows: int) -> int:
    """The captured size for `rows` rows."""
    return next((size for size in SIZES if size >= rows), -(-rows // 512) * 512)


def draft_rows(base: int) -> int:
    """Rows for drafted tokens beside `base` others: so many that a step takes little longer."""
    return batch_size(max(2 * base, 8)) - base


def num_splits(rows: int, kv_heads: int, in_order: bool = False) -> int:
    """Programs that share the tail of a row: more where there are few rows."""
    programs, most = PROGRAMS, MAX_SPLITS
    if in_order:
        programs, most = ORDERED_PROGRAMS, MAX_ORDERED_SPLITS
    return min(round_up(-(-programs // (rows * kv_heads))), most)

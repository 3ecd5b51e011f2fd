"""The paths of a step's tokens, for layers that carry a state: the engine's form of `models.layers.paths`.

    sequence   cached   tokens of the step   parts in chunks of 4
    0          10       1                    row 2
    1          2        7                    rows 2 3 | rows 0 1 2 3 | row 0

Part i of all sequences makes round i. A round reads the states at the beginning of its chunks and the rows so
far, writes its rows one after the other, and computes the states at the ends of chunks that are then full.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from graft.engine.native.kv.sequences import Sequence
from graft.engine.native.kv.states import Carried, States, StepSlots
from graft.models.layers.chunks import ChunkRows, ScanInputs, next_state, write_rows
from graft.models.recurrence import CHUNK

MAX_KEPT = 1 << 26
"""Numbers that decoding may keep beside the slots, all layers together: 256 MB of float32."""


@dataclass(slots=True)
class Part:
    """The tokens of one sequence that lie in one chunk."""

    owner: int
    """The number of the sequence in the step."""
    first: int
    """Its first token among those of the step."""
    at: int
    """The row of this token in its chunk."""
    count: int
    rows: int
    """The slot of the rows before; 0: there are none."""
    written: int
    """The slot that takes the rows; 0: the chunk ends, and nobody reads them."""
    end: int
    """The slot of the state at the end of the chunk; 0: it is not kept, or the chunk goes on."""

    @property
    def is_full(self) -> bool:
        return self.at + self.count == CHUNK


class Round:
    """Parts of different sequences, the longest first, as indices."""

    def __init__(self, parts: list[Part], device: torch.device) -> None:
        self.parts = sorted(parts, key=lambda part: -part.count)

        def index(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        self.owners = index([part.owner for part in self.parts])
        self.rows = index([part.rows for part in self.parts])
        self.at = index([part.at for part in self.parts])
        self.longest = self.parts[0].count
        self.active = [sum(part.count > i for part in self.parts) for i in range(self.longest)]
        self.tokens = [
            index([part.first + i for part in self.parts[:active]])
            for i, active in enumerate(self.active)
        ]
        writers = [number for number, part in enumerate(self.parts) if part.written]
        self.writers, self.written = index(writers), index([self.parts[n].written for n in writers])
        full = [number for number, part in enumerate(self.parts) if part.is_full]
        self.full = index(full)
        stored = [number for number, row in enumerate(full) if self.parts[row].end]
        self.kept, self.ends = index(stored), index([self.parts[full[n]].end for n in stored])


Kept = dict[int, tuple[Tensor, ChunkRows]]
"""By layer: the states and the rows of all sequences of a step, side by side."""


class StateCache:
    """What decoding has gathered from the slots, as long as the same sequences go on: a step then only
    writes a row of each."""

    def __init__(self, states: States) -> None:
        self.states = states
        self._kept: Kept = {}
        self._places: dict[Carried, tuple[int, int]] = {}  # place and changes

    def paths(self, order: list[Sequence], counts: list[int]) -> StepPaths:
        """The paths of a step; see `StepPaths`."""
        if max(counts) > 1 or len(order) * self.states.slot_size > MAX_KEPT:
            self.clear()
            return StepPaths(self.states, order, counts)
        carried = [sequence.carried for sequence in order]
        self._kept = self._select(carried)
        paths = StepPaths(self.states, order, counts, self._kept)
        self._places = {each: (place, each.changes) for place, each in enumerate(carried)}
        return paths

    def clear(self) -> None:
        """Free what is kept."""
        self._kept, self._places = {}, {}

    def _select(self, carried: list[Carried]) -> Kept:
        """What is kept of these sequences, in their order; nothing if one of them is new or has changed."""
        places = [self._places.get(each, (-1, -1)) for each in carried]
        if any(changes != each.changes for (_, changes), each in zip(places, carried, strict=True)):
            return {}
        positions = [position for position, _ in places]
        if positions == list(range(len(self._places))):
            return self._kept
        index = torch.tensor(positions, device=self.states.k.device)
        return {
            layer: (
                state.index_select(0, index),
                ChunkRows(*(x.index_select(0, index) for x in rows)),
            )
            for layer, (state, rows) in self._kept.items()
        }


class StepPaths:
    """What the recurrent layers read and write in one step."""

    def __init__(
        self, states: States, order: list[Sequence], counts: list[int], kept: Kept | None = None
    ) -> None:
        """The tokens of a sequence follow each other, in this order; its slots advance by them.

        kept   of steps with one token of each; what is missing is gathered and stays there
        """
        self.states, self.count, self.gathered = states, sum(counts), kept
        device = states.k.device
        rounds: list[list[Part]] = []
        firsts = np.cumsum([0, *counts])
        slots: list[StepSlots] = []
        self._line: list[np.ndarray] = []
        for owner, (sequence, count) in enumerate(zip(order, counts, strict=True)):
            cached = sequence.cached
            step = states.step(sequence.carried, cached, count)
            slots.append(step)
            for number, (start, stop) in enumerate(_parts(cached, count)):
                is_last = stop == cached + count
                at, is_full = start % CHUNK, stop % CHUNK == 0
                part = Part(
                    owner=owner,
                    first=int(firsts[owner]) + start - cached,
                    at=at,
                    count=stop - start,
                    rows=step.rows if number == 0 and at else 0,
                    written=step.written if is_last and not is_full else 0,
                    end=step.new[number] if is_full else 0,
                )
                if number == len(rounds):
                    rounds.append([])
                rounds[number].append(part)
        self._index_rounds(rounds)
        self.first_states = torch.tensor([each.state for each in slots], device=device)
        self._index_inputs(order, counts, slots, firsts)

    def _index_rounds(self, rounds: list[list[Part]]) -> None:
        self.rounds = [Round(parts, self.states.k.device) for parts in rounds]

    def _index_inputs(
        self, order: list[Sequence], counts: list[int], slots: list[StepSlots], firsts: np.ndarray
    ) -> None:
        """Index the inputs of the convolution: those it reads, and those that later steps will need.

        All are rows of one list: those before the step, `earlier` of each sequence, then the step's own.
        """
        earlier, device = self.states.tails.shape[2], self.states.k.device
        offset = len(order) * earlier
        windows: list[np.ndarray] = []
        kept: list[tuple[int, int, np.ndarray]] = []  # row slot, first place, rows of the list
        tails: list[tuple[int, np.ndarray]] = []
        for owner, (sequence, count, step) in enumerate(zip(order, counts, slots, strict=True)):
            cached, stop = sequence.cached, sequence.cached + count
            new = offset + firsts[owner] + np.arange(count)
            line = np.concatenate([owner * earlier + np.arange(earlier), new])
            windows.append(line[np.arange(count)[:, None] + np.arange(earlier)])
            for number, slot in enumerate(step.new, start=cached // CHUNK + 1):
                if slot:
                    before = number * CHUNK - cached
                    tails.append((slot, line[before : before + earlier]))
            if step.written:
                begin = max(stop - stop % CHUNK - cached, 0)  # tokens of the step in earlier chunks
                place = 0 if begin or not cached % CHUNK else earlier + cached % CHUNK
                rows = line[begin:] if place == 0 else new
                kept.append((step.written, place, rows))
        self.windows = torch.from_numpy(np.concatenate(windows)).to(device)
        at = [sequence.cached % CHUNK for sequence in order]
        self.heads = torch.tensor(at, device=device)[:, None] + torch.arange(earlier, device=device)
        self.head_rows = torch.tensor([step.rows for step in slots], device=device)
        self.inside = self.head_rows > 0
        self.kept = [
            torch.from_numpy(np.concatenate(parts)).to(device)
            for parts in (
                [np.zeros(0, np.int64), *(np.full(len(rows), slot) for slot, _, rows in kept)],
                [np.zeros(0, np.int64), *(first + np.arange(len(rows)) for _, first, rows in kept)],
                [np.zeros(0, np.int64), *(rows for _, _, rows in kept)],
            )
        ]
        self.tails = torch.tensor([slot for slot, _ in tails], dtype=torch.long, device=device)
        lines = [rows for _, rows in tails] or [np.zeros(0, np.int64)]
        self.tail_rows = torch.from_numpy(np.concatenate(lines)).to(device)

    def before(self, layer: int, x: Tensor, count: int) -> Tensor:
        """[T, count, channels] the rows of the tokens before each; those of later steps are stored."""
        states = self.states
        heads = states.inputs[layer][self.head_rows[:, None], self.heads]
        tails = states.tails[layer].index_select(0, self.first_states)
        heads = torch.where(self.inside[:, None, None], heads, tails)
        everything = torch.cat([heads.flatten(0, 1), x])
        slots, places, rows = self.kept
        states.inputs[layer].index_put_((slots, places), everything.index_select(0, rows))
        tail = everything.index_select(0, self.tail_rows)
        states.tails[layer].index_copy_(0, self.tails, tail.view(-1, count, x.shape[1]))
        return everything.index_select(0, self.windows.flatten()).view(len(x), count, -1)

    def scan(self, layer: int, new: ScanInputs, in_order: bool) -> Tensor:
        """[T, H, dv] what each token reads of its state; row after row, whatever the order."""
        del in_order
        states = self.states
        if self.gathered is not None:
            return self._scan_kept(layer, new, self.gathered)
        carried = states.state[layer].index_select(0, self.first_states)
        read = new.v.new_empty(new.v.shape)
        for part in self.rounds:
            rows = states.read_rows(layer, part.rows)
            state = carried.index_select(0, part.owners)
            for number, (active, tokens) in enumerate(zip(part.active, part.tokens, strict=True)):
                active_rows = (
                    rows if active == len(state) else ChunkRows(*(x[:active] for x in rows))
                )
                at = part.at[:active] + number
                inputs = (None if x is None else x.index_select(0, tokens) for x in new)
                row = ScanInputs(*inputs)  # type: ignore[arg-type]
                read.index_copy_(0, tokens, write_rows(state[:active], active_rows, at, row))
            for pool, made in zip((states.k, states.u, states.log), rows, strict=True):
                chosen = made.index_select(0, part.writers)
                pool[layer].index_copy_(0, part.written, chosen)
            if len(part.full):
                carried.index_copy_(
                    0, part.owners.index_select(0, part.full), self._end(layer, part, state, rows)
                )
        return read

    def _scan_kept(self, layer: int, new: ScanInputs, kept: Kept) -> Tensor:
        """`scan` of one token of each sequence, in states and rows that stay gathered."""
        states, (part,) = self.states, self.rounds
        if layer not in kept:
            state = states.state[layer].index_select(0, self.first_states)
            kept[layer] = state, states.read_rows(layer, part.rows)
        state, rows = kept[layer]
        read = write_rows(state, rows, part.at, new)
        at = part.at.index_select(0, part.writers)
        for pool, made in zip((states.k, states.u, states.log), rows, strict=True):
            pool[layer][part.written, :, at] = made[part.writers, :, at]
        if len(part.full):
            state.index_copy_(0, part.full, self._end(layer, part, state, rows))
        return read

    def _end(self, layer: int, part: Round, state: Tensor, rows: ChunkRows) -> Tensor:
        """The states after the chunks that are full, which are stored where they are kept."""
        full = ChunkRows(*(x.index_select(0, part.full) for x in rows))
        states = next_state(state.index_select(0, part.full), full)
        self.states.state[layer].index_copy_(0, part.ends, states.index_select(0, part.kept))
        return states


def _parts(cached: int, count: int) -> list[tuple[int, int]]:
    """Positions `cached` to `cached + count` in chunks: 2, 7 in chunks of 4 -> (2, 4), (4, 8), (8, 9)."""
    stop = cached + count
    borders = [cached, *range((cached // CHUNK + 1) * CHUNK, stop, CHUNK), stop]
    return list(pairwise(borders))

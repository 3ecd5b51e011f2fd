"""The paths of a step's tokens on a GPU, for layers that carry a state; see `cpu.recurrence`.

A prompt's tokens go through their chunks round by round, each round in one kernel. A burst feeds every row
its own draws without the host, so where its tokens read and write is found on the device. Its steps are no
more than a chunk has positions: they end one chunk at most, and each row has slots for two.

    slots   0 chunk   1 2 states at its beginning and its end   3 4 rows of it, and of the next

What a burst writes is added after what is there, in slots that nobody else writes: if the host finds that a
row has ended before, the tokens up to there have their rows and states still.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graft.engine.native.cpu.recurrence import Part, StepPaths
from graft.engine.native.kv.states import States
from graft.models.kernels.chunks import NONE, advance
from graft.models.layers.chunks import ScanInputs
from graft.models.recurrence import CHUNK


class KernelRound(NamedTuple):
    """Parts of different sequences, as `kernels.chunks` reads them."""

    parts: Tensor
    owners: Tensor
    """The sequences whose parts end chunks; the states of these go to the slots of `targets`."""
    targets: Tensor


class PromptPaths(StepPaths):
    """What the recurrent layers read and write in one step, by kernels."""

    def _index_rounds(self, rounds: list[list[Part]]) -> None:
        device = self.states.k.device
        parts = [[_row(part) for part in some] for some in rounds]
        stored = [[(part.owner, part.end) for part in some if part.end] for some in rounds]
        self.kernel_rounds = [
            KernelRound(rows, *pairs.unbind(1))
            for rows, pairs in zip(_moved(parts, 7, device), _moved(stored, 2, device), strict=True)
        ]

    def scan(self, layer: int, new: ScanInputs, in_order: bool) -> Tensor:
        """[T, H, dv] what each token reads of its state; in the one order, whatever is asked."""
        del in_order
        state = self.states.state[layer]
        carried = state.index_select(0, self.first_states)
        new = ScanInputs(*(None if x is None else x.contiguous() for x in new))  # type: ignore[arg-type]
        read = torch.empty_like(new.v)
        for each in self.kernel_rounds:
            advance(new, each.parts, carried, carried, self.states.slots_of(layer), read=read)
            state.index_copy_(0, each.targets, carried.index_select(0, each.owners))
        return read


class BurstPaths:
    """What the recurrent layers read and write in a step of a burst, one token of each row."""

    def __init__(self, states: States, slots: Tensor, position: Tensor, lengths: Tensor) -> None:
        """slots [5, B], see `States.slots_ahead`; rows of length 0 are over."""
        self.states, self.count = states, len(position)
        chunk, begin, end, rows, next_rows = slots
        is_alive = lengths > 0
        is_first = position // CHUNK == chunk
        self.at = position % CHUNK
        self.state = torch.where(is_first, begin, end)
        self.rows = torch.where(is_alive, torch.where(is_first, rows, next_rows), 0)
        is_end = is_alive & is_first & (self.at == CHUNK - 1)
        self.tail = torch.where(is_end, end, states.unread)
        first = torch.arange(self.count, device=position.device)
        after = torch.where(is_end, end, NONE)
        columns = first, self.at, is_alive.long(), self.state, self.rows, self.rows, after
        self.parts = torch.stack(columns, 1)

    def before(self, layer: int, x: Tensor, count: int) -> Tensor:
        """[B, count, channels] the rows of the tokens before each; its own is stored after them."""
        states, inputs = self.states, self.states.inputs[layer]
        places = self.at[:, None] + torch.arange(count + 1, device=x.device)
        known = inputs[self.rows[:, None], places[:, :-1]]
        tails = states.tails[layer].index_select(0, self.state)
        heads = torch.where((self.at > 0)[:, None, None], known, tails)
        window = torch.cat([heads, x[:, None]], 1)
        inputs.index_put_((self.rows[:, None], places), window)
        states.tails[layer].index_copy_(0, self.tail, window[:, 1:])
        return heads

    def scan(self, layer: int, new: ScanInputs, in_order: bool) -> Tensor:
        """[B, H, dv] what each token reads of its state; in the one order, whatever is asked."""
        del in_order
        state = self.states.state[layer]
        slots = self.states.slots_of(layer)
        return advance(new, self.parts, state, state, slots, is_single=True)


def _row(part: Part) -> tuple[int, ...]:
    """The part in the table of a round; states are those of sequences."""
    after = part.owner if part.is_full else NONE
    where = part.owner, part.rows, part.written or NONE, after
    return part.first, part.at, part.count, *where


def _moved(rounds: list[list[tuple[int, ...]]], width: int, device: torch.device) -> list[Tensor]:
    """The rows of each round on the device, in one transfer."""
    rows = [row for some in rounds for row in some]
    table = torch.tensor(rows, dtype=torch.long).view(-1, width).to(device)
    return list(table.split([len(some) for some in rounds]))

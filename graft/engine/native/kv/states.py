"""What recurrent layers keep of a sequence: a state for each chunk of its tokens, and the rows of the last.

    chunks of 4, 10 tokens cached      states   [0, 3, 7]   slots: the beginning is zeros, after 4, after 8
                                       rows     5           the slot of rows 8 and 9

    state slot   S [H, dv, dk], and the inputs of the convolution before the chunk
    row slot     of a chunk: inputs of the convolution, keys, what was added to the state, decays

Sequences that share a prefix share its states, and the rows of the chunk in which they fork: nothing is
copied until a row is written. A state is never changed. Those before the last are only needed by later
forks inside the prefix, which are computed again from there, at most a chunk; they are dropped where slots
are short. A convolution alone has no state: of it the inputs are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from graft.engine.native.kv.slots import Slots
from graft.models.layers.chunks import ChunkRows
from graft.models.recurrence import CHUNK, Recurrence
from graft.models.shape import ModelShape

STATE_BYTES = 2 << 30
"""Memory of all slots, at most; the system gives it as slots are first written."""

STATE_SHARE = 0.45
"""The same on a GPU: a share of its memory, which is taken at the start."""

MAKE_ROOM = 16
"""If no state slot is free, one of so many is made free: to look for each alone takes time."""

MIN_SLOTS = 8
"""Slots with which one sequence, its stems and a fork can always go on."""


@dataclass(slots=True, eq=False)
class Carried:
    """The slots of one sequence."""

    states: list[int] = field(default_factory=lambda: [0])
    """By the number of the chunk that begins with it; 0 after the first: dropped."""
    rows: int = 0
    """Rows of the chunk in progress; 0: none yet."""
    spare: int = 0
    """A state slot for the end of the chunk in progress."""
    fresh: int = 0
    """A row slot for a later chunk that the next step begins."""
    changes: int = 0
    """How often its tokens have changed."""


class StepSlots(NamedTuple):
    """What one sequence reads and writes in a step."""

    state: int
    """At the beginning of its first chunk."""
    rows: int
    """Rows of this chunk so far."""
    written: int
    """For the rows of its last chunk; 0: the step ends with a chunk."""
    new: list[int]
    """For the states at the ends of chunks; 0: not kept."""


class States:
    """The slots, and the tensors behind them: [layers, slots, ...] each."""

    def __init__(
        self,
        shape: ModelShape,
        tokens: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`tokens` is the size of the pool of keys and values beside it, `dtype` that of the weights."""
        sizes = shape.recurrence
        assert sizes is not None
        layers = len(shape.recurrent_layers)
        self.slot_size = slot_bytes(sizes, layers) // 4
        size = slot_bytes(sizes, layers, dtype)
        count = num_slots(size, tokens, state_limit(device))
        heads, earlier = sizes.value_heads * sizes.has_state, sizes.taps - 1

        def pool(*size: int, dtype: torch.dtype = torch.float32, more: int = 0) -> Tensor:
            return torch.zeros(layers, count + 1 + more, *size, device=device, dtype=dtype)

        self.states, self.rows = Slots(count), Slots(count)
        self.state = pool(heads, sizes.value_dim, sizes.key_dim)
        self.tails = pool(earlier, sizes.channels, dtype=dtype, more=1)
        self.unread = count + 1  # tails that a burst writes where no chunk ends
        self.inputs = pool(earlier + CHUNK, sizes.channels, dtype=dtype)
        self.k = pool(sizes.key_heads, CHUNK, sizes.key_dim)
        self.u = pool(heads, CHUNK, sizes.value_dim)
        self.log = pool(heads, CHUNK)
        self._copies: list[tuple[int, int]] = []

    @property
    def is_roomy(self) -> bool:
        """Whether states may be kept that only a fork inside the prefix would need."""
        return 2 * self.states.free > self.states.total

    def reach(self, carried: Carried, cached: int, wanted: int) -> int:
        """The most tokens, `wanted` or fewer, after which the state of a sequence is kept."""
        chunk = wanted // CHUNK
        if chunk == cached // CHUNK:
            return wanted
        while chunk and not carried.states[chunk]:
            chunk -= 1
        return chunk * CHUNK

    def share(self, carried: Carried, other: Carried, cached: int) -> None:
        """Let an empty sequence begin with the first `cached` tokens of another, as `reach` found them."""
        carried.changes += 1
        carried.states = other.states[: cached // CHUNK + 1]
        self.states.share([slot for slot in carried.states if slot])
        if cached % CHUNK:
            carried.rows = other.rows
            self.rows.share([other.rows])

    def rewind(self, carried: Carried, cached: int) -> None:
        """Forget what is after the first `cached` tokens, as `reach` found them."""
        carried.changes += 1
        after = carried.states[cached // CHUNK + 1 :]
        del carried.states[cached // CHUNK + 1 :]
        self.states.release([slot for slot in after if slot])
        if not cached % CHUNK:
            self._release_rows(carried)

    def drop(self, carried: Carried) -> None:
        """Release everything."""
        self.rewind(carried, 0)
        for slots, slot in ((self.states, carried.spare), (self.rows, carried.fresh)):
            if slot:
                slots.release([slot])
        carried.spare = carried.fresh = 0

    def reserve(self, carried: Carried, cached: int, length: int) -> bool:
        """Slots to compute tokens `cached` to `length`; False if short."""
        begins_later = (length - 1) // CHUNK > cached // CHUNK
        is_shared = carried.rows and self.rows.ref_count(carried.rows) > 1
        missing_rows = (not carried.rows or is_shared) and (not begins_later or not cached % CHUNK)
        missing_fresh = begins_later and cached % CHUNK and not carried.fresh
        if bool(missing_rows) + bool(missing_fresh) > self.rows.free:
            return False
        if not carried.spare and not self.states.free:
            return False
        if not carried.spare:
            (carried.spare,) = self.states.take(1)
        if missing_fresh:
            (carried.fresh,) = self.rows.take(1)
        if missing_rows:
            (slot,) = self.rows.take(1)
            if cached % CHUNK:
                self._copies.append((carried.rows, slot))
            self._release_rows(carried)
            carried.rows = slot
        return True

    def reserved(self, cached: int, length: int) -> int:
        """Up to which token `reserve` has slots: the end of the chunk, unless the step ends in a later one,
        whose end has no slot yet."""
        end = (cached // CHUNK + 1) * CHUNK
        return end if length <= end else length

    def make_room(self, others: Iterable[Carried]) -> bool:
        """Drop states that no sequence goes on from, until some are free; False if there is none."""
        enough = max(self.states.total // MAKE_ROOM, 1)
        for carried in others:
            for number, slot in enumerate(carried.states[:-1]):
                if slot:
                    carried.states[number] = 0
                    self.states.release([slot])
                    if self.states.free >= enough:
                        return True
        return self.states.free > 0

    def step(self, carried: Carried, cached: int, count: int) -> StepSlots:
        """The slots of a step over `count` tokens, which are the sequence's own from now on."""
        carried.changes += 1
        state, rows = carried.states[-1], carried.rows if cached % CHUNK else 0
        stop = cached + count
        num_ends = stop // CHUNK - cached // CHUNK
        new = [self.states.take(1)[0] if self.is_roomy else 0 for _ in range(num_ends - 1)]
        if num_ends:
            new.append(carried.spare)
            carried.spare = 0
        carried.states += new
        if carried.fresh and num_ends:
            self._release_rows(carried)
            carried.rows, carried.fresh = carried.fresh, 0
        return StepSlots(state, rows, carried.rows if stop % CHUNK else 0, new)

    def slots_ahead(self, carried: Carried, cached: int) -> tuple[int, int, int, int, int]:
        """What the tokens after `cached` read and write, of this chunk and of the next: the number of the
        chunk, the states at its beginning and at its end, and the rows of both."""
        return cached // CHUNK, carried.states[-1], carried.spare, carried.rows, carried.fresh

    def _release_rows(self, carried: Carried) -> None:
        if carried.rows:
            self.rows.release([carried.rows])
        carried.rows = 0

    def flush_copies(self) -> None:
        """Copy the rows of chunks in which sequences have forked."""
        if not self._copies:
            return
        source, target = torch.tensor(self._copies, device=self.k.device).unbind(1)
        self._copies.clear()
        for tensor in (self.inputs, self.k, self.u, self.log):
            tensor[:, target] = tensor[:, source]

    def read_rows(self, layer: int, slots: Tensor) -> ChunkRows:
        """A copy of the rows of some chunks."""
        return ChunkRows(*(x[layer].index_select(0, slots) for x in (self.k, self.u, self.log)))

    def slots_of(self, layer: int) -> ChunkRows:
        """The slots of rows themselves."""
        return ChunkRows(self.k[layer], self.u[layer], self.log[layer])

    def wipe(self) -> None:
        """Zero every number: after a NaN none can be trusted."""
        self._copies.clear()
        for tensor in (self.state, self.tails, self.inputs, self.k, self.u, self.log):
            tensor.zero_()


def state_limit(device: torch.device, memory: int = 0) -> int:
    """Bytes of all slots, at most, on a device with so much `memory`; 0: ask it."""
    if device.type != "cuda":
        return STATE_BYTES
    return int((memory or torch.cuda.mem_get_info(device)[1]) * STATE_SHARE)


def num_slots(size: int, tokens: int, limit: int) -> int:
    """State slots, and as many row slots, beside a pool of so many tokens, in `limit` bytes; a slot of both
    has `size` bytes."""
    return max(MIN_SLOTS, min(tokens // CHUNK, limit // size))


def state_bytes(shape: ModelShape, tokens: int, limit: int, dtype: torch.dtype) -> int:
    """Bytes of all slots beside a pool of so many tokens; 0 without recurrent layers."""
    if shape.recurrence is None:
        return 0
    size = slot_bytes(shape.recurrence, len(shape.recurrent_layers), dtype)
    return (num_slots(size, tokens, limit) + 1) * size


def slot_bytes(sizes: Recurrence, layers: int, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of a state slot and a row slot in all layers: float32, but inputs of convolutions in `dtype`."""
    inputs = (CHUNK + 2 * (sizes.taps - 1)) * sizes.channels
    others = sizes.state_size + CHUNK * (sizes.row_size - sizes.channels)
    return layers * (4 * others + dtype.itemsize * inputs)

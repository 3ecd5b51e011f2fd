"""Finished samples by their task, for bursts that search texts on the device."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from graft.engine.native.drafts.drafter import DraftCounts
from graft.engine.native.drafts.index import MAX_MATCH, MAX_STORED
from graft.engine.native.request import SampleRequest

Tokens = NDArray[np.int32]
MAX_TOKENS_OF_TASK = 4096
"""Tokens of finished samples that are kept of a task: the latest."""
GAP = np.array([-1], dtype=np.int32)
"""Between texts: no token."""


class Attempt(NamedTuple):
    """What a sample has written, after the last tokens before it."""

    tokens: Tokens
    version: int


class FinishedTexts:
    """The latest samples of each task, in bounded memory."""

    def __init__(self, max_tokens: int = MAX_STORED) -> None:
        self.max_tokens, self.size = max_tokens, 0
        self._by_task: OrderedDict[int, deque[Attempt]] = OrderedDict()

    def add(self, request: SampleRequest) -> None:
        """Keep what a request has written."""
        first = max(request.start - MAX_MATCH, 0)
        tokens = np.array(request.sequence.tokens[first:][-MAX_TOKENS_OF_TASK:], dtype=np.int32)
        known = self._by_task.setdefault(request.task, deque())
        self._by_task.move_to_end(request.task)
        known.append(Attempt(tokens, request.version))
        self.size += len(tokens)
        while sum(len(attempt.tokens) for attempt in known) > MAX_TOKENS_OF_TASK:
            self.size -= len(known.popleft().tokens)
        while self.size > self.max_tokens:
            _, oldest = self._by_task.popitem(last=False)
            self.size -= sum(len(attempt.tokens) for attempt in oldest)

    def of(self, task: int) -> list[Attempt]:
        """Those of a task, the latest last."""
        return [*self._by_task.get(task, ())]


class BurstDrafter:
    """What an engine whose device drafts keeps on the host."""

    def __init__(self) -> None:
        self.attempts, self.counts = FinishedTexts(), DraftCounts()


class DraftTexts(NamedTuple):
    """What the device searches in a burst; see `cuda.kernels.drafts.DraftState`."""

    texts: Tokens
    offsets: Tokens
    peers: Tokens
    archive: Tokens
    spans: Tokens


def texts_of(
    requests: Sequence[SampleRequest],
    attempts: FinishedTexts,
    num_peers: int,
    room: int,
    width: int,
) -> DraftTexts:
    """The last `width` tokens of rows, up to `num_peers` rows of the same task for each, and at most `room`
    tokens of finished samples: those under the same weights first, then earlier ones."""
    rows_of: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
        rows_of.setdefault(request.task, []).append(row)
    lengths = np.array([len(request.sequence.tokens) for request in requests], dtype=np.int32)
    offsets = np.maximum(lengths - width, 0)
    longest = min(int(lengths.max()), width)
    texts = np.full((len(requests), longest), -1, dtype=np.int32)
    peers = np.full((len(requests), num_peers), -1, dtype=np.int32)
    spans = np.zeros((len(requests), 3), dtype=np.int32)
    archive: list[Tokens] = []
    used = 0
    for task, rows in rows_of.items():
        version = max(requests[row].version for row in rows)
        known = attempts.of(task)
        new = [attempt.tokens for attempt in known if attempt.version >= version]
        earlier = [attempt.tokens for attempt in known if attempt.version < version]
        size = sum(map(len, new)) + len(new), sum(map(len, earlier)) + len(earlier)
        if used + sum(size) + MAX_MATCH <= room:
            archive += [part for tokens in (*new, *earlier) for part in (tokens, GAP)]
            spans[rows] = used, used + sum(size), used + size[0]
            used += sum(size)
        for number, row in enumerate(rows):
            tokens = requests[row].sequence.tokens
            texts[row, : min(len(tokens), width)] = tokens[-width:]
            others = [*rows[number + 1 :], *rows[:number]][:num_peers]
            peers[row, : len(others)] = others
    return DraftTexts(texts, offsets, peers, np.concatenate([*archive, *[GAP] * MAX_MATCH]), spans)

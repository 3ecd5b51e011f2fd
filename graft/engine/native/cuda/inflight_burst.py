"""A burst in progress: the host reads each segment while the next one runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from graft.engine.native.cuda.decode_state import DecodeState
from graft.engine.native.cuda.kernels.draw import DrawField
from graft.engine.native.request import Draw, SampleRequest


class BurstSegment(NamedTuple):
    """Some steps of a burst, whose results are being copied to the host."""

    results: Tensor  # [3, steps, B]
    drawn: Tensor  # [B] tokens of the burst so far
    is_done: torch.cuda.Event | None


class InflightBurst:
    """The rows of a burst, and the segments that were launched but not read."""

    def __init__(
        self,
        requests: list[SampleRequest],
        decode_state: DecodeState,
        replay: Callable[[], None],
        steps: int,
    ) -> None:
        self.requests, self.decode_state, self.replay = requests, decode_state, replay
        self.left, self.launched = steps, 0
        self.pending: deque[BurstSegment] = deque()
        self._drawn = [0] * len(requests)

    def launch(self, steps: int) -> None:
        """Start up to `steps` more steps; every row that is alive draws one token in each."""
        steps = min(steps, self.left)
        for _ in range(steps):
            self.replay()
        first, self.launched = self.launched, self.launched + steps
        self.left -= steps
        # a row that is alive draws one token a step, so a step is an index into its results
        results = self.decode_state.results[:, first : self.launched]
        drawn = self.decode_state.state[DrawField.DRAWN]
        is_done = torch.cuda.Event() if results.is_cuda else None
        self.pending.append(BurstSegment(_to_host(results), _to_host(drawn), is_done))
        if is_done is not None:
            is_done.record()

    def read(self) -> list[Draw]:
        """The draws of the oldest segment, for the requests that are not over."""
        segment = self.pending.popleft()
        if segment.is_done is not None:
            segment.is_done.synchronize()
        num_rows = len(self.requests)
        before, self._drawn = self._drawn, segment.drawn[:num_rows].tolist()
        # numpy, not torch: tolist() of a transposed array takes a tenth of the time
        results = segment.results.numpy()[:, :, :num_rows].transpose(0, 2, 1)
        tokens = results[0].astype(np.int64).tolist()
        logprobs, entropies = results[1:].tolist()
        draws: list[Draw] = []
        for row, request in enumerate(self.requests):
            number = self._drawn[row] - before[row]
            if number and not request.is_over:  # else it ended or was cancelled meanwhile
                request.sequence.cached += number
                draws.append(
                    Draw(
                        request,
                        tokens[row][:number],
                        logprobs[row][:number],
                        entropies[row][:number],
                    )
                )
        return draws


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, complete when the stream reaches it."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)

"""A burst under way: segments are read by the host, each while the next one runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from graft.engine.native.cpu.runner import Draw
from graft.engine.native.cuda.decode_state import DecodeState
from graft.engine.native.cuda.kernels.draw import DrawField
from graft.engine.native.scheduler import SampleRequest


class BurstSegment(NamedTuple):
    """Some steps of a burst on their way to the host."""

    results: Tensor  # [3, steps, B]
    drawn: Tensor  # [B] tokens of the burst so far
    is_done: torch.cuda.Event | None


class InflightBurst:
    """The rows of a burst, and the segments that were launched and not yet read."""

    def __init__(
        self,
        requests: list[SampleRequest],
        lines: DecodeState,
        replay: Callable[[], None],
        steps: int,
    ) -> None:
        self.requests, self.lines, self.replay = requests, lines, replay
        self.left, self.launched = steps, 0
        self.pending: deque[BurstSegment] = deque()
        self._drawn = [0] * len(requests)

    def launch(self, steps: int) -> None:
        """Let every row draw up to `steps` more tokens."""
        steps = min(steps, self.left)
        for _ in range(steps):
            self.replay()
        first, self.launched = self.launched, self.launched + steps
        self.left -= steps
        # a living row draws one token a step, so its tokens lie where the steps do
        results = self.lines.results[:, first : self.launched]
        drawn = self.lines.state[DrawField.DRAWN]
        is_done = torch.cuda.Event() if results.is_cuda else None
        self.pending.append(BurstSegment(_to_host(results), _to_host(drawn), is_done))
        if is_done is not None:
            is_done.record()

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


def _to_host(tensor: Tensor) -> Tensor:
    """A copy that is complete when the stream comes by."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)

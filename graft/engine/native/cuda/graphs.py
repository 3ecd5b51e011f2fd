"""Steps captured as CUDA graphs, so that replaying one costs a single launch."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Graphs:
    """Captures steps; all graphs share their working memory, since one runs at a time."""

    def __init__(self) -> None:
        self._pool: torch.cuda._POOL_HANDLE | None = None

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """A function that replays `step`, which works on fixed buffers and never synchronises."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            step()  # compiles kernels and initialises libraries before the capture
        torch.cuda.current_stream().wait_stream(aside)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        return graph.replay

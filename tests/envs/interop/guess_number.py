"""The whole module of a graft environment in verifiers: its id there is "guess-number"."""

from __future__ import annotations

from graft.envs.interop.verifiers_taskset import taskset

GuessTaskset, GuessHarness = taskset(
    "game:GuessTheNumber-v0", num_tasks=3, wrappers={"tools": {"use": "calculator", "format": "gem"}}
)

__all__ = ["GuessHarness", "GuessTaskset"]

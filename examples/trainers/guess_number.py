"""A graft environment in verifiers. On the Python path, its id there is "guess-number"."""

from __future__ import annotations

from graft_interop.verifiers_taskset import taskset

GuessTaskset, GuessHarness = taskset(
    "game:GuessTheNumber-v0",
    num_tasks=1000,
    wrappers={"tools": {"use": "calculator", "format": "gem"}},
)

__all__ = ["GuessHarness", "GuessTaskset"]

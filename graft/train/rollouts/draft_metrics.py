"""How many tokens the engine drafted in a step, and how many of them were right."""

from __future__ import annotations

from collections.abc import Mapping

from graft.protocols import Engine

PROPOSED, ACCEPTED = "drafts_proposed", "drafts_accepted"


class DraftMetrics:
    """The engine's counts of drafted tokens, step by step; nothing for an engine that drafts none."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = self._counts()

    def take(self) -> dict[str, float]:
        """Counts since the last call."""
        before, self._before = self._before, self._counts()
        new = {name: float(count - before[name]) for name, count in self._before.items()}
        if not new:
            return {}
        sums = {
            f"engine/{kind}": sum(count for name, count in new.items() if name.startswith(kind))
            for kind in (PROPOSED, ACCEPTED)
        }
        by_source = {name: count for name, count in new.items() if name.startswith(ACCEPTED)}
        return {**sums, **{f"engine/{name}": count for name, count in by_source.items()}}

    def _counts(self) -> Mapping[str, int]:
        return getattr(self._engine, "draft_counts", {})

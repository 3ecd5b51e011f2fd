"""What the search and fetch tools share: a cache of answers, counts, and one object for all forks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, Self

from graft.tools.answer_cache import open_cache
from graft.tools.errors import ERROR


class CachedTool:
    """A tool whose answers may be recorded and replayed; see `SearchTool` for `cache` and `cache_mode`.

    `given` are the arguments of the subclass: a worker process makes its own object with them.
    """

    blocking = True

    def __init__(self, cache: str | None, cache_mode: str | None, given: Mapping[str, Any]) -> None:
        self.cache, self.cache_mode = open_cache(cache, cache_mode)
        self.counts: Counter[str] = Counter(calls=0, cached=0, failures=0)
        self._given = given
        self._lock = threading.Lock()

    def close(self) -> None:
        if self.cache is not None:
            self.cache.close()

    def _failed(self, text: str) -> str:
        self._count("calls", "failures")
        return f"{ERROR}{text}"

    def _count(self, *names: str) -> None:
        with self._lock:
            self.counts.update(names)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # forked envs share cache and source

    def __reduce__(self) -> Any:
        return partial(type(self), **self._given), ()  # a worker opens its own


def arguments_of(scope: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor from its `locals()`, those of `**options` among them."""
    given = {name: value for name, value in scope.items() if name not in ("self", "__class__")}
    return given | given.pop("options", {})

"""Which model answers a request, by the name that the client gives for it: agent.models.

models: {gpt-4.1: {endpoint: "https://api.openai.com/v1"}, "*judge*": frozen, policy: policy}

    "policy"        the policy; so is every name that no entry fits
    "the-judge"     a frozen copy, sampled here and not trained
    "gpt-4.1"       passed on to the endpoint; its answers are not ours to train
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from graft.gateway.speakers.endpoint import ModelEndpoint

POLICY, FROZEN = "policy", "frozen"
MAX_NAMES, LONGEST_NAME = 16, 80
"""Names of models that are remembered, and characters of one: clients choose them."""
log = logging.getLogger("graft")


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A model whose weights never change: "reference", or the path of a checkpoint."""

    path: str


Route = ModelEndpoint | FrozenModel | None
"""None: the policy."""


class ModelRoutes:
    """The entries of agent.models, and the names that clients gave.

    entries      names or shell patterns; an exact name comes before patterns, these in their order
    embeddings   the endpoint that embeds texts; None: nothing does
    """

    def __init__(
        self, entries: Mapping[str, Route] | None = None, embeddings: ModelEndpoint | None = None
    ) -> None:
        self.entries, self.embeddings = dict(entries or {}), embeddings
        self.names: dict[str, Route] = {}
        self._noted: set[str] = set()

    def route(self, name: str) -> Route:
        """Find the model for a name, and remember the name."""
        pattern = name if name in self.entries else self._pattern(name)
        target = None if pattern is None else self.entries[pattern]
        if name and len(self.names) < MAX_NAMES:
            self.names.setdefault(name[:LONGEST_NAME], target)
        return target

    @property
    def unnamed(self) -> list[str]:
        """Names that no entry fits, so that the policy answers them."""
        return [
            name for name in self.names if name not in self.entries and self._pattern(name) is None
        ]

    def note_names(self) -> None:
        """Log which names the policy answers without being told to, again for a new one."""
        names = set(self.unnamed)
        if not names - self._noted:
            return
        self._noted |= names
        several = len(names) > 1
        log.log(logging.WARNING if several else logging.INFO, "%s", describe_names(sorted(names)))

    def _pattern(self, name: str) -> str | None:
        return next((entry for entry in self.entries if fnmatchcase(name, entry)), None)


def describe_names(names: Iterable[str]) -> str:
    """Say that the policy answers these names of models."""
    listed = [repr(name) for name in names]
    if len(listed) < 2:
        return f"agents ask for the model {', '.join(listed)}: the policy answers and is trained"
    return (
        f"agents ask for the models {', '.join(listed)}: the policy answers and is trained on all; say "
        "in agent.models which are the policy, frozen, or at an endpoint"
    )

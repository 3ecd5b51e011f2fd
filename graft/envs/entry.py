"""One entry per environment id: what builds it, with which arguments, and what it needs.

Families keep their own tables of entries (`GAMES`, `REASONING`, ...); `ENVS` in `table.py` joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

NOTHING: Mapping[str, Any] = MappingProxyType({})


class EnvEntry(NamedTuple):
    """How `make` builds one id: `build(**{**args, **kwargs of the caller})`."""

    build: str | Callable[..., Any]
    """The class (anything callable that returns an Env), or "package.module:name"."""
    args: Mapping[str, Any] = NOTHING
    turns: int | None = 1
    """Most actions in one episode; None: drawn with the instance, or unlimited."""
    needs: tuple[str, ...] = ()
    """What must be installed or present: "package:reasoning-gym", "data:axon-rl/GSM-8k", "sandbox"."""


def family_of(env_id: str) -> str:
    """The part before the colon: "game:Wordle-v0" -> "game"; ids without one are "graft"."""
    family, colon, _ = env_id.partition(":")
    return family if colon else "graft"

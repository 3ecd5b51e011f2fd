"""One entry per environment id: what builds it, with which arguments, and whether it can run here.

Families keep their own tables of entries (`GAMES`, `REASONING`, ...); `ENVS` in `table.py` joins them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple

from graft.data.hub import locate
from graft.registry import load, load_service

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

    def builder(self) -> Callable[..., Any]:
        """`build`, imported."""
        return load(self.build, "env") if isinstance(self.build, str) else self.build

    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The arguments that `build` takes."""
        return inspect.signature(self.builder()).parameters


def family_of(env_id: str) -> str:
    """The part before the colon: "game:Wordle-v0" -> "game"; ids without one are "graft"."""
    family, colon, _ = env_id.partition(":")
    return family if colon else "graft"


def missing(entry: EnvEntry) -> str:
    """What an entry lacks on this machine, and how to get it; "" if it can run.

    EnvEntry(..., needs=("package:reasoning-gym",)) -> 'pip install "graft-rl[envs]"'
    """
    return "; ".join(filter(None, map(_lack, entry.needs)))


@cache  # three hundred ids share a few needs
def _lack(need: str) -> str:
    kind, _, name = need.partition(":")
    if kind == "package":
        is_here = find_spec(name.replace("-", "_")) is not None
        return "" if is_here else 'pip install "graft-rl[envs]"'
    if kind == "data":
        if locate(name) is not None:
            return ""
        # without a slash it is not on the hub
        return f"the dataset {name}, or data=PATH" if "/" in name else "a local file, data=PATH"
    chosen, _ = load_service("sandbox")()
    return "" if chosen else "a sandbox for untrusted code, see graft doctor"

"""Environments by name: `make("calculator", digits=(2, 2))`, and `register` for one's own.

`ENVS` is the whole list; a name that is not in it may also be written "your.module:Class".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graft.protocols import Env
from graft.registry import resolve

ENVS: dict[str, Any] = {
    "arithmetic": "graft.envs.arithmetic:Arithmetic",
    "calculator": "graft.envs.arithmetic:CalculatorTask",
    "countdown": "graft.envs.countdown:Countdown",
}
"""Id -> the env's class (anything callable that returns an Env), or where to import it from."""

DEFAULTS: dict[str, dict[str, Any]] = {}
"""Id -> keyword arguments that `make` passes unless told otherwise; filled by `register`."""


def make(env_id: str, **kwargs: Any) -> Any:
    """Build an Env; keyword arguments override the ones it was registered with.

    >>> make("calculator", operands=(2, 2)).reset(seed=0)[0]
    '876+623='
    """
    build = resolve(env_id, ENVS, "env")
    env = build(**{**DEFAULTS.get(env_id, {}), **kwargs})
    innermost = getattr(env, "unwrapped", env)  # tasks are named by the env that poses them
    innermost.env_id = env_id
    where = getattr(build, "func", build)  # a functools.partial has no name of its own
    innermost.entry_point = f"{where.__module__}:{where.__qualname__}"
    return env


def register(env_id: str, entry: str | Callable[..., Env], **defaults: Any) -> None:
    """Add an env to `ENVS`: a class, a function that returns an env, or "package.module:name"."""
    if env_id in ENVS:
        raise ValueError(
            f"env {env_id!r} is already registered as {ENVS[env_id]!r}; pick another id"
        )
    ENVS[env_id] = entry
    DEFAULTS[env_id] = defaults

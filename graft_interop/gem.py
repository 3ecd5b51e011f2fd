"""A GEM env (PyPI gem-llm) as a graft env, with a random stream of its own.

GEM draws from the generators of `random` and `numpy` that the whole process shares. Here every env
has its own state of both, swapped in for the length of a call: (id, seed, actions) fixes what happens,
whatever else draws numbers in the process.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from graft.types import Turn
from graft_interop.external import ExternalEnv, can_copy

GENERATORS_LOCK = threading.RLock()
"""Held while a GEM env uses the shared generators."""


class GemEnv(ExternalEnv):
    """`GemEnv("game:Wordle-v0-easy")`, or around an env of `gem.make`.

    GEM leaves the board out of the observation, for its wrappers to add; here it is part of the
    observation, and `info["suffix"]` repeats it.
    """

    def __init__(self, env: Any, *, max_turns: int | None = None, **kwargs: Any) -> None:
        super().__init__(max_turns)
        self.stream: Any = None
        if isinstance(env, str):
            with self.own_stream(seed=0):  # some envs draw in their __init__
                self.env: Any = library().make(env, **kwargs)
        elif kwargs:
            raise ValueError(f"{sorted(kwargs)}: arguments for gem.make, but env is an env already")
        else:
            self.env = env
        self.forkable = can_copy(self.env)

    def begin(self, seed: int) -> tuple[str, Mapping[str, Any]]:
        with self.own_stream(seed):
            observation, info = self.env.reset(seed=seed % 2**32)  # numpy's seeds are 32 bits
        return complete(observation, info), info

    def respond(self, action: str) -> Turn:
        with self.own_stream():
            observation, reward, is_terminated, is_truncated, info = self.env.step(action)
        text = complete(observation, info)
        return Turn(text, float(reward), bool(is_terminated), bool(is_truncated), info)

    def sample_random_action(self) -> str:
        with self.own_stream():
            return self.env.sample_random_action()

    def close(self) -> None:
        if callable(end := getattr(self.env, "close", None)):
            end()

    @contextmanager
    def own_stream(self, seed: int | None = None) -> Iterator[None]:
        """Swap this env's generator states in, and out again."""
        import numpy

        with GENERATORS_LOCK:
            shared = random.getstate(), numpy.random.get_state()
            if seed is not None:
                random.seed(seed)
                numpy.random.seed(seed % 2**32)
            elif self.stream is not None:
                random.setstate(self.stream[0])
                numpy.random.set_state(self.stream[1])
            try:
                yield
            finally:
                self.stream = random.getstate(), numpy.random.get_state()
                random.setstate(shared[0])
                numpy.random.set_state(shared[1])


def complete(observation: str, info: Mapping[str, Any]) -> str:
    """The observation between the prefix and suffix that GEM keeps in info."""
    parts = (info.get("prefix", ""), observation, info.get("suffix", ""))
    return "\n".join(part.rstrip("\n") for part in parts[:2] if part) + (
        f"\n{parts[2]}" if parts[2] else ""
    )


def library() -> Any:
    try:
        import gem
    except ImportError as error:
        raise ImportError('GEM is not installed: pip install "graft-rl[gem]"') from error
    return gem

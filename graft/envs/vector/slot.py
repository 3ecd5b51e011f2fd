"""One slot of a vector: its env, and what follows the end of an episode or a fault.

    act("a") -> Turn                    the env's own step while an episode runs
    act("b") -> Turn, terminated        goes to `end`: the next episode, a pause, or nothing
    act("c") raises KeyError            goes to `fail`: a truncated Turn, the env is discarded

What the next step does is a function in `act`, so that a running episode pays nothing for the other
cases.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from graft.protocols import Observation
from graft.types import Turn

Autoreset = Literal["same_step", "next_step", "off"]

FAULTS = (Exception, SystemExit)
"""What an env may raise. A KeyboardInterrupt comes from the terminal, not from the env."""

MAX_FAULT = 500  # characters of an error that are kept


class EnvSpec(NamedTuple):
    """How to build one env, and to build it again after a fault."""

    env_id: str
    build: Callable[[], Any]
    seed: int
    """Of the first episode."""


class EnvSlot:
    """Keeps one env playable. Resets and steps do not raise what the env raises."""

    __slots__ = ("act", "autoreset", "catches", "env", "faults", "next_seed", "seed", "spec")

    def __init__(self, spec: EnvSpec, autoreset: Autoreset, env: Any = None) -> None:
        self.spec = spec
        self.autoreset: Autoreset = autoreset
        self.env: Any = env  # None: built by the next reset
        self.seed = spec.seed  # the last one that a caller chose
        self.next_seed: int | None = spec.seed  # for a reset without a seed
        self.faults = 0
        self.catches: tuple[type[BaseException], ...] = FAULTS
        self.act: Callable[[str], Turn] = self.restart

    def open(self) -> None:
        """Build the env now. It raises: arguments that fit no env are a mistake."""
        if self.env is None:
            self.env = self.spec.build()

    def reset(self, seed: int | None = None) -> tuple[Observation, dict[str, Any]]:
        if seed is not None:
            self.seed = seed
        elif self.next_seed is not None:
            seed = self.next_seed
        try:
            self.open()
            observation, info = self.env.reset(seed)
            self.act = self.env.step
        except self.catches as fault:
            self.act = self.refuse if self.autoreset == "off" else self.restart
            return "", self.fail(describe(fault)).info
        self.next_seed = None
        return observation, info

    def step(self, action: str) -> Turn:
        try:
            turn = self.act(action)
            return self.end(turn) if turn[2] or turn[3] else turn
        except self.catches as fault:
            return self.end(self.fail(describe(fault)))

    def end(self, turn: Turn) -> Turn:
        """The result of an episode's last turn; also decides what the next step will do."""
        if self.autoreset == "same_step" and self.act != self.restart:
            final, reward, is_terminated, is_truncated, final_info = turn
            observation, info = self.reset()
            # written into: a reset gives a fresh dict, and this is on the path of short episodes
            info["final_observation"] = final
            info["final_info"] = final_info
            if "error" in final_info:
                info.setdefault("error", final_info["error"])
            return Turn(observation, reward, is_terminated, is_truncated, info)  # pyright: ignore[reportArgumentType]
        # a restart that has just failed is not tried again at once: it would fail again
        self.act = self.refuse if self.autoreset == "off" else self.restart
        return turn

    def fail(self, error: str) -> Turn:
        """Discard the env; the truncated turn that reports the fault."""
        self.close()
        self.faults += 1
        # a fresh env has no seed of its own: give it one that the seed of the slot fixes
        self.next_seed = random.Random(f"{self.seed}/{self.faults}").getrandbits(53)
        return Turn("", truncated=True, info={"error": error})

    def recover(self, error: str) -> Turn:
        """The result of a step that was abandoned at its deadline."""
        self.act = self.refuse  # an episode was running, even if this slot is new
        return self.end(self.fail(error))

    def successor(self) -> EnvSlot:
        """A new slot in place of this one, whose env hangs."""
        new = EnvSlot(self.spec, self.autoreset)
        new.seed, new.faults = self.seed, self.faults
        new.fail("")
        if self.autoreset == "off":
            new.act = new.refuse
        return new

    def restart(self, action: str) -> Turn:
        """Return the first observation of the next episode in place of a step. The action is unused."""
        observation, info = self.reset()
        return Turn(observation, truncated="error" in info, info=info)  # pyright: ignore[reportArgumentType]

    def refuse(self, action: str) -> Turn:
        """Return an error in place of a step after the end, with autoreset "off"."""
        error = f"RuntimeError: env {self.spec.env_id!r}: the episode is over; call reset()"
        return Turn("", truncated=True, info={"error": error})

    def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """A method or attribute of the env by name; faults are raised."""
        self.open()
        target = getattr(self.env, name)
        return target(*arguments) if callable(target) else target

    @property
    def state(self) -> list[Any]:
        """What the next step does ("step", "restart" or "refuse"), `seed`, `next_seed`, `faults`."""
        next_step = "step"
        if self.act in (self.restart, self.refuse):
            next_step = "restart" if self.act == self.restart else "refuse"
        return [next_step, self.seed, self.next_seed, self.faults]

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        next_step, self.seed, self.next_seed, self.faults = state
        if next_step != "step":
            self.act = getattr(self, next_step)
        elif self.env is not None:
            self.act = self.env.step

    def fork(self) -> EnvSlot:
        twin = EnvSlot(self.spec, self.autoreset, None if self.env is None else self.env.fork())
        twin.state = self.state
        return twin

    def get_state(self) -> dict[str, Any]:
        state = None if self.env is None else self.env.get_state()
        return {"env": state, "slot": self.state}

    def set_state(self, state: Mapping[str, Any]) -> None:
        if state["env"] is None:
            self.close()
        else:
            self.open()
            self.env.set_state(state["env"])
        self.state = state["slot"]

    def close(self) -> None:
        env, self.env = self.env, None
        if env is not None:
            with contextlib.suppress(*self.catches):  # it is discarded either way
                env.close()


class EnvFailure(NamedTuple):
    """The result of a `call` that raised; resets and steps report theirs in info["error"]."""

    error: str


class SlotRequest(NamedTuple):
    """One method call on one slot, in plain data: it travels to the thread of that slot."""

    method: str
    """A method of EnvSlot: "reset", "step", "recover", "call", "get_state", "set_state"."""
    arguments: tuple[Any, ...] = ()

    def run(self, slot: EnvSlot) -> Any:
        try:
            return getattr(slot, self.method)(*self.arguments)
        except slot.catches as fault:  # of a call: resets and steps catch their own
            return EnvFailure(describe(fault))

    def failed(self, error: str) -> Any:
        """The result of a request that will never be answered."""
        if self.method == "reset":
            return "", {"error": error}
        if self.method == "recover":
            return Turn("", truncated=True, info={"error": error})
        return EnvFailure(error)


def describe(fault: BaseException) -> str:
    """KeyError("x") -> "KeyError: 'x'", MemoryError() -> "MemoryError"."""
    return f"{type(fault).__name__}: {fault}".removesuffix(": ")[:MAX_FAULT]

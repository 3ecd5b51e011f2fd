"""The engine of a Policy: many conversations at once, from the learner's own tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any
from weakref import finalize

from graft.api.attributes import ExplainedAttributes
from graft.api.policy import Policy, load
from graft.api.settings import settings
from graft.signatures import explain_arguments
from graft.user_code import UserCodeError, describe_value

if TYPE_CHECKING:
    from graft.protocols import Context, Engine
    from graft.train.tasks import TaskStream


class PolicyEngine(ExplainedAttributes):
    """Samples from a Policy with continuous batching; it holds no copy of the weights.

    >>> engine = graft.Engine(policy)
    >>> episodes = graft.collect(engine, "game:GuessTheNumber-v0", tasks=4, samples=2)

    After `learner.step` it samples from the new weights: there is nothing to copy. Close it, or use
    it in a `with` block, to give back the memory of its key-value cache.

    policy     the model to sample from
    seed       of tasks and draws: two engines with one seed draw the same from the same weights
    kv_tokens  tokens that the key-value cache holds; 0: chosen by the free memory
    kv         "fp8", on a CPU: keys and values in eight bits, in this engine and wherever the policy
               computes from now on; None: as it does already, like one of a run with `engine.kv: fp8`
    """

    @explain_arguments
    def __init__(
        self, policy: Policy, *, seed: int = 0, kv_tokens: int = 0, kv: str | None = None
    ) -> None:
        from graft.train.rollouts.rollout_engine import make_engine

        if not isinstance(policy, Policy):
            raise UserCodeError(
                f"Engine() takes a Policy, not {describe_value(policy)}; load one first: graft.load(...)"
            )
        self.policy, self.seed = policy, seed
        policy.use_kv(kv)
        config = settings(policy.config, run={"seed": seed}, engine={"kv_tokens": kv_tokens})
        self.sampler: Engine = make_engine(config, policy.model, policy.tokenizer, policy.actions)
        self.sampler.load(None, policy.version)
        self.streams: dict[str, TaskStream] = {}
        """Training tasks by environment: each `collect` continues after the tasks of the last one."""
        self.calls: dict[str, int] = {}
        """Collections so far, by environment."""
        self.branches: dict[str, Any] = {}
        """Branches that learn from one collection to the next."""
        self._owner: Any = None  # the event loop that samples, or another user
        self._users = 0
        self._is_closed = False
        self._finalizer = finalize(self, self.sampler.close)  # also where the name is bound anew
        policy.engines.add(self)

    @property
    def version(self) -> int:
        """The version of the weights it samples from; equal to `policy.version`."""
        return self.sampler.version

    @property
    def stats(self) -> dict[str, int]:
        """Counters since the start: steps, prefill_tokens, decode_tokens, pages_free, ..."""
        return getattr(self.sampler, "stats", {})

    def open(self, tokens: Sequence[int], key: int | None = None) -> Context:
        """A context over `tokens`, for sampling by hand: `await context.sample(graft.Sampling())`.

        It can `append`, `fork` and `close`. `key` names its draws: one key, the same tokens.
        """
        self.check_open()
        return self.sampler.open(tokens, key)

    def renew(self, version: int) -> None:
        """The policy's weights have changed in place. Samples in progress pause and continue with them."""
        self.sampler.pause()
        self.sampler.load(None, version)

    @property
    def is_idle(self) -> bool:
        return not self._is_closed and self._owner is None

    def check_open(self) -> None:
        if self._is_closed:
            raise UserCodeError("this engine is closed; make another one: graft.Engine(policy)")

    def check_idle(self) -> None:
        """Refuse to change weights that another thread computes with."""
        if self._owner is not None and self._owner is not _running_loop():
            raise UserCodeError(
                "an engine of this policy is sampling in another thread; wait for its collect() before "
                "learner.step()"
            )

    @contextmanager
    def sampling(self, owner: Any = None) -> Iterator[Engine]:
        """The engine below, for one owner at a time: the running event loop, if none is given."""
        self.check_open()
        owner = _running_loop() if owner is None else owner
        if self._owner is not None and self._owner is not owner:
            raise UserCodeError(
                "this engine is sampling in another event loop; await that collection first, use "
                "`await graft.acollect(...)` for both, or make a second engine"
            )
        self._owner, self._users = owner, self._users + 1
        try:
            yield self.sampler
        finally:
            self._users -= 1
            if not self._users:
                self._owner = None

    def close(self) -> None:
        """Give back the memory. Closing twice is fine."""
        if not self._is_closed:
            self._is_closed = True
            self.policy.engines.discard(self)
            self._finalizer()

    def __enter__(self) -> PolicyEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"version {self.version}"
        return f"Engine({self.policy!r}, {state}, seed={self.seed})"


def load_if_path(given: Any, function: str, trust: bool = False) -> Policy | PolicyEngine:
    """The policy or engine of a call, which may name a folder or a model of the hub instead."""
    if isinstance(given, str | PathLike):
        return load(given, trust=trust)
    if not isinstance(given, Policy | PolicyEngine):
        raise UserCodeError(
            f"{function}() takes a Policy, an Engine or a path, not {describe_value(given)}"
        )
    return given


@contextmanager
def engine_for(given: Policy | PolicyEngine, seed: int) -> Iterator[PolicyEngine]:
    """An engine to sample with: the one given, an idle one of the policy with this seed, or a new one.

    A second key-value cache beside an idle one could fill the memory of a GPU.
    """
    if isinstance(given, PolicyEngine):
        given.check_open()
        yield given
        return
    idle = (engine for engine in given.engines if engine.is_idle and engine.seed == seed)
    if (found := next(idle, None)) is not None:
        yield found
        return
    with PolicyEngine(given, seed=seed) as made:
        yield made


def engine_of(given: Any, function: str) -> PolicyEngine:
    """The engine that a user handed over; a Policy or something else is refused with the way out."""
    if isinstance(given, PolicyEngine):
        given.check_open()
        return given
    hint = "graft.Engine(policy)" if isinstance(given, Policy) else "graft.Engine(graft.load(...))"
    raise UserCodeError(
        f"{function}() samples with an Engine, not {describe_value(given)}: give {hint}"
    )


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None

"""A collector turns tasks into episodes. Where and when it does so is nobody else's business.

    SyncCollector    in this thread, when the episodes are asked for: sampling and learning take turns
    AsyncCollector   on a thread of its own, so that tools are waited for while something is learned

Two more distribute the work: over the processes of torchrun (`train.distributed.collector`) or the
workers of a Ray cluster (`cluster.collector`). All have the same interface:

    pending = collector.submit(Job(tasks, salt=12))      # may begin at once
    episodes = pending.result()                     # in the order of the tasks
    collector.load(weights, version=12)                  # whoever samples from now on has these

In the background, samples that are under way when weights come are paused between two tokens and go
on with the new ones: each span says which version wrote it. Whoever wants no mixture discards these
attempts instead, and they begin anew.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from graft.deadlines import waiting
from graft.protocols import Stateful
from graft.rollout.branches.branch import Branch, independent
from graft.rollout.collect import collect, grow
from graft.rollout.episode_builder import RolloutSetup
from graft.rollout.failure import together
from graft.rollout.stall_monitor import GRACE, StallMonitor
from graft.types import Episode, Task

PATIENCE = 30.0
"""Seconds that rollouts may take to be given up."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """Tasks to attempt together, and how."""

    tasks: Sequence[Task]
    name: str
    """As messages name it: "the episodes of step 12"."""
    step: int = 0
    salt: int = 0
    """Makes its draws differ from those of other requests."""
    held_out: bool = False
    """Attempt them where tasks are held out, so many times each and without branching."""
    samples: int = 1
    temperature: float | None = None
    """None: the run's own."""
    places: Sequence[int] | None = None
    """The number of each task among its neighbours, where this is only a part of a request."""

    def part(self, numbers: Sequence[int]) -> RolloutRequest:
        """The request of some of its tasks."""
        places = range(len(self.tasks)) if self.places is None else self.places
        return replace(
            self,
            tasks=[self.tasks[i] for i in numbers],
            places=[places[i] for i in numbers],
        )


@dataclass(frozen=True, slots=True)
class CollectorConfig:
    """Where requests take place: the run's setup, the held-out one, and where its attempts fork."""

    setup: RolloutSetup
    held_out: RolloutSetup
    branch: Branch
    concurrency: int = 256
    samples: int | None = None
    """Attempts that the branch has to grow; None: as many as it likes."""

    def of(self, request: RolloutRequest) -> tuple[RolloutSetup, Branch]:
        setup = replace(
            self.held_out if request.held_out else self.setup,
            salt=request.salt,
            samples=request.samples if request.held_out else self.samples,
        )
        if request.temperature is not None:
            sampling = replace(setup.sampling, temperature=request.temperature)
            setup = replace(setup, sampling=sampling)
        return setup, independent(request.samples) if request.held_out else self.branch

    def begin(self, request: RolloutRequest) -> None:
        """A branch that learns from step to step hears which one this is."""
        if not request.held_out and isinstance(self.branch, Stateful):
            self.branch.begin(request.step)


class PendingRollouts(Protocol):
    """Episodes on their way."""

    def result(self) -> list[Episode]: ...
    def is_done(self) -> bool: ...


class Collector(Protocol):
    """Whoever attempts tasks. `counts` are numbers since they were last read, for the metrics."""

    def submit(self, request: RolloutRequest) -> PendingRollouts: ...
    def load(self, weights: Mapping[str, Any] | None, version: int) -> None: ...
    def counts(self) -> dict[str, float]: ...
    def close(self) -> None: ...


class SyncCollector:
    """This thread attempts them, when somebody asks for the episodes."""

    def __init__(self, ground: CollectorConfig) -> None:
        self.ground = ground

    def submit(self, request: RolloutRequest) -> PendingRollouts:
        return _DeferredRollouts(self.ground, request)

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        self.ground.setup.engine.load(weights, version)

    def counts(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.ground.setup.engine.close()


class _DeferredRollouts:
    def __init__(self, ground: CollectorConfig, request: RolloutRequest) -> None:
        self.ground, self.request = ground, request

    def result(self) -> list[Episode]:
        self.ground.begin(self.request)
        setup, branch = self.ground.of(self.request)
        return collect(
            self.request.tasks,
            setup,
            branch,
            concurrency=self.ground.concurrency,
            places=self.request.places,
        )

    def is_done(self) -> bool:
        return False


class AttemptRunner:
    """Attempts tasks on the event loop that asks: in the order they come, so many at a time.

    Weights change on that loop too, between two of the engine's steps: nothing is computed with half
    of them. The engine needs a copy of its own, since the learner goes on changing the others.
    """

    def __init__(self, ground: CollectorConfig, *, discards: bool = False) -> None:
        self.ground, self.discards = ground, discards
        self.discarded = 0
        self._gate = asyncio.Semaphore(ground.concurrency)
        self._growing: set[asyncio.Task[Episode]] = set()
        self._thrown: set[asyncio.Task[Episode]] = set()

    async def attempt(self, task: Task, request: RolloutRequest, place: int) -> Episode:
        """One episode; one that is discarded on the way begins anew."""
        async with self._gate:
            while True:
                setup, branch = self.ground.of(request)
                growing = asyncio.create_task(grow(task, setup, branch, place))
                if not request.held_out:
                    self._growing.add(growing)
                try:
                    return await growing
                except asyncio.CancelledError:
                    own = asyncio.current_task()
                    if growing not in self._thrown or (own is not None and own.cancelling()):
                        raise  # it is us who are cancelled, alone or too
                    self.discarded += 1
                finally:
                    self._growing.discard(growing)
                    self._thrown.discard(growing)

    def renew(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """New weights, now: samples under way pause and go on with them, or are thrown away."""
        engine = self.ground.setup.engine
        if self.discards:
            thrown = {one for one in self._growing if not one.done()} - self._thrown
            self._thrown |= thrown
            for one in thrown:
                one.cancel()
        engine.pause()
        engine.load(weights, version)


class AsyncCollector:
    """A thread attempts them, while this one does something else.

    Nobody waits for a thread that is gone: what ended it is raised where its episodes are asked for.
    """

    def __init__(
        self, ground: CollectorConfig, *, discards: bool = False, deadline: float = 3600.0
    ) -> None:
        self.ground, self.deadline = ground, deadline
        self._runner = AttemptRunner(ground, discards=discards)
        self._told = 0  # of the discarded, in `counts`
        self._asked: set[Future[Any]] = set()
        self._end: BaseException | None = None  # why the thread attempts nothing any more
        self._is_closed = False
        self._monitor = StallMonitor()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="graft-rollouts", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            with self._monitor:
                self._loop.call_soon(self._monitor.follow, self._loop)
                self._loop.run_forever()
            self._end = RuntimeError("the collector is closed and attempts nothing any more")
        except BaseException as error:  # as where an environment calls exit()
            self._end = error
        for future in list(self._asked):
            _fail(future, self._end)
        while under_way := asyncio.all_tasks(self._loop):
            for task in under_way:
                task.cancel()
            # one more environment of that kind, or `close` stops what has ended by itself
            with suppress(SystemExit, KeyboardInterrupt, RuntimeError):
                self._loop.run_until_complete(asyncio.wait(under_way))
        self._loop.close()

    def _ask(self, begin: Callable[[], object], future: Future[Any]) -> None:
        """Let the thread begin something; where it ends before that is done, the future fails."""
        self._asked.add(future)
        future.add_done_callback(self._asked.discard)
        if self._end is None:
            with suppress(RuntimeError):  # the loop is closed, just now
                self._loop.call_soon_threadsafe(begin)
        if self._end is not None:
            _fail(future, self._end)

    def submit(self, request: RolloutRequest) -> PendingRollouts:
        future: Future[list[Episode]] = Future()

        def begin() -> None:
            working = self._loop.create_task(self._attempt(request))
            working.add_done_callback(lambda done: _hand_over(done, future))

        self._ask(begin, future)
        return FutureRollouts(future, request.name)

    async def _attempt(self, request: RolloutRequest) -> list[Episode]:
        self.ground.begin(request)
        places = range(len(request.tasks)) if request.places is None else request.places
        async with together() as group:
            growing = [
                group.create_task(self._runner.attempt(task, request, place))
                for task, place in zip(request.tasks, places, strict=True)
            ]
        return [one.result() for one in growing]

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """New weights, between two steps of the engine."""
        renewed: Future[None] = Future()

        def renew() -> None:
            try:
                self._runner.renew(weights, version)
            except Exception as error:
                _fail(renewed, error)
            else:
                with suppress(InvalidStateError):
                    renewed.set_result(None)

        what = f"the engine to take version {version} of the weights"
        with waiting(what, self.deadline):
            self._ask(renew, renewed)
            if not wait([renewed], self.deadline).done:
                raise TimeoutError(
                    f"waited {self.deadline:g} s for {what}: an environment blocks the rollout event "
                    "loop; set `blocking = True` on its class"
                )
        renewed.result()

    def counts(self) -> dict[str, float]:
        discarded = self._runner.discarded
        new, self._told = discarded - self._told, discarded
        return {"rollout/discarded": float(new)}

    def close(self) -> None:
        """Give up what is under way and end the thread."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._loop.stop)
        with waiting("rollouts under way to be given up", PATIENCE):
            # it is a daemon: the process does not wait any longer, nor for code that holds it up
            until = time.monotonic() + PATIENCE
            while self._thread.is_alive() and time.monotonic() < until:
                self._thread.join(0.2)
                if self._monitor.seconds > GRACE:
                    break
        self.ground.setup.engine.close()


def _hand_over(done: asyncio.Task[list[Episode]], future: Future[list[Episode]]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        _fail(future, error)
    elif not done.cancelled():
        with suppress(InvalidStateError):
            future.set_result(done.result())


def _fail(future: Future[Any], error: BaseException) -> None:
    with suppress(InvalidStateError):  # somebody else was the first to say how it went
        future.set_exception(error)


class FutureRollouts:
    """Episodes that somebody else works on."""

    def __init__(self, future: Future[list[Episode]], name: str) -> None:
        self._future, self._name = future, name

    def result(self) -> list[Episode]:
        with waiting(self._name):
            return (
                self._future.result()
            )  # its components have deadlines: every completion, every tool

    def is_done(self) -> bool:
        return self._future.done()


class StalenessWindow:
    """The steps under way: that which is learned next, and `ahead` more behind it.

    `make` gives the request of a step. Step j is submitted when step j - ahead is asked for, that is,
    with the weights of version j - ahead - 1 or later: no token is older than that when j learns.
    With 0 a step begins when its turn has come, and the two sides take turns.

        ahead=1    take(1): submits 1, 2; waits for 1      take(2): submits 3; waits for 2
    """

    def __init__(
        self, collector: Collector, make: Callable[[int], RolloutRequest], ahead: int, last: int
    ) -> None:
        self.collector, self.make, self.ahead, self.last = collector, make, ahead, last
        self._pending: dict[int, PendingRollouts] = {}
        self._next: int | None = None

    def take(self, step: int) -> list[Episode]:
        """The episodes of a step; steps are taken in order."""
        first = step if self._next is None else self._next
        self._next = min(step + self.ahead, self.last) + 1
        for number in range(first, self._next):
            self._pending[number] = self.collector.submit(self.make(number))
        return self._pending.pop(step).result()

    @property
    def num_done(self) -> int:
        """Steps that are complete and wait for the learner."""
        return sum(pending.is_done() for pending in self._pending.values())

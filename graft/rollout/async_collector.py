"""Collect on a thread, while this one learns.

Samples under way when weights arrive are paused between two tokens and continue with the new ones;
each span records the version that wrote it. With `discards` these attempts start again instead.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any

from graft.deadlines import waiting
from graft.rollout.collect import build_episode
from graft.rollout.collector import CollectorConfig, PendingRollouts, RolloutRequest
from graft.rollout.event_loop import GRACE, StallMonitor
from graft.rollout.failure import concurrently
from graft.types import Episode, Task

PATIENCE = 30.0
"""Seconds that `close` waits for rollouts under way to end."""


class AttemptRunner:
    """Attempts tasks in the order of the calls, at most `concurrency` at a time.

    Weights are loaded on the same loop, between two steps of the engine, so no token is computed with
    half of them. The engine needs its own copy, because the learner continues to change the original.
    """

    def __init__(self, config: CollectorConfig, *, discards: bool = False) -> None:
        """`discards`: new weights discard the training attempts under way, which start again."""
        self.config, self.discards = config, discards
        self.num_discarded = 0
        self._gate = asyncio.Semaphore(config.concurrency)
        self._running: set[asyncio.Task[Episode]] = set()
        self._discarded: set[asyncio.Task[Episode]] = set()

    async def attempt(self, task: Task, request: RolloutRequest, index: int) -> Episode:
        """One episode; one that is discarded on the way starts again."""
        async with self._gate:
            while True:
                setup, branch = self.config.setup_for(request)
                running = asyncio.create_task(build_episode(task, setup, branch, index))
                if not request.held_out:
                    self._running.add(running)
                try:
                    return await running
                except asyncio.CancelledError:
                    own = asyncio.current_task()
                    if running not in self._discarded or (own is not None and own.cancelling()):
                        raise  # this call itself is cancelled
                    self.num_discarded += 1
                finally:
                    self._running.discard(running)
                    self._discarded.discard(running)

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """New weights, now: samples under way pause and continue with them, or are discarded."""
        engine = self.config.setup.engine
        if self.discards:
            discarded = {one for one in self._running if not one.done()} - self._discarded
            self._discarded |= discarded
            for one in discarded:
                one.cancel()
        engine.pause()
        engine.load(weights, version)


class AsyncCollector:
    """Collects on a thread of its own. What ends that thread is raised by `result()` and `load`."""

    def __init__(
        self, config: CollectorConfig, *, discards: bool = False, deadline: float = 3600.0
    ) -> None:
        self.config, self.deadline = config, deadline
        self._runner = AttemptRunner(config, discards=discards)
        self._num_counted = 0  # discarded attempts that `counts` has reported
        self._futures: set[Future[Any]] = set()
        self._end: BaseException | None = None  # what ended the thread
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
            self._end = RuntimeError("the collector is closed and attempts no more tasks")
        except BaseException as error:  # as where an environment calls exit()
            self._end = error
        for future in list(self._futures):
            _fail(future, self._end)
        while under_way := asyncio.all_tasks(self._loop):
            for task in under_way:
                task.cancel()
            # another environment calls exit(), or `close` stops a loop that has ended
            with suppress(SystemExit, KeyboardInterrupt, RuntimeError):
                self._loop.run_until_complete(asyncio.wait(under_way))
        self._loop.close()

    def _on_thread(self, begin: Callable[[], object], future: Future[Any]) -> None:
        """Run `begin` on the thread; where the thread ends before the future is done, it fails."""
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        if self._end is None:
            with suppress(RuntimeError):  # the loop was closed just now
                self._loop.call_soon_threadsafe(begin)
        if self._end is not None:
            _fail(future, self._end)

    def submit(self, request: RolloutRequest) -> PendingRollouts:
        future: Future[list[Episode]] = Future()

        def begin() -> None:
            working = self._loop.create_task(self._attempt(request))
            working.add_done_callback(lambda done: _hand_over(done, future))

        self._on_thread(begin, future)
        return FutureRollouts(future, request.name)

    async def _attempt(self, request: RolloutRequest) -> list[Episode]:
        self.config.begin(request)
        return await concurrently(
            lambda numbered: self._runner.attempt(numbered[1], request, numbered[0]),
            request.numbered(),
        )

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """New weights, between two steps of the engine."""
        loaded: Future[None] = Future()

        def load() -> None:
            try:
                self._runner.load(weights, version)
            except Exception as error:
                _fail(loaded, error)
            else:
                with suppress(InvalidStateError):
                    loaded.set_result(None)

        what = f"the engine to take version {version} of the weights"
        with waiting(what, self.deadline):
            self._on_thread(load, loaded)
            if not wait([loaded], self.deadline).done:
                raise TimeoutError(
                    f"waited {self.deadline:g} s for {what}: an environment blocks the rollout event "
                    "loop; set `blocking = True` on its class"
                )
        loaded.result()

    def counts(self) -> dict[str, float]:
        total = self._runner.num_discarded
        new, self._num_counted = total - self._num_counted, total
        return {"rollout/discarded": float(new)}

    def close(self) -> None:
        """Cancel what is under way and end the thread."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._loop.stop)
        with waiting("rollouts under way to be given up", PATIENCE):
            # the thread is a daemon: the process may end before it, also where code blocks the loop
            until = time.monotonic() + PATIENCE
            while self._thread.is_alive() and time.monotonic() < until:
                self._thread.join(0.2)
                if self._monitor.seconds > GRACE:
                    break
        self.config.setup.close()


def _hand_over(done: asyncio.Task[list[Episode]], future: Future[list[Episode]]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        _fail(future, error)
    elif not done.cancelled():
        with suppress(InvalidStateError):
            future.set_result(done.result())


def _fail(future: Future[Any], error: BaseException) -> None:
    with suppress(InvalidStateError):  # it has a result or an error already
        future.set_exception(error)


class FutureRollouts:
    """Episodes that another thread collects."""

    def __init__(self, future: Future[list[Episode]], name: str) -> None:
        self._future, self._name = future, name

    def result(self) -> list[Episode]:
        with waiting(self._name):
            return self._future.result()  # every completion and every tool has its own deadline

    def is_done(self) -> bool:
        return self._future.done()

"""Collect on a cluster: N Ray workers attempt tasks, and any of them may die.

Tasks wait in one queue. A worker gets as many as it may have under way; what it had when it dies goes
back to the front of the queue, and a new worker is started.

    queue            worker 0      worker 1
    t4 t5 t6         t0 t1         t2 t3
    t4 t5 t6         t0 t1         (killed)
    t2 t3 t4 t5 t6   t0 t1         worker 2 starts, gets the present weights and takes t2, t3

An episode is counted when its result is taken from the one worker that is responsible for it: none is
counted twice, and each repeated one is counted in `rollout/redone`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from graft.cluster.ray_import import cause_of, ray_module
from graft.cluster.rollout_worker import AttemptResult, RolloutWorker
from graft.cluster.scale_file import ScaleFile
from graft.cluster.weight_sender import WeightSender
from graft.cluster.weight_transfer import packed
from graft.cluster.worker import (
    PING_EVERY,
    ClusterWorker,
    PendingAttempts,
    WorkerAttempt,
    WorkerStage,
)
from graft.config import Config
from graft.deadlines import waiting
from graft.rollout.collector import PendingRollouts, RolloutRequest
from graft.train.errors import RunStopped

POLL = 0.2
"""Seconds between two polls of arrived results."""
ANSWER_TIMEOUT = 60.0
"""Seconds without an answer after which a worker counts as dead, or `parallel.deadline` if less."""
START_TIMEOUT = 300.0
"""Seconds for loading a model, or `parallel.deadline` if more; pings are not answered meanwhile."""
PLACEMENT_TIMEOUT = 60.0
"""Seconds, or `parallel.deadline` if more, for Ray to place at least one worker."""
MAX_FAILED_STARTS = 3
"""Workers beyond the wanted number that may die in a row before their first episode."""
MAX_DEATHS = 5
"""Workers that may die during one attempt before the attempt counts as the cause."""
MAX_DELAY = 60.0
"""Seconds between two failing starts."""


class RayCollector:
    """Collects on the workers of a Ray cluster; one thread communicates with them."""

    def __init__(
        self, config: Config, folder: Path, note: Callable[[str], None], cwd: str = "."
    ) -> None:
        self.config, self.folder, self.note, self.cwd = config, folder, note, cwd
        self.ray = ray_module()
        self.limit = max(1, config.rollout.concurrency)
        self.deadline = config.parallel.deadline
        self.patience = min(ANSWER_TIMEOUT, self.deadline)
        self.wanted = config.cluster.workers
        self.workers: list[ClusterWorker] = []
        self.queue: deque[WorkerAttempt] = deque()
        self.redone = self.discarded = 0
        self._num_started = self._num_failed_starts = 0
        self._start_after = 0.0
        self._checked_at = time.monotonic()
        self._scale_file = ScaleFile(folder)
        self._weights: tuple[Any, int] | None = None  # (reference in the store, version)
        backend = "nccl" if config.cluster.gpus else "gloo"
        self._sender = WeightSender(self.ray, backend, self.deadline, self.patience, self._remove)
        self._lock = threading.RLock()  # never held during a wait
        self._error: BaseException | None = None
        self._is_closed = threading.Event()
        self._wakeup = threading.Event()
        self._first_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="graft-workers", daemon=True)
        self._thread.start()

    # called by the training loop

    def wait(self) -> None:
        """Wait until one worker is ready: faults of the recipe are known then."""
        with waiting("the first worker to be ready", max(START_TIMEOUT, self.deadline)):
            self._first_ready.wait()
        self._check()

    def submit(self, request: RolloutRequest) -> PendingRollouts:
        small = replace(request, tasks=(), indices=None)
        attempts = [WorkerAttempt(task, small, index) for index, task in request.numbered()]
        with self._lock:
            self._check()
            self.queue.extend(attempts)
        self._wakeup.set()
        return PendingAttempts(attempts, f"{request.name} from {self.wanted} workers")

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Send the weights to all workers and wait until each has them or is gone."""
        assert weights is not None, "workers share no memory with the learner"
        self._check()
        with waiting(f"all workers to take version {version} of the weights", self.deadline):
            is_broadcast = self.config.cluster.sync == "broadcast"
            if is_broadcast:
                weights = {name: weights[name] for name in weights}
            reference = self.ray.put(packed(weights))  # also for workers that start later
            with self._lock:
                self._weights = reference, version
                ready = [worker for worker in self.workers if worker.stage is WorkerStage.READY]
            if is_broadcast and ready:
                missed = self._sender.broadcast(weights, version, ready)
                if missed:
                    self.note(
                        f"the broadcast of version {version} failed; the weights are sent through the store"
                    )
                ready = [worker for worker in missed if worker in self.workers]
            for worker, error in self._sender.load(reference, version, ready).items():
                if error:
                    self._fail(RunStopped(f"{worker} cannot take the weights: {error}"))
        self._check()

    def counts(self) -> dict[str, float]:
        with self._lock:
            redone, self.redone = self.redone, 0
            discarded, self.discarded = self.discarded, 0
            return {
                "rollout/redone": float(redone),
                "rollout/discarded": float(discarded),
                "rollout/workers": float(sum(worker.is_ready for worker in self.workers)),
            }

    def close(self) -> None:
        self._is_closed.set()
        self._wakeup.set()
        self._thread.join(10.0)
        with self._lock:
            for worker in self.workers:
                self.ray.kill(worker.actor)
            self.workers.clear()

    def table(self) -> dict[str, str]:
        """The state of each worker, shown during long waits: {"worker 0": "has 3 episodes in progress"}."""
        now = time.monotonic()
        with self._lock:
            table = {f"{worker}": worker.describe(now) for worker in self.workers}
        return table or {"workers": "there are none"}

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # the thread that communicates with the workers

    def _run(self) -> None:
        try:
            while not self._is_closed.is_set() and self._error is None:
                self._scale_workers()
                self._assign()
                self._collect_results()
                self._check_timeouts()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Called by any thread; the first error is reported."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            running = [attempt for worker in self.workers for attempt in worker.running.values()]
            for attempt in (*self.queue, *running):
                attempt.episode.set_exception(error)
            self.queue.clear()
        self._first_ready.set()

    def _scale_workers(self) -> None:
        """Start or stop workers until the wanted number runs; it may change at any time."""
        self._read_scale()
        with self._lock:
            active = [worker for worker in self.workers if not worker.is_retired]
            if time.monotonic() >= self._start_after:
                for _ in range(self.wanted - len(active)):
                    self._start_worker()
            active.sort(key=lambda worker: -worker.stage)  # those not ready are stopped first
            for worker in active[self.wanted :]:
                worker.is_retired = True
                self.note(f"{worker} gets no more tasks: {self.wanted} workers are wanted")
            for worker in [w for w in self.workers if w.is_retired and not w.running]:
                self.workers.remove(worker)
                self.ray.kill(worker.actor)

    def _read_scale(self) -> None:
        wanted = self._scale_file.changed()
        if wanted == 0:
            self.note(
                f"{self._scale_file.path} does not hold a number of workers; `graft scale RUN N` writes it"
            )
        elif wanted is not None and wanted != self.wanted:
            self.note(f"{wanted} workers are wanted from now on, before {self.wanted}")
            self.wanted = wanted

    def _start_worker(self) -> None:
        cluster, number = self.config.cluster, self._num_started
        self._num_started += 1
        resources = {"num_cpus": cluster.cpus, "num_gpus": cluster.gpus}
        remote_class = self.ray.remote(RolloutWorker).options(
            **resources, max_restarts=0, max_concurrency=2 * self.limit + 8
        )
        actor = remote_class.remote(number, self.cwd)
        self.workers.append(ClusterWorker(number, actor, transition=actor.process.remote()))

    def _assign(self) -> None:
        """Give each waiting attempt to the ready worker that has the fewest."""
        with self._lock:
            while self.queue:
                free = [w for w in self.workers if w.is_ready and len(w.running) < self.limit]
                if not free:
                    return
                worker = min(free, key=lambda w: len(w.running))
                attempt = self.queue.popleft()
                call = worker.actor.attempt.remote(attempt.task, attempt.request, attempt.index)
                worker.running[call] = attempt

    def _collect_results(self) -> None:
        """Handle what has arrived: episodes, answers to pings, ready workers, deaths."""
        with self._lock:
            self._send_pings()
            owners = {call: worker for worker in self.workers for call in worker.pending_calls}
        if not owners:
            self._wakeup.wait(POLL)
            self._wakeup.clear()
            return
        done, _ = self.ray.wait(list(owners), num_returns=1, timeout=POLL)
        if done:  # and all others that have arrived
            done, _ = self.ray.wait(list(owners), num_returns=len(owners), timeout=0)
        for reference in done:
            self._handle(owners[reference], reference)

    def _send_pings(self) -> None:
        now = time.monotonic()
        every = min(PING_EVERY, self.patience / 3)
        for worker in self.workers:
            answers = worker.stage >= WorkerStage.LOADING
            if answers and worker.ping is None and now - worker.answered_at > every:
                worker.ping = worker.actor.ping.remote()
                worker.pinged_at = now

    def _check_timeouts(self) -> None:
        now = time.monotonic()
        was_suspended = now - self._checked_at > self.patience / 2  # this process itself
        self._checked_at = now
        with self._lock:
            workers = [*self.workers]
            if was_suspended:
                for worker in workers:
                    worker.answered_at = now
        for worker in workers:
            is_starting = worker.stage is WorkerStage.STARTING
            limit = max(START_TIMEOUT, self.deadline) if is_starting else self.patience
            if worker.silence(now) > limit:
                self._remove(worker, f"it has not answered for {limit:g} s")
        limit = max(PLACEMENT_TIMEOUT, self.deadline)
        is_placed = any(worker.stage > WorkerStage.PLACING for worker in workers)
        if workers and not is_placed and now - workers[0].created_at > limit:
            cluster, free = self.config.cluster, self.ray.available_resources()
            self._fail(
                RunStopped(
                    f"Ray could not place a worker in {limit:g} s (each needs cluster.cpus="
                    f"{cluster.cpus:g} and cluster.gpus={cluster.gpus:g} of one machine; free on all: "
                    f"{free.get('CPU', 0.0):g} CPUs, {free.get('GPU', 0.0):g} GPUs); others use the "
                    "cluster, or machines have left it: see `ray status`"
                )
            )

    def _handle(self, worker: ClusterWorker, reference: Any) -> None:
        """The result of one call."""
        try:
            value = self.ray.get(reference, timeout=self.patience)
        except self.ray.exceptions.RayError as error:
            self._remove(worker, cause_of(error))
            return
        with self._lock:
            if worker not in self.workers or self._error is not None:
                return  # its attempts were reassigned, or have failed
            worker.answered_at = time.monotonic()
            if reference == worker.ping:
                worker.ping, worker.pinged_at = None, math.inf
            elif reference == worker.transition:
                self._advance(worker, value)
            else:
                self._finish_attempt(worker, reference, value)

    def _finish_attempt(self, worker: ClusterWorker, reference: Any, result: AttemptResult) -> None:
        if result.episode is None:
            task = worker.running[reference].task.id
            self._fail(RunStopped(f"{worker} failed at task {task}: {result.error}"))
            return
        self.discarded += result.num_discarded
        if worker.num_done == 0:
            self._num_failed_starts = 0
        worker.num_done += 1
        worker.running.pop(reference).episode.set_result(result.episode)

    def _advance(self, worker: ClusterWorker, value: Any) -> None:
        """Move a worker to its next stage."""
        if worker.stage is WorkerStage.PLACING:
            worker.process, worker.stage = value, WorkerStage.STARTING
            worker.pinged_at = time.monotonic()
            worker.transition = worker.actor.start.remote(self.config.packed())
        elif value:
            self._fail(RunStopped(f"{worker} cannot start: {value}"))
        elif self._weights is not worker.weights:  # also if newer weights were sent meanwhile
            worker.stage, worker.pinged_at = WorkerStage.LOADING, math.inf
            worker.weights = self._weights
            assert self._weights is not None
            worker.transition = worker.actor.load.remote(*self._weights)
        else:
            worker.stage, worker.pinged_at = WorkerStage.READY, math.inf
            worker.transition = worker.weights = None
            self.note(f"{worker} is ready")
            self._first_ready.set()

    def _remove(self, worker: ClusterWorker, reason: str) -> None:
        """Remove a worker; its attempts go back to the front of the queue."""
        with self._lock:
            if worker not in self.workers:
                return
            self.workers.remove(worker)
            attempts = [*worker.running.values()]
            self.queue.extendleft(reversed(attempts))
            self.redone += len(attempts)
            for attempt in attempts:
                attempt.num_deaths += 1
            is_failed_start = not worker.num_done and (attempts or worker.stage < WorkerStage.READY)
            if is_failed_start:
                self._num_failed_starts += 1
                delay = min(MAX_DELAY, 2.0 ** (self._num_failed_starts - 2))
                self._start_after = time.monotonic() + delay
            self._sender.end_broadcasts()
            is_alone = not any(other.num_done for other in self.workers)
            self.ray.kill(worker.actor)
        repeated = {0: "", 1: "; its episode is repeated"}
        again = repeated.get(len(attempts), f"; its {len(attempts)} episodes are repeated")
        self.note(f"{worker} is lost: {reason}{again}")
        max_failed = MAX_FAILED_STARTS + self.wanted
        if is_failed_start and is_alone and self._num_failed_starts > max_failed:
            self._fail(
                RunStopped(
                    f"{self._num_failed_starts} workers died one after the other without a single "
                    f"episode, the last one ({worker}): {reason}. Check the memory of the machines "
                    "(cluster.cpus, cluster.gpus) and Ray's logs (/tmp/ray/session_latest/logs)"
                )
            )
        for attempt in attempts:
            if attempt.num_deaths >= MAX_DEATHS:
                self._fail(
                    RunStopped(
                        f"{attempt.num_deaths} workers died while task {attempt.task.id} was attempted, "
                        f"the last one ({worker}): {reason}. Its environment may be the cause"
                    )
                )

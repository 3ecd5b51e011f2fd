"""Collect on a cluster: N Ray workers attempt tasks, and any of them may die.

Tasks wait in one queue. A worker gets as many as it may have under way; what it had when it dies goes
back to the front of the queue, and a new worker is started.

    queue            worker 0      worker 1
    t4 t5 t6         t0 t1         t2 t3
    t4 t5 t6         t0 t1         (killed)
    t2 t3 t4 t5 t6   t0 t1         worker 2 starts, gets the present weights and takes t2, t3

An episode is counted when its result is taken from the one worker that is responsible for it: none is
counted twice, and each repeated one is counted in `rollout/redone`. Every request to a worker has a name
and a deadline; a worker that does not answer counts as dead.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from graft.cluster.ray_import import cause_of, ray_module
from graft.cluster.rollout_worker import Attempted, RolloutWorker
from graft.cluster.weight_transfer import WeightBroadcast, described, packed, send
from graft.config import Config
from graft.deadlines import clock, waiting
from graft.rollout.collectors.background import FutureRollouts
from graft.rollout.collectors.collector import PendingRollouts
from graft.rollout.collectors.request import RolloutRequest
from graft.train.run_dir.folder import RunStopped
from graft.types import Episode, Task

SCALE = "workers.json"
"""File in the run's folder with the wanted number of workers; written by `graft scale`."""
LOOK = 0.2
"""Seconds between two polls of arrived results."""
PING = 2.0
"""Seconds between two pings of a worker."""
SILENCE = 60.0
"""Seconds without an answer after which a worker counts as dead, or `parallel.deadline` if less."""
TO_START = 300.0
"""Seconds for loading a model, or `parallel.deadline` if more; pings are not answered meanwhile."""
TO_PLACE = 60.0
"""Seconds, or `parallel.deadline` if more, for Ray to place at least one worker."""
FAILED_STARTS = 3
"""Workers beyond the wanted number that may die in a row before their first episode."""
MOST_DEATHS = 5
"""Workers that may die during one attempt before the attempt counts as the cause."""
MOST_DELAY = 60.0
"""Seconds between two failing starts."""


@dataclass(slots=True, eq=False)
class WorkerAttempt:
    """One task of a request, from the queue to its episode."""

    task: Task
    request: RolloutRequest
    """The request without its tasks, since it is sent with each of them."""
    index: int
    """Of the task in the whole request."""
    done: Callable[[Episode], None]
    failed: Callable[[BaseException], None]
    deaths: int = 0
    """Workers that died during this attempt."""


class WorkerStage(IntEnum):
    """Stage of a worker: being placed by Ray, building its engine, loading the weights."""

    PLACING = 0
    STARTING = 1
    LOADING = 2
    READY = 3


@dataclass(slots=True, eq=False)
class ClusterWorker:
    number: int
    actor: Any
    step: Any
    """The pending call that leads to the next stage; None when ready."""
    stage: WorkerStage = WorkerStage.PLACING
    name: str = ""
    running: dict[Any, WorkerAttempt] = field(default_factory=dict[Any, WorkerAttempt])
    num_done: int = 0
    taking: Any = None
    """The version of the weights sent to a starting worker."""
    ping: Any = None
    made: float = field(default_factory=time.monotonic)
    asked: float = math.inf
    """Time of the oldest unanswered ping."""
    heard: float = 0.0
    is_retired: bool = False
    """Gets no more tasks, and ends when its tasks are done."""
    has_complained: bool = False

    def __str__(self) -> str:
        return f"worker {self.number} ({self.name})" if self.name else f"worker {self.number}"

    @property
    def is_ready(self) -> bool:
        return self.stage is WorkerStage.READY and not self.is_retired

    @property
    def references(self) -> list[Any]:
        """Futures of the pending answers."""
        return [*self.running, *(one for one in (self.ping, self.step) if one is not None)]


class RayCollector:
    """Collects on the workers of a Ray cluster; one thread communicates with them."""

    def __init__(
        self, config: Config, folder: Path, say: Callable[[str], None], cwd: str = "."
    ) -> None:
        self.config, self.folder, self.say, self.cwd = config, folder, say, cwd
        self.ray = ray_module()
        self.limit = max(1, config.rollout.concurrency)
        self.deadline = config.parallel.deadline
        self.patience = min(SILENCE, self.deadline)
        self.wanted = config.cluster.workers
        self.workers: list[ClusterWorker] = []
        self.queue: deque[WorkerAttempt] = deque()
        self.redone = self.discarded = 0
        self._made = self._failed_starts = self._met = 0
        self._hire_at = 0.0
        self._looked = time.monotonic()
        self._scale_read: tuple[int, int] | None = None
        self._weights: tuple[Any, int] | None = None  # (reference in the store, version)
        self._group_spec: WeightBroadcast | None = None
        self._members: list[ClusterWorker] = []
        self._store: Any = None
        self._lock = threading.RLock()  # never held during a wait
        self._broken: BaseException | None = None
        self._is_over = threading.Event()
        self._something = threading.Event()
        self._first_came = threading.Event()
        self._thread = threading.Thread(target=self._run, name="graft-workers", daemon=True)
        self._thread.start()

    # called by the training loop

    def wait(self) -> None:
        """Wait until one worker is ready: faults of the recipe are known then."""
        with waiting("the first worker to be ready", max(TO_START, self.deadline)):
            self._first_came.wait()
        self._check()

    def submit(self, request: RolloutRequest) -> PendingRollouts:
        future: Future[list[Episode]] = Future()
        episodes: list[Episode | None] = [None] * len(request.tasks)
        left = len(request.tasks)
        small = replace(request, tasks=(), indices=None)

        def keep(number: int, episode: Episode) -> None:
            nonlocal left
            episodes[number] = episode
            left -= 1
            if not left and not future.done():
                future.set_result([e for e in episodes if e is not None])

        def fail(error: BaseException) -> None:
            if not future.done():
                future.set_exception(error)

        with self._lock:
            self._check()
            if not request.tasks:
                future.set_result([])
            for number, (index, task) in enumerate(request.numbered()):
                done = _bound(keep, number)
                self.queue.append(WorkerAttempt(task, small, index, done, fail))
        self._something.set()
        return FutureRollouts(future, f"{request.name} from {self.wanted} workers")

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Send the weights to all workers and wait until each has them or is gone."""
        assert weights is not None, "workers share no memory with the learner"
        self._check()
        with waiting(f"all workers to take version {version} of the weights", self.deadline):
            if self.config.cluster.sync == "broadcast":
                self._broadcast(weights, version)
            else:
                self._load_from_store(self._put(weights, version), version)
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
        self._is_over.set()
        self._something.set()
        self._thread.join(10.0)
        with self._lock:
            for worker in self.workers:
                self.ray.kill(worker.actor)
            self.workers.clear()

    def table(self) -> dict[str, str]:
        """The state of each worker, shown during long waits: {"worker 0": "has 3 episodes in progress"}."""
        now = time.monotonic()
        with self._lock:
            told: dict[str, str] = {}
            for worker in self.workers:
                if worker.stage is WorkerStage.READY:
                    many = len(worker.running)
                    does = f"has {many} episode{'s'[: many != 1]} in progress"
                    if (silent := _silence(worker, now)) > 2 * PING:
                        does += f" and has not answered since {clock(silent)}"
                else:
                    stages = ("waits to be placed", "starts", "takes the weights")
                    does = f"{stages[worker.stage]}, since {clock(now - worker.made)}"
                told[f"{worker}"] = does
            return told or {"workers": "there are none"}

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    # weights

    def _put(self, weights: Mapping[str, Any], version: int) -> list[ClusterWorker]:
        """Into the store for workers that start later; running workers get them at once."""
        reference = self.ray.put(packed(weights))
        with self._lock:
            self._weights = reference, version
            return [worker for worker in self.workers if worker.stage is WorkerStage.READY]

    def _load_from_store(self, workers: list[ClusterWorker], version: int) -> None:
        assert self._weights is not None
        reference = self._weights[0]
        loads = {worker: worker.actor.load.remote(reference, version) for worker in workers}
        for worker, wrong in self._answers(loads, version).items():
            if wrong:
                self._give_up(RunStopped(f"{worker} cannot take the weights: {wrong}"))

    def _broadcast(self, weights: Mapping[str, Any], version: int) -> None:
        """To the running workers; workers that start later get the same through the store."""
        whole = {name: weights[name] for name in weights}
        ready = self._put(whole, version)
        if not ready:
            return
        group_spec = self._meet(ready)
        names = described(whole)
        loads = {
            worker: worker.actor.listen.remote(replace(group_spec, rank=rank), names, version)
            for rank, worker in enumerate(ready, 1)
        }
        try:
            send(group_spec, whole)
        except RuntimeError:  # a worker died or does not answer: the store has the weights too
            missed = ready
        else:
            missed = [worker for worker, wrong in self._answers(loads, version).items() if wrong]
        if missed:
            self._group_spec = None
            self.say(
                f"the broadcast of version {version} failed; the weights are sent through the store"
            )
            self._load_from_store([w for w in missed if w in self.workers], version)

    def _meet(self, ready: list[ClusterWorker]) -> WeightBroadcast:
        """The process group of the learner and these workers; made again when the workers change."""
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        if self._group_spec is not None and self._members == ready:
            return self._group_spec
        host = self.ray.util.get_node_ip_address()
        if self._store is None:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        backend = "nccl" if self.config.cluster.gpus else "gloo"
        self._met += 1
        self._members = ready
        self._group_spec = WeightBroadcast(
            host, self._store.port, 0, len(ready) + 1, f"{self._met}", backend, self.patience
        )
        return self._group_spec

    def _answers(
        self, asked: Mapping[ClusterWorker, Any], version: int
    ) -> dict[ClusterWorker, str]:
        """The answers of the workers to new weights; dead workers give none."""
        references = {reference: worker for worker, reference in asked.items()}
        if not references:
            return {}
        # the other thread removes a silent worker, and its answer is then an error
        done, late = self.ray.wait(
            list(references), num_returns=len(references), timeout=self.deadline
        )
        for reference in late:
            why = f"did not take version {version} of the weights in {self.deadline:g} s"
            self._remove(references[reference], why)
        found: dict[ClusterWorker, str] = {}
        for reference in done:
            try:
                found[references[reference]] = self.ray.get(reference, timeout=self.patience)
            except self.ray.exceptions.RayError as error:
                self._remove(references[reference], cause_of(error))
        return found

    # the thread that communicates with the workers

    def _run(self) -> None:
        try:
            while not self._is_over.is_set() and self._broken is None:
                self._keep_count()
                self._hand_out()
                self._take_in()
                self._look_for_silence()
        except BaseException as error:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Called by any thread; the first cause is reported."""
        with self._lock:
            if self._broken is not None:
                return
            self._broken = error
            waiting_ones = [*self.queue, *(a for w in self.workers for a in w.running.values())]
            self.queue.clear()
        for attempt in waiting_ones:
            attempt.failed(error)
        self._first_came.set()

    def _keep_count(self) -> None:
        """Start or stop workers until the wanted number runs; it may change at any time."""
        self._read_scale()
        with self._lock:
            active = [worker for worker in self.workers if not worker.is_retired]
            if len(active) < self.wanted:
                for worker in [w for w in self.workers if w.is_retired][
                    : self.wanted - len(active)
                ]:
                    worker.is_retired = False  # it has not ended yet
                    active.append(worker)
            if time.monotonic() >= self._hire_at:
                for _ in range(self.wanted - len(active)):
                    self._hire()
            active.sort(
                key=lambda worker: -worker.stage
            )  # workers that are not ready are stopped first
            for worker in active[self.wanted :]:
                worker.is_retired = True
                self.say(f"{worker} gets no more tasks: {self.wanted} workers are wanted")
            for worker in [w for w in self.workers if w.is_retired and not w.running]:
                self.workers.remove(worker)
                self.ray.kill(worker.actor)

    def _read_scale(self) -> None:
        asked = self.folder / SCALE
        try:
            seen = asked.stat()
            if (seen.st_mtime_ns, seen.st_ino) == self._scale_read:
                return
            wanted = json.loads(asked.read_text(encoding="utf-8"))["workers"]
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError):
            wanted = None
            seen = None
        if isinstance(wanted, int) and wanted >= 1:
            if wanted != self.wanted:
                self.say(f"{wanted} workers are wanted from now on, before {self.wanted}")
            self.wanted = wanted
        elif self._scale_read != (0, 0):
            self.say(f"{asked} does not hold a number of workers; `graft scale RUN N` writes it")
        self._scale_read = (seen.st_mtime_ns, seen.st_ino) if seen else (0, 0)

    def _hire(self) -> None:
        cluster, number = self.config.cluster, self._made
        self._made += 1
        actor = (
            self.ray.remote(RolloutWorker)
            .options(
                num_cpus=cluster.cpus,
                num_gpus=cluster.gpus,
                max_restarts=0,
                max_concurrency=2 * self.limit + 8,
            )
            .remote(number, self.cwd)
        )
        self.workers.append(ClusterWorker(number, actor, step=actor.who.remote()))

    def _hand_out(self) -> None:
        with self._lock:
            while self.queue:
                ready = [w for w in self.workers if w.is_ready and len(w.running) < self.limit]
                if not ready:
                    return
                worker = min(ready, key=lambda w: len(w.running))
                attempt = self.queue.popleft()
                reference = worker.actor.attempt.remote(
                    attempt.task, attempt.request, attempt.index
                )
                worker.running[reference] = attempt

    def _take_in(self) -> None:
        """Handle what has arrived: episodes, answers to pings, ready workers, deaths."""
        with self._lock:
            self._ask_who_is_there()
            owners = {one: worker for worker in self.workers for one in worker.references}
        if not owners:
            self._something.wait(LOOK)
            self._something.clear()
            return
        done, _ = self.ray.wait(list(owners), num_returns=1, timeout=LOOK)
        if done:  # and all others that have arrived
            done, _ = self.ray.wait(list(owners), num_returns=len(owners), timeout=0)
        for reference in done:
            self._take(owners[reference], reference)

    def _ask_who_is_there(self) -> None:
        now = time.monotonic()
        every = min(PING, self.patience / 3)
        for worker in self.workers:
            answers = worker.stage >= WorkerStage.LOADING
            if answers and worker.ping is None and now - worker.heard > every:
                worker.ping = worker.actor.ping.remote()
                worker.asked = now

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        stood_still = now - self._looked > self.patience / 2
        self._looked = now
        with self._lock:
            if stood_still:  # this process itself was suspended
                for worker in self.workers:
                    worker.heard = now
            workers = [*self.workers]
        for worker in workers:
            starts = worker.stage is WorkerStage.STARTING
            limit = max(TO_START, self.deadline) if starts else self.patience
            if _silence(worker, now) > limit:
                self._remove(worker, f"it has not answered for {limit:g} s")
        self._look_for_room([w for w in workers if w.stage is WorkerStage.PLACING], workers, now)

    def _look_for_room(
        self, placing: list[ClusterWorker], workers: list[ClusterWorker], now: float
    ) -> None:
        """Ray may take its time while other workers run; without any, waiting is reported and limited."""
        for worker in placing:
            if now - worker.made > min(30.0, self.deadline) and not worker.has_complained:
                worker.has_complained = True
                self.say(f"{worker} waits to be placed by Ray ({self._asked_for()})")
        limit = max(TO_PLACE, self.deadline)
        if placing and len(placing) == len(workers) and now - placing[0].made > limit:
            self._give_up(
                RunStopped(
                    f"Ray could not place a worker in {limit:g} s ({self._asked_for()}); others "
                    "use the cluster, or machines have left it: see `ray status`"
                )
            )

    def _asked_for(self) -> str:
        cluster, free = self.config.cluster, self.ray.available_resources()
        return (
            f"each asks for cluster.cpus={cluster.cpus:g} and cluster.gpus={cluster.gpus:g} of one "
            f"machine; free on all: {free.get('CPU', 0.0):g} CPUs, {free.get('GPU', 0.0):g} GPUs"
        )

    def _take(self, worker: ClusterWorker, reference: Any) -> None:
        try:
            value = self.ray.get(reference, timeout=self.patience)
        except self.ray.exceptions.RayError as error:
            self._remove(worker, cause_of(error))
            return
        attempt = None
        with self._lock:
            if worker not in self.workers:  # already removed, and its attempts are reassigned
                return
            worker.heard = time.monotonic()
            if reference == worker.ping:
                worker.ping, worker.asked = None, math.inf
            elif reference == worker.step:
                self._advance(worker, value)
            else:
                attempt = worker.running.pop(reference)
                self.discarded += value.discarded
                self._failed_starts *= worker.num_done > 0
                worker.num_done += 1
        if attempt is not None:
            self._keep(worker, attempt, value)

    def _keep(self, worker: ClusterWorker, attempt: WorkerAttempt, found: Attempted) -> None:
        if found.episode is not None:
            attempt.done(found.episode)
            return
        error = RunStopped(f"{worker} failed at task {attempt.task.id}: {found.wrong}")
        self._give_up(error)
        attempt.failed(error)

    def _advance(self, worker: ClusterWorker, value: Any) -> None:
        """Move a worker to its next stage."""
        if worker.stage is WorkerStage.PLACING:
            worker.name, worker.stage, worker.asked = value, WorkerStage.STARTING, time.monotonic()
            worker.step = worker.actor.start.remote(self.config.model_dump(mode="json"))
        elif value:
            self._give_up(RunStopped(f"{worker} cannot start: {value}"))
        elif self._weights is not worker.taking:  # also if newer weights were sent meanwhile
            worker.stage, worker.asked, worker.taking = WorkerStage.LOADING, math.inf, self._weights
            assert self._weights is not None
            worker.step = worker.actor.load.remote(*self._weights)
        else:
            worker.stage, worker.asked = WorkerStage.READY, math.inf
            worker.step = worker.taking = None
            self.say(f"{worker} is ready")
            self._first_came.set()

    def _remove(self, worker: ClusterWorker, why: str) -> None:
        """Remove a worker; its attempts go back to the front of the queue."""
        with self._lock:
            if worker not in self.workers:
                return
            self.workers.remove(worker)
            attempts = [*worker.running.values()]
            self.queue.extendleft(reversed(attempts))
            self.redone += len(attempts)
            for attempt in attempts:
                attempt.deaths += 1
            is_failed_start = not worker.num_done and (attempts or worker.stage < WorkerStage.READY)
            if is_failed_start:
                self._failed_starts += 1
                delay = min(MOST_DELAY, 2.0 ** (self._failed_starts - 2))
                self._hire_at = time.monotonic() + delay
            self._group_spec = None
            is_alone = not any(other.num_done for other in self.workers)
            self.ray.kill(worker.actor)
        many = len(attempts)
        again = f"; its {many} episodes are repeated" if many > 1 else ""
        self.say(f"{worker} is lost: {why}{again or ('; its episode is repeated' * many)}")
        if is_failed_start and is_alone and self._failed_starts > FAILED_STARTS + self.wanted:
            self._give_up(
                RunStopped(
                    f"{self._failed_starts} workers died one after the other without a single episode, "
                    f"the last one ({worker}): {why}. Check the memory of the machines "
                    "(cluster.cpus, cluster.gpus) and Ray's logs (/tmp/ray/session_latest/logs)"
                )
            )
        for attempt in attempts:
            if attempt.deaths >= MOST_DEATHS:
                self._give_up(
                    RunStopped(
                        f"{attempt.deaths} workers died while task {attempt.task.id} was attempted, the "
                        f"last one ({worker}): {why}. Its environment may be the cause"
                    )
                )


def _silence(worker: ClusterWorker, now: float) -> float:
    """Seconds since its oldest unanswered ping."""
    return now - max(worker.asked, worker.heard) if worker.asked < math.inf else 0.0


def _bound(keep: Callable[[int, Episode], None], number: int) -> Callable[[Episode], None]:
    return lambda episode: keep(number, episode)

"""Collect on a cluster: N Ray workers attempt tasks, and any of them may die.

Tasks wait in one queue. A worker gets as many as it may have under way; what it had when it dies goes
back to the front of the queue, and another worker takes its place.

    queue            worker 0      worker 1
    t4 t5 t6         t0 t1         t2 t3
    t4 t5 t6         t0 t1         (killed)
    t2 t3 t4 t5 t6   t0 t1         worker 2 starts, gets the present weights and takes t2, t3

An episode is counted when its result is taken from the worker that is responsible for it, and nobody
else is at that moment: none is counted twice, and each that is done again is in `rollout/redone`.
Everything that is asked of a worker has a name and a deadline; one that is silent is as good as dead.
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
"""In the run's folder: how many workers there shall be; written by `graft scale`."""
LOOK = 0.2
"""Seconds between two looks at what has arrived."""
PING = 2.0
"""Seconds between two questions whether a worker is there."""
SILENCE = 60.0
"""Seconds without an answer after which a worker counts as dead, or `parallel.deadline` if less."""
TO_START = 300.0
"""Seconds that reading a model may take, or `parallel.deadline` if more: nothing is answered then."""
TO_PLACE = 60.0
"""Seconds, or `parallel.deadline` if more, to find room for at least one worker."""
FAILED_STARTS = 3
"""Workers, beside as many as are wanted, that may die in a row before their first episode."""
MOST_DEATHS = 5
"""Workers that an attempt may lose before it is to blame."""
MOST_DELAY = 60.0
"""Seconds between two starts, where each one fails."""


@dataclass(slots=True, eq=False)
class WorkerAttempt:
    """One task of a request, from the queue to its episode."""

    task: Task
    request: RolloutRequest
    """Without its tasks: it travels with every one of them."""
    index: int
    """Of the task in the whole request."""
    done: Callable[[Episode], None]
    failed: Callable[[BaseException], None]
    deaths: int = 0
    """Workers that died while they had it."""


class WorkerStage(IntEnum):
    """How far a worker is: Ray looks for room, it builds its engine, it takes the weights."""

    PLACING = 0
    STARTING = 1
    LOADING = 2
    READY = 3


@dataclass(slots=True, eq=False)
class ClusterWorker:
    number: int
    actor: Any
    step: Any
    """Its answer to what leads to the next stage; None: it is ready."""
    stage: WorkerStage = WorkerStage.PLACING
    name: str = ""
    running: dict[Any, WorkerAttempt] = field(default_factory=dict[Any, WorkerAttempt])
    num_done: int = 0
    taking: Any = None
    """The weights that are on their way to one that starts."""
    ping: Any = None
    made: float = field(default_factory=time.monotonic)
    asked: float = math.inf
    """When the oldest question was put that it has not answered."""
    heard: float = 0.0
    is_retired: bool = False
    """Gets nothing any more, and ends when it has nothing."""
    has_complained: bool = False

    def __str__(self) -> str:
        return f"worker {self.number} ({self.name})" if self.name else f"worker {self.number}"

    @property
    def is_ready(self) -> bool:
        return self.stage is WorkerStage.READY and not self.is_retired

    @property
    def references(self) -> list[Any]:
        """Of the answers that are still to come."""
        return [*self.running, *(one for one in (self.ping, self.step) if one is not None)]


class RayCollector:
    """Collects on the workers of a Ray cluster. One thread talks to them; `result()` waits for it."""

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
        self._meeting: WeightBroadcast | None = None
        self._members: list[ClusterWorker] = []
        self._store: Any = None
        self._lock = threading.RLock()  # never held while something is waited for
        self._broken: BaseException | None = None
        self._is_over = threading.Event()
        self._something = threading.Event()
        self._first_came = threading.Event()
        self._thread = threading.Thread(target=self._run, name="graft-workers", daemon=True)
        self._thread.start()

    # what the loop asks

    def wait(self) -> None:
        """Until one of them is ready: whatever is wrong with a recipe is known then."""
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
        """Send the weights to all workers and wait until they have them, or are gone."""
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
        """What each does, for whoever waits for long: {"worker 0": "has 3 episodes under way"}."""
        now = time.monotonic()
        with self._lock:
            told: dict[str, str] = {}
            for worker in self.workers:
                if worker.stage is WorkerStage.READY:
                    many = len(worker.running)
                    does = f"has {many} episode{'s'[: many != 1]} under way"
                    if (silent := _silence(worker, now)) > 2 * PING:
                        does += f" and has not answered since {clock(silent)}"
                else:
                    stages = ("waits for room in the cluster", "starts", "takes the weights")
                    does = f"{stages[worker.stage]}, since {clock(now - worker.made)}"
                told[f"{worker}"] = does
            return told or {"workers": "there are none"}

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    # weights

    def _put(self, weights: Mapping[str, Any], version: int) -> list[ClusterWorker]:
        """Into the store, for all that start from now on; those that run already need them now."""
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
        """To those that are here now; whoever starts later is given the same through the store."""
        whole = {name: weights[name] for name in weights}
        ready = self._put(whole, version)
        if not ready:
            return
        meeting = self._meet(ready)
        names = described(whole)
        loads = {
            worker: worker.actor.listen.remote(replace(meeting, rank=rank), names, version)
            for rank, worker in enumerate(ready, 1)
        }
        try:
            send(meeting, whole)
        except RuntimeError:  # somebody died or does not answer: the store has it too
            missed = ready
        else:
            missed = [worker for worker, wrong in self._answers(loads, version).items() if wrong]
        if missed:
            self._meeting = None
            self.say(f"the broadcast of version {version} broke; it is sent through the store")
            self._load_from_store([w for w in missed if w in self.workers], version)

    def _meet(self, ready: list[ClusterWorker]) -> WeightBroadcast:
        """The process group of the learner and these workers; a new one when others are there."""
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        if self._meeting is not None and self._members == ready:
            return self._meeting
        host = self.ray.util.get_node_ip_address()
        if self._store is None:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        backend = "nccl" if self.config.cluster.gpus else "gloo"
        self._met += 1
        self._members = ready
        self._meeting = WeightBroadcast(
            host, self._store.port, 0, len(ready) + 1, f"{self._met}", backend, self.patience
        )
        return self._meeting

    def _answers(
        self, asked: Mapping[ClusterWorker, Any], version: int
    ) -> dict[ClusterWorker, str]:
        """What each says about new weights; those that are gone say nothing."""
        references = {reference: worker for worker, reference in asked.items()}
        if not references:
            return {}
        # one that is silent is buried meanwhile by the other thread, and its answer is an error then
        done, late = self.ray.wait(
            list(references), num_returns=len(references), timeout=self.deadline
        )
        for reference in late:
            why = f"did not take version {version} of the weights in {self.deadline:g} s"
            self._bury(references[reference], why)
        found: dict[ClusterWorker, str] = {}
        for reference in done:
            try:
                found[references[reference]] = self.ray.get(reference, timeout=self.patience)
            except self.ray.exceptions.RayError as error:
                self._bury(references[reference], cause_of(error))
        return found

    # the thread that talks to the workers

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
        """By any thread: the first cause is what everybody is told."""
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
        """As many workers as are wanted: that may change at any time."""
        self._read_scale()
        with self._lock:
            active = [worker for worker in self.workers if not worker.is_retired]
            if len(active) < self.wanted:
                for worker in [w for w in self.workers if w.is_retired][
                    : self.wanted - len(active)
                ]:
                    worker.is_retired = False  # it has not gone yet
                    active.append(worker)
            if time.monotonic() >= self._hire_at:
                for _ in range(self.wanted - len(active)):
                    self._hire()
            active.sort(key=lambda worker: -worker.stage)  # those that are not ready go first
            for worker in active[self.wanted :]:
                worker.is_retired = True
                self.say(f"{worker} gets no more tasks: {self.wanted} are wanted")
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
                self.say(f"{wanted} workers are wanted from now on, before it was {self.wanted}")
            self.wanted = wanted
        elif self._scale_read != (0, 0):
            self.say(
                f"{asked} does not say how many workers there shall be; `graft scale RUN N` does"
            )
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
        """Whatever has arrived: episodes, answers to pings, workers that are ready, deaths."""
        with self._lock:
            self._ask_who_is_there()
            owners = {one: worker for worker in self.workers for one in worker.references}
        if not owners:
            self._something.wait(LOOK)
            self._something.clear()
            return
        done, _ = self.ray.wait(list(owners), num_returns=1, timeout=LOOK)
        if done:  # and all others that are there by now
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
            if stood_still:  # it was us who heard nothing
                for worker in self.workers:
                    worker.heard = now
            workers = [*self.workers]
        for worker in workers:
            starts = worker.stage is WorkerStage.STARTING
            limit = max(TO_START, self.deadline) if starts else self.patience
            if _silence(worker, now) > limit:
                self._bury(worker, f"it has not answered for {limit:g} s")
        self._look_for_room([w for w in workers if w.stage is WorkerStage.PLACING], workers, now)

    def _look_for_room(
        self, placing: list[ClusterWorker], workers: list[ClusterWorker], now: float
    ) -> None:
        """Ray may look for room as long as others work; where there is nobody, it is told."""
        for worker in placing:
            if now - worker.made > min(30.0, self.deadline) and not worker.has_complained:
                worker.has_complained = True
                self.say(f"{worker} waits for room in the cluster ({self._asked_for()})")
        limit = max(TO_PLACE, self.deadline)
        if placing and len(placing) == len(workers) and now - placing[0].made > limit:
            self._give_up(
                RunStopped(
                    f"Ray has found no room for a worker in {limit:g} s ({self._asked_for()}); others "
                    "use the cluster, or machines have left it: `ray status` tells"
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
            self._bury(worker, cause_of(error))
            return
        attempt = None
        with self._lock:
            if worker not in self.workers:  # buried by now, and its attempts are another's
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
        """To its next stage."""
        if worker.stage is WorkerStage.PLACING:
            worker.name, worker.stage, worker.asked = value, WorkerStage.STARTING, time.monotonic()
            worker.step = worker.actor.start.remote(self.config.model_dump(mode="json"))
        elif value:
            self._give_up(RunStopped(f"{worker} cannot start: {value}"))
        elif self._weights is not worker.taking:  # also where newer ones went out meanwhile
            worker.stage, worker.asked, worker.taking = WorkerStage.LOADING, math.inf, self._weights
            assert self._weights is not None
            worker.step = worker.actor.load.remote(*self._weights)
        else:
            worker.stage, worker.asked = WorkerStage.READY, math.inf
            worker.step = worker.taking = None
            self.say(f"{worker} is ready")
            self._first_came.set()

    def _bury(self, worker: ClusterWorker, why: str) -> None:
        """It is gone, or as good as: its attempts go back to the front of the queue."""
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
            self._meeting = None
            is_alone = not any(other.num_done for other in self.workers)
            self.ray.kill(worker.actor)
        many = len(attempts)
        again = f"; its {many} episodes are done again" if many > 1 else ""
        self.say(f"{worker} is lost: {why}{again or ('; its episode is done again' * many)}")
        if is_failed_start and is_alone and self._failed_starts > FAILED_STARTS + self.wanted:
            self._give_up(
                RunStopped(
                    f"{self._failed_starts} workers died one after the other without a single episode, "
                    f"the last one ({worker}): {why}. Look at the memory of the machines "
                    "(cluster.cpus, cluster.gpus) and at Ray's logs (/tmp/ray/session_latest/logs)"
                )
            )
        for attempt in attempts:
            if attempt.deaths >= MOST_DEATHS:
                self._give_up(
                    RunStopped(
                        f"{attempt.deaths} workers died while task {attempt.task.id} was attempted, the "
                        f"last one ({worker}): {why}. Its environment may be what ends them"
                    )
                )


def _silence(worker: ClusterWorker, now: float) -> float:
    """Seconds for which it owes an answer."""
    return now - max(worker.asked, worker.heard) if worker.asked < math.inf else 0.0


def _bound(keep: Callable[[int, Episode], None], number: int) -> Callable[[Episode], None]:
    return lambda episode: keep(number, episode)

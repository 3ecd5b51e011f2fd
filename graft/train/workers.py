"""The crew of a cluster: N workers of Ray's attempt tasks, and any of them may die.

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

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graft.config import Config
from graft.models.load import read_json
from graft.rollout.crew import Arriving, Job, Pending
from graft.train.folder import RunStopped
from graft.train.rayed import ray_module
from graft.train.rollout_worker import RolloutWorker
from graft.train.sending import Meeting, described, packed, send
from graft.types import Episode, Task
from graft.waits import waiting

SCALE = "workers.json"
"""In the run's folder: how many workers there shall be; written by `graft scale`."""
LOOK = 0.2
"""Seconds between two looks at what has arrived."""
PING = 2.0
"""Seconds between two questions whether a worker is there."""
FAILED_STARTS = 3
"""Workers that die one after the other without a single episode, before the run is given up."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One task of a job, from the queue to its episode."""

    task: Task
    job: Job
    """Without its tasks: it travels with every one of them."""
    place: int
    done: Callable[[Episode], None]
    failed: Callable[[BaseException], None]


@dataclass(slots=True, eq=False)
class Worker:
    number: int
    actor: Any
    name: str = ""
    starting: Any = None
    """Its answer to `start`, as long as that is not there."""
    running: dict[Any, Attempt] = field(default_factory=dict[Any, Attempt])
    ping: Any = None
    heard: float = field(default_factory=time.monotonic)
    is_retired: bool = False
    """Gets nothing any more, and ends when it has nothing."""

    @property
    def is_ready(self) -> bool:
        return self.starting is None and not self.is_retired


class Workers:
    """A crew. One thread talks to the workers; whoever asks for episodes waits for it."""

    def __init__(
        self, config: Config, folder: Path, say: Callable[[str], None], cwd: str = "."
    ) -> None:
        self.config, self.folder, self.say, self.cwd = config, folder, say, cwd
        self.ray = ray_module()
        self.limit = max(1, config.rollout.concurrency)
        self.patience = min(60.0, config.parallel.deadline)
        self.wanted = config.cluster.workers
        self.workers: list[Worker] = []
        self.queue: deque[Attempt] = deque()
        self.redone = self.discarded = 0
        self._made = self._failed_starts = 0
        self._weights: tuple[Any, int] | None = None  # (reference in the store, version)
        self._meeting: Meeting | None = None
        self._store: Any = None
        self._lock = threading.RLock()
        self._broken: BaseException | None = None
        self._is_over = threading.Event()
        self._something = threading.Event()
        self._thread = threading.Thread(target=self._run, name="graft-workers", daemon=True)
        self._thread.start()

    # what the loop asks

    def submit(self, job: Job) -> Pending:
        future: Future[list[Episode]] = Future()
        episodes: list[Episode | None] = [None] * len(job.tasks)
        left = len(job.tasks)
        small = replace(job, tasks=(), places=None)

        def keep(number: int, episode: Episode) -> None:
            nonlocal left
            episodes[number] = episode
            left -= 1
            if not left and not future.done():
                future.set_result([e for e in episodes if e is not None])

        def fail(error: BaseException) -> None:
            if not future.done():
                future.set_exception(error)

        places = range(len(job.tasks)) if job.places is None else job.places
        with self._lock:
            if self._broken is not None:
                raise self._broken
            if not job.tasks:
                future.set_result([])
            for number, (task, place) in enumerate(zip(job.tasks, places, strict=True)):
                done = _bound(keep, number)
                self.queue.append(Attempt(task, small, place, done, fail))
        self._something.set()
        return Arriving(future, f"{job.name} from {self.wanted} workers")

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Send the weights to all workers and wait until they have them, or are gone."""
        assert weights is not None, "workers share no memory with the learner"
        with waiting(f"all workers to take version {version} of the weights", self.patience):
            if self.config.cluster.sync == "broadcast":
                self._broadcast(weights, version)
            else:
                self._put(weights, version)

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
        for worker in self.workers:
            self.ray.kill(worker.actor)

    # weights

    def _put(self, weights: Mapping[str, Any], version: int) -> None:
        reference = self.ray.put(packed(weights))
        with self._lock:
            self._weights = reference, version
            ready = [worker for worker in self.workers if worker.is_ready]
        self._await_loads(
            {worker: worker.actor.load.remote(reference, version) for worker in ready}, version
        )

    def _broadcast(self, weights: Mapping[str, Any], version: int) -> None:
        """To those that are here now; whoever starts later is given the same through the store."""
        whole = {name: weights[name] for name in weights}
        with self._lock:
            self._weights = self.ray.put(packed(whole)), version
            ready = [worker for worker in self.workers if worker.is_ready]
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
        except RuntimeError as error:  # somebody died in the middle: the store has it too
            self.say(f"the broadcast of version {version} broke ({_first_line(error)}); sent again")
            self._meeting = None
            reference = self._weights[0] if self._weights else None
            loads = {w: w.actor.load.remote(reference, version) for w in ready}
        self._await_loads(loads, version)

    def _meet(self, ready: list[Worker]) -> Meeting:
        """The process group of the learner and these workers; a new one when others are there."""
        import socket

        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        members = "-".join(str(worker.number) for worker in ready)
        if self._meeting is not None and self._meeting.key == members:
            return self._meeting
        host = self.ray.util.get_node_ip_address()
        if self._store is None:
            with socket.socket() as free:
                free.bind(("", 0))
                port = free.getsockname()[1]
            self._store = TCPStore(host, port, is_master=True, wait_for_workers=False)
        backend = "nccl" if self.config.cluster.gpus else "gloo"
        self._meeting = Meeting(
            host, self._store.port, 0, len(ready) + 1, members, backend, self.patience
        )
        return self._meeting

    def _await_loads(self, loads: Mapping[Worker, Any], version: int) -> None:
        references = {reference: worker for worker, reference in loads.items()}
        if not references:
            return
        done, late = self.ray.wait(
            list(references), num_returns=len(references), timeout=self.patience
        )
        for reference in late:
            self._bury(
                references[reference], f"did not take version {version} in {self.patience:g} s"
            )
        for reference in done:
            try:
                self.ray.get(reference)
            except self.ray.exceptions.RayError as error:
                self._bury(references[reference], _first_line(error))

    # the thread that talks to the workers

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._keep_count()
                self._hand_out()
                self._take_in()
        except BaseException as error:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        with self._lock:
            self._broken = error
            waiting_ones = [*self.queue, *(a for w in self.workers for a in w.running.values())]
            self.queue.clear()
        for attempt in waiting_ones:
            attempt.failed(error)

    def _keep_count(self) -> None:
        """As many workers as are wanted: that may change at any time."""
        asked = self.folder / SCALE
        if asked.exists():
            self.wanted = max(1, int(read_json(asked).get("workers", self.wanted)))
        with self._lock:
            active = [worker for worker in self.workers if not worker.is_retired]
            for _ in range(self.wanted - len(active)):
                self._hire()
            for worker in active[self.wanted :]:
                worker.is_retired = True
                self.say(f"worker {worker.number} gets no more tasks: {self.wanted} are wanted")
            for worker in [w for w in self.workers if w.is_retired and not w.running]:
                self.workers.remove(worker)
                self.ray.kill(worker.actor)

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
        starting = actor.start.remote(self.config.model_dump(mode="json"))
        self.workers.append(Worker(number, actor, starting=starting))

    def _hand_out(self) -> None:
        with self._lock:
            while self.queue:
                ready = [w for w in self.workers if w.is_ready and len(w.running) < self.limit]
                if not ready:
                    return
                worker = min(ready, key=lambda w: len(w.running))
                attempt = self.queue.popleft()
                reference = worker.actor.attempt.remote(attempt.task, attempt.job, attempt.place)
                worker.running[reference] = attempt

    def _take_in(self) -> None:
        """Whatever has arrived: episodes, answers to pings, workers that are ready, deaths."""
        with self._lock:
            self._ask_who_is_there()
            owners: dict[Any, Worker] = {}
            for worker in self.workers:
                for reference in (*worker.running, worker.ping, worker.starting):
                    if reference is not None:
                        owners[reference] = worker
        if not owners:
            self._something.wait(LOOK)
            self._something.clear()
            return
        done, _ = self.ray.wait(list(owners), num_returns=1, timeout=LOOK)
        if done:  # and all others that are there by now
            done, _ = self.ray.wait(list(owners), num_returns=len(owners), timeout=0)
        for reference in done:
            worker = owners[reference]
            if worker in self.workers:  # not one that died a moment ago
                self._take(worker, reference)
        for worker in [*self.workers]:
            # one that starts may read a model for long, and answers nothing meanwhile
            patience = self.config.parallel.deadline if worker.starting else self.patience
            if time.monotonic() - worker.heard > patience:
                self._bury(worker, f"has not answered for {patience:g} s")

    def _ask_who_is_there(self) -> None:
        now = time.monotonic()
        for worker in self.workers:
            if worker.ping is None and worker.starting is None and now - worker.heard > PING:
                worker.ping = worker.actor.ping.remote()

    def _take(self, worker: Worker, reference: Any) -> None:
        attempt = worker.running.get(reference)
        try:
            value = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            # the worker lives: its program, or an environment's, is broken, and will be elsewhere too
            if attempt is None and reference is not worker.starting:
                return self._bury(worker, _first_line(error))
            raise RunStopped(f"worker {worker.number} failed: {_cause(error)}") from None
        except self.ray.exceptions.RayError as error:
            return self._bury(worker, _first_line(error))
        worker.heard = time.monotonic()
        if reference is worker.ping:
            worker.ping = None
        elif attempt is not None:
            with self._lock:
                del worker.running[reference]
                episode, discarded = value
                self.discarded += discarded
            self._failed_starts = 0
            attempt.done(episode)
        elif reference is worker.starting:
            self._welcome(worker, *value)

    def _welcome(self, worker: Worker, wrong: str, name: str) -> None:
        if wrong:
            raise RunStopped(f"worker {worker.number} cannot start: {wrong}")
        worker.name = name
        while True:
            with self._lock:
                present = self._weights
            if present is not None:
                loading = worker.actor.load.remote(*present)
                try:
                    self.ray.get(loading, timeout=self.patience)
                except self.ray.exceptions.RayError as error:
                    return self._bury(worker, _first_line(error))
            with self._lock:
                if self._weights is present:  # else newer ones went out meanwhile: once more
                    worker.starting = None
                    break
        self.say(f"worker {worker.number} is ready ({name})")

    def _bury(self, worker: Worker, why: str) -> None:
        """It is gone, or as good as: its attempts go back to the front of the queue."""
        with self._lock:
            if worker not in self.workers:
                return
            self.workers.remove(worker)
            attempts = [*worker.running.values()]
            self.queue.extendleft(reversed(attempts))
            self.redone += len(attempts)
            self._failed_starts += 1
            self._meeting = None
        self.ray.kill(worker.actor)
        again = f"; its {len(attempts)} episodes are done again" if attempts else ""
        named = f" ({worker.name})" if worker.name else ""
        self.say(f"worker {worker.number}{named} is lost: {why}{again}")
        if self._failed_starts > FAILED_STARTS + self.wanted:
            raise RunStopped(
                f"{self._failed_starts} workers died one after the other without a single episode, the "
                f"last one: {why}. Look at the memory of the machines (cluster.cpus, cluster.gpus) and "
                "at Ray's logs"
            )


def _bound(keep: Callable[[int, Episode], None], number: int) -> Callable[[Episode], None]:
    return lambda episode: keep(number, episode)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _cause(error: Any) -> str:
    """What a worker raised: its text if it was meant for people, else where it happened too."""
    cause = getattr(error, "cause", None)
    if cause is not None and type(cause).__module__.startswith("graft."):
        return str(cause)
    return str(error)

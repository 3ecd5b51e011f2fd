"""A vector whose envs live in worker processes: for envs that compute for long.

A worker holds many envs, and one message carries all that a step asks of it. A worker that dies, or
in which an env passes its deadline, is replaced: the env at fault answers with an error, the others
in there are brought back to where they were.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from graft.envs.catalogue import EnvEntry
from graft.envs.vector.base import VectorEnv
from graft.envs.vector.jobs import EnvFailure, SlotJob, late_text, lost
from graft.envs.vector.past import Past
from graft.envs.vector.slot import Autoreset, EnvSlot, EnvSpec
from graft.envs.vector.worker import BOARD_SIZE, NOBODY, Answer, Bundle, SlotOpening, WorkerSlots

OPENING = 120.0
"""Seconds that building one env may take, or bringing one back; imports are slow at first."""

GOODBYE = 5.0  # seconds that close() gives envs to close

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from graft.envs.vector.worker import main; main(*map(int, sys.argv[2:]))"
)
# a fresh interpreter: threads and GPU handles of the caller are not inherited, and unlike with
# multiprocessing the caller's script is not run a second time


class VectorWorker:
    """One process, the envs that live there, and the one message it has not answered yet."""

    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = list(indices)
        self.asked: Bundle = []
        self.asked_at = 0.0
        self.waiting: dict[int, SlotJob] = {}  # for the next message
        self.start()

    def start(self) -> None:
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            near, far = Pipe()
            self.connection: Connection = ours.enter_context(near)
            theirs.enter_context(far)
            lifeline, self.lifeline = os.pipe()
            theirs.callback(os.close, lifeline)
            ours.callback(os.close, self.lifeline)
            file = theirs.enter_context(tempfile.TemporaryFile())
            file.truncate(BOARD_SIZE)
            self.board = WorkerSlots(file.fileno())
            ours.enter_context(self.board.memory)
            self.board.write(NOBODY)
            fds = (far.fileno(), file.fileno(), lifeline)
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOT, json.dumps(sys.path), *map(str, (*fds, os.getpid()))],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the near side, which then ends this one
            )
            self._files = ours.pop_all()

    def ask(self, bundle: Bundle) -> None:
        self.asked, self.asked_at = bundle, time.monotonic()
        self.connection.send_bytes(pickle.dumps(bundle, pickle.HIGHEST_PROTOCOL))

    def kill(self) -> int:
        """End the process and what it started; its exit code."""
        if self.process.returncode is None:  # until it is waited for, nobody else has its number
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self._files.close()
        return code

    @property
    def is_opening(self) -> bool:
        return any(isinstance(task, SlotOpening) for _, task in self.asked)

    def deadline(self, timeout: float) -> float:
        index, since = self.board.read()
        if index == NOBODY:  # not at it yet: it is starting, or reading
            return self.asked_at + OPENING
        return max(since, self.asked_at) + (max(timeout, OPENING) if self.is_opening else timeout)


class ProcessVector(VectorEnv):
    def __init__(
        self,
        recipes: Sequence[EnvSpec],
        autoreset: Autoreset,
        timeout: float | None = None,
        workers: int | None = None,
    ) -> None:
        super().__init__(recipes, autoreset, timeout)
        self._openings = [SlotOpening(one, movable(one), autoreset) for one in recipes]
        self._pasts = [Past(EnvSlot(one, autoreset).standing) for one in recipes]
        count = min(workers or num_cores(), len(recipes))
        everybody = range(len(recipes))
        self._workers: list[VectorWorker] = []
        self._lock = threading.Lock()  # stream() sends in one thread and receives in another
        self._finalizer = weakref.finalize(self, end, self._workers)
        try:
            for k in range(count):
                self._workers.append(VectorWorker(everybody[k::count]))
            self._worker_of = {index: one for one in self._workers for index in one.indices}
            for worker in self._workers:
                worker.ask([(index, self._openings[index]) for index in worker.indices])
            for worker in self._workers:
                self._await_opening(worker)
        except BaseException:
            self.close()
            raise

    def fork(self) -> ProcessVector:
        twin = ProcessVector(self.recipes, self.autoreset, self.timeout, len(self._workers))
        twin.set_state(self.get_state())
        twin.is_started = self.is_started
        return twin

    def _await_opening(self, worker: VectorWorker) -> None:
        while not worker.connection.poll(max(0.0, worker.deadline(0.0) - time.monotonic())):
            if worker.deadline(0.0) <= time.monotonic():
                who = self._name(worker.board.read()[0])
                raise TimeoutError(f"{who} was not built within {OPENING:g} s in its process")
        try:
            answers: list[Answer] = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            who = self._name(worker.board.read()[0])
            code = worker.process.wait()
            raise RuntimeError(
                f"the process of {who} ended with exit code {code} while it was being built"
            ) from None
        worker.asked = []
        for index, result, _ in answers:
            if isinstance(result, EnvFailure):
                raise ValueError(f"{self._name(index)} cannot be built: {result.error}")

    def _submit(self, jobs: Mapping[int, SlotJob]) -> None:
        with self._lock:
            for index, job in jobs.items():
                self._worker_of[index].waiting[index] = job
            for worker in self._workers:
                self._flush(worker)

    def _flush(self, worker: VectorWorker) -> None:
        """Ask an idle worker for all that waits. One message at a time: no pipe can fill up."""
        if worker.waiting and not worker.asked:
            bundle: Bundle = list(worker.waiting.items())
            worker.waiting = {}
            with contextlib.suppress(
                OSError
            ):  # dead while idle: _collect sees it and brings it back
                worker.ask(bundle)

    def _collect(self, seconds: float) -> list[tuple[int, Any]]:
        now = time.monotonic()
        due = [one.deadline(self.timeout) for one in self._workers if one.asked]
        until = min([now + seconds, *due])
        # idle workers too: a job may reach one while we wait here
        connections = {one.connection: one for one in self._workers}
        ready = wait(list(connections), max(0.0, until - now))
        done: list[tuple[int, Any]] = []
        with self._lock:
            for worker in [connections[one] for one in ready]:  # pyright: ignore[reportArgumentType]
                try:
                    answers: list[Answer] = pickle.loads(worker.connection.recv_bytes())
                except (EOFError, OSError):
                    done += self._replace(worker, None)
                    continue
                asked, worker.asked = dict(worker.asked), []
                for index, result, standing in answers:
                    task = asked[index]
                    if isinstance(task, SlotJob):
                        self._pasts[index].note(task, result, standing)
                        done.append((index, result))
                self._flush(worker)
            now = time.monotonic()
            for worker in self._workers:
                if worker.asked and worker.deadline(self.timeout) <= now:
                    done += self._replace(worker, self.timeout)
        return done

    def _replace(self, worker: VectorWorker, late: float | None) -> list[tuple[int, Any]]:
        """Put a new process in place of a dead or hanging one; answers that can be given now."""
        guilty, _ = worker.board.read()
        code = worker.kill()
        asked, was_opening = dict(worker.asked), worker.is_opening
        if guilty == NOBODY and was_opening:
            raise RuntimeError(f"a worker process ended twice, the second time with code {code}")
        done: list[tuple[int, Any]] = []
        unanswered = {i: task for i, task in asked.items() if isinstance(task, SlotJob)}
        if guilty != NOBODY:
            past, job = self._pasts[guilty], unanswered.pop(guilty, None)
            error = f"RuntimeError: the process of {self._name(guilty)} ended with exit code {code}"
            if late is not None:
                error = late_text(guilty, self.env_ids[guilty], job or SlotJob("opening"), late)
            if job is None:  # while it was being brought back
                past.seed = past.state = None
                past.actions = []
            else:
                heir = EnvSlot(self.recipes[guilty], self.autoreset)
                heir.stand(past.standing)
                self._pasts[guilty] = Past(heir.successor().standing)
                if job.do == "step":
                    worker.waiting[guilty] = SlotJob("recover", (error,))
                else:
                    done.append((guilty, lost(job, error)))
        worker.waiting = {**unanswered, **worker.waiting}
        worker.start()
        worker.ask([(i, self._openings[i]._replace(past=self._pasts[i])) for i in worker.indices])
        return done

    def _name(self, index: int) -> str:
        return "an env" if index == NOBODY else f"env {index} ({self.env_ids[index]!r})"

    def _shut(self) -> None:
        self._finalizer()


def end(workers: Sequence[VectorWorker]) -> None:
    """Let idle workers close their envs; kill what is left after a short while."""
    for worker in workers:
        if not worker.asked:
            try:
                worker.ask([])
            except OSError:
                continue  # dead already
    ends = time.monotonic() + GOODBYE
    for worker in workers:
        try:
            if not worker.asked:
                worker.process.wait(max(0.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass  # killed next
        worker.kill()


def movable(recipe: EnvSpec) -> EnvEntry:
    """The table's line for a recipe, if both can be sent to another process."""
    from graft.envs import find  # that package imports this one

    entry = find(recipe.env_id)
    entry = entry._replace(args=dict(entry.args))
    for thing in (entry.build, *recipe.wrappers):
        if getattr(thing, "__module__", "") == "__main__":
            raise ValueError(
                f"env {recipe.env_id!r}: {thing!r} is defined in the script that is running, which "
                "a worker process does not import; move it to a module, or use mode='threads'"
            )
    try:
        pickle.dumps((recipe, entry), pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"env {recipe.env_id!r} cannot be sent to a worker process ({error}); "
            "use importable classes and plain arguments, or mode='threads'"
        ) from error
    return entry


def num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

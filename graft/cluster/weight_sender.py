"""The learner's side of new weights: to all workers at once, and what becomes of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graft.cluster.ray_import import cause_of, store_host
from graft.cluster.weight_transfer import BroadcastHost, described
from graft.cluster.worker import ClusterWorker


class WeightSender:
    """Sends weights and waits for every worker.

    deadline   seconds in which a worker must take them, patience: for its answer then
    remove     called with a worker that is lost, and why
    """

    def __init__(
        self,
        ray: Any,
        backend: str,
        deadline: float,
        patience: float,
        remove: Callable[[ClusterWorker, str], None],
    ) -> None:
        self.ray, self.deadline, self.patience, self.remove = ray, deadline, patience, remove
        self._broadcasts = BroadcastHost(backend, patience)

    def broadcast(
        self, weights: Mapping[str, Any], version: int, workers: Sequence[ClusterWorker]
    ) -> list[ClusterWorker]:
        """Send by broadcast; returns the workers that did not receive the weights."""
        group = self._broadcasts.group(store_host(self.ray), workers)
        shapes = described(weights)
        loads = {
            worker: worker.actor.receive.remote(replace(group, rank=rank), shapes, version)
            for rank, worker in enumerate(workers, 1)
        }
        try:
            group.send(weights)
        except RuntimeError:  # a worker died or does not answer
            missed = [*workers]
        else:
            missed = [worker for worker, error in self._errors(loads, version).items() if error]
        if missed:
            self.end_broadcasts()
        return missed

    def load(
        self, reference: Any, version: int, workers: Sequence[ClusterWorker]
    ) -> dict[ClusterWorker, str]:
        """Send through the store: worker -> its error, or "". Workers that die are left out."""
        loads = {worker: worker.actor.load.remote(reference, version) for worker in workers}
        return self._errors(loads, version)

    def end_broadcasts(self) -> None:
        """Make another group next time: a member is lost."""
        self._broadcasts.end()

    def _errors(self, loads: Mapping[ClusterWorker, Any], version: int) -> dict[ClusterWorker, str]:
        owners = {reference: worker for worker, reference in loads.items()}
        if not owners:
            return {}
        # another thread removes a silent worker, and its answer is then an error
        done, late = self.ray.wait(list(owners), num_returns=len(owners), timeout=self.deadline)
        for reference in late:
            reason = f"did not take version {version} of the weights in {self.deadline:g} s"
            self.remove(owners[reference], reason)
        errors: dict[ClusterWorker, str] = {}
        for reference in done:
            try:
                errors[owners[reference]] = self.ray.get(reference, timeout=self.patience)
            except self.ray.exceptions.RayError as error:
                self.remove(owners[reference], cause_of(error))
        return errors

"""Writes checkpoints: all processes write under a temporary name, which becomes final when all is there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from graft.deadlines import waiting
from graft.files import make_staging, put_in_place, remove, staging_path, write_json
from graft.models.io.save import ids_of
from graft.models.lora.files import save_adapters
from graft.models.policy import host_copy, save_policy
from graft.train.distributed.process_group import ALONE, ProcessGroup
from graft.train.learner import Learner
from graft.train.run_dir.checkpoint import (
    ACTION_NAMES,
    ADAPTER_FOLDER,
    TRAINER_FOLDER,
    checkpoints,
    write_ahead,
)
from graft.train.run_dir.folder import RunStopped, out_of_disk
from graft.train.run_dir.optimizer_state import (
    copied,
    find_unusable_state,
    save_tensors,
    tensors_of,
)
from graft.train.run_dir.small_state import get_random_states, save_small
from graft.types import Episode


class CheckpointWriter:
    """Writes `folder/phase-step`, then removes checkpoints that are neither recent nor best.

    In the background (`later`) memory is copied at once and files are written while training continues; a
    checkpoint gets its final name when it is whole, and the next one waits for it.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Any,
        *,
        keep_last: int,
        processes: ProcessGroup = ALONE,
        later: bool = False,
        source: str = "",
        names: Sequence[str] = (),
        turn_ends: Iterable[int] = (),
    ) -> None:
        """`names` are the actions beyond the vocabulary, in the order of their head rows; `turn_ends` are
        tokens that end a turn in the chat template, written for other libraries to stop at."""
        self.folder, self.tokenizer, self.keep_last = folder, tokenizer, keep_last
        self.processes, self.later = processes, later
        self.source, self.names, self.turn_ends = source, names, tuple(turn_ends)
        self._thread = ThreadPoolExecutor(1, "graft-checkpoint")
        self._writing: tuple[Path, Future[Any]] | None = None
        self._newest: Path | None = None

    def save(
        self,
        phase: str,
        step: int,
        learner: Learner,
        state: Mapping[str, Any],
        ahead: Mapping[int, Sequence[Episode]] | None = None,
    ) -> None:
        """A collective operation; `ahead` are the episodes of steps after this one, by step."""
        self.finish()
        target = self.folder / f"{phase}-{step:06d}"
        if target == self._newest:  # `finish` has just completed it
            return
        self._refuse_unusable(target.name, learner)
        staging = staging_path(target)
        with out_of_disk(self.folder.parent):
            if self.processes.is_first:
                make_staging(target)
                write_ahead(staging, ahead or {})
            self.processes.barrier("the folder of the checkpoint")
            try:
                saved = {"phase": phase, "step": step, **state}
                if self.later:
                    self._writing = target, self._write_later(staging, learner, saved)
                else:
                    self._write(staging, learner, saved)
                    self._name(target)
            finally:
                if self._writing is None and self.processes.is_first:
                    shutil.rmtree(staging, ignore_errors=True)

    def _refuse_unusable(self, name: str, learner: Learner) -> None:
        """A checkpoint that cannot be resumed must not replace one that can."""
        why = find_unusable_state(learner, learner.anchor or {})
        if self.processes.any(bool(why), "whether the weights of all ranks are finite"):
            before = checkpoints(self.folder)
            way = f"{before[-1].path} is intact: resume from it" if before else "Start again"
            raise RunStopped(
                f"{name} was not written: {why or 'the part of another process is not finite'}. {way} with a "
                "lower learning rate (train.lr, sft.lr) or train.max_grad_norm"
            )

    def finish(self) -> None:
        """Wait until the checkpoint in the background is complete."""
        if self._writing is None:
            return
        (target, future), self._writing = self._writing, None
        try:
            with (
                out_of_disk(self.folder.parent),
                waiting(f"{target.name} to be on the disk", 3600.0),
            ):
                future.result(3600.0)
                self._name(target)
        finally:
            if self.processes.is_first:
                shutil.rmtree(staging_path(target), ignore_errors=True)

    def remove_old(self) -> None:
        """Remove what a process that died after its last checkpoint could not."""
        if self.processes.is_first:
            _remove_old(self.folder, self.keep_last)

    def _name(self, target: Path) -> None:
        """All parts are written: give the checkpoint its final name."""
        self.processes.barrier("the parts of the checkpoint of all ranks")
        if self.processes.is_first:
            put_in_place(staging_path(target), target)
            _remove_old(self.folder, self.keep_last)
        self.processes.barrier("the checkpoint to have its name")
        self._newest = target

    def _write(self, staging: Path, learner: Learner, state: Mapping[str, Any]) -> None:
        with self.processes.together("the weights, gathered for the checkpoint"):
            self._write_model(staging, learner.policy)
        with self.processes.together("the optimizer's state of all ranks"):
            save_tensors(tensors_of(learner), staging / TRAINER_FOLDER, self.processes.rank)
        if self.processes.is_first:
            self._write_rest(staging, _small(learner), state, learner)

    def _write_later(
        self, staging: Path, learner: Learner, state: Mapping[str, Any]
    ) -> Future[Any]:
        """Copy what training changes, then write it on a thread."""
        small = _small(learner)
        tensors = copied(tensors_of(learner))
        with self.processes.together("the weights, gathered for the checkpoint"):
            policy = host_copy(learner.policy, keep=self.processes.is_first)
        state = json.loads(json.dumps(state))
        if learner.lora is not None and self.processes.is_first:
            save_adapters(learner.lora, staging / ADAPTER_FOLDER)  # small

        def write() -> None:
            if policy is not None:
                self._write_model(staging, policy)
                self._write_rest(staging, small, state, None)
            save_tensors(tensors, staging / TRAINER_FOLDER, self.processes.rank)

        return self._thread.submit(write)

    def _write_model(self, staging: Path, policy: Any) -> None:
        """The Hugging Face folder; a collective operation for a split policy."""
        save_policy(
            policy,
            staging if self.processes.is_first else None,
            special=ids_of(self.tokenizer, self.turn_ends),
            source=self.source or None,
        )

    def _write_rest(
        self,
        staging: Path,
        small: Mapping[str, Any],
        state: Mapping[str, Any],
        learner: Learner | None,
    ) -> None:
        self.tokenizer.save(staging)
        if self.names:
            write_json(staging / ACTION_NAMES, {"actions": list(self.names)})
        if learner is not None and learner.lora is not None:
            save_adapters(learner.lora, staging / ADAPTER_FOLDER)
        save_small(small, staging / TRAINER_FOLDER)
        write_json(staging / "state.json", dict(state))


def _small(learner: Learner) -> dict[str, Any]:
    """Everything but tensors of the model's size."""
    small: dict[str, Any] = {"steps": learner.optimizer.steps, "random": get_random_states()}
    if learner.critic_optimizer is not None:
        small["critic_steps"] = learner.critic_optimizer.steps
    if learner.reference_moved:
        small["reference_moved"] = True
    if learner.anchor is not None:
        small["anchor"] = {name: value.cpu() for name, value in learner.anchor.items()}
    return small


def _remove_old(folder: Path, keep_last: int) -> None:
    """Keep the last few and the best by held-out score, and remove the rest."""
    everything = checkpoints(folder)
    scored = [(c.state().get("score"), c) for c in everything]
    known = [(score, c.step, c) for score, c in scored if score is not None]
    best = max(known, key=lambda item: item[:2])[2] if known else None
    for old in everything[:-keep_last]:
        if best is None or old.path != best.path:
            remove(old.path)

"""A run from start to summary: claim the folder, build, resume, warm up, train, evaluate, summarise.

A resumed run is exact: every draw is keyed by (seed, step, task, attempt), data is a function of the
step, and a checkpoint holds weights, optimizer and cursor. So a run that was killed and resumed has the
metrics of one that was not, to the bit on a CPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from graft.config import Config
from graft.files import remove_leftovers
from graft.models.io.load import ModelFileError
from graft.rollout.collector import Collector
from graft.train.build import build_run
from graft.train.components import RunComponents
from graft.train.distributed.process_group import ALONE, ProcessGroup
from graft.train.leakage import held_out_check, run_leakage, to_json
from graft.train.model import pin_model, refuse_what_cannot_fit
from graft.train.monitor.check import PASS
from graft.train.monitor.display import Display
from graft.train.monitor.labels import PHASE_WORDS
from graft.train.monitor.settings_check import (
    graded_check,
    positions_check,
    refuse,
    settings_checks,
)
from graft.train.phases.context import RunContext
from graft.train.phases.reinforcement import reinforce
from graft.train.phases.summary import summarise
from graft.train.phases.warm_up import is_warm, warm_up
from graft.train.rollouts.rollout_engine import make_collector
from graft.train.run_dir.checkpoint import Checkpoint, checkpoints, latest_model
from graft.train.run_dir.checkpoint_writer import CheckpointWriter
from graft.train.run_dir.folder import RunFolder
from graft.train.run_dir.interrupt import Interrupt
from graft.train.run_dir.journal import Journal
from graft.train.run_dir.names import short
from graft.train.tasks import probe_of
from graft.train.teachers.pin import pin_teachers
from graft.types import Episode


class Session:
    """One process's part of a run; it owns the folder while it lasts."""

    def __init__(
        self,
        config: Config,
        display: Display,
        processes: ProcessGroup = ALONE,
        make_collector: Callable[[RunComponents], Collector] | None = None,
        waits: bool = False,
    ) -> None:
        """`make_collector` makes a collector on other machines; None: the processes of this run
        collect. With `waits` only `interrupt.ask` stops it, at the end of a step."""
        self.config, self.display, self.processes = config, display, processes
        self.make_collector = make_collector
        self.folder = RunFolder(config)
        self.started = time.perf_counter()
        self.interrupt = Interrupt(waits=waits or processes.world > 1)
        self.journal = Journal(self.folder, config, display, processes.is_first)
        self.episodes: list[Episode] = []
        """Of the last held-out evaluation, when the run is over."""

    def train(self) -> dict[str, Any]:
        """All phases; returns the summary. A run that is complete returns the summary it has."""
        is_first = self.processes.is_first
        try:
            self._claim()
            if (finished := self._finished()) is not None:
                return finished
            if is_first:
                self.folder.begin()
            with self.interrupt, self.journal:
                return self._train()
        except Exception as error:
            if is_first and self.folder.is_ours:
                self.folder.stopped(str(error))
            raise
        finally:
            if is_first:
                self.folder.release()

    def _train(self) -> dict[str, Any]:
        checkpoint = self._newest()
        run = self._open(checkpoint)
        try:
            if checkpoint is None or checkpoint.phase == "sft":
                warm_up(run, checkpoint)
                checkpoint = None
            if self.config.train.steps:
                reinforce(run, checkpoint)
            run.writer.finish()
            run.writer.remove_old()
            return summarise(run)
        finally:
            self.episodes = run.episodes
            run.collector.close()

    def _claim(self) -> None:
        """The folder for this process; a hub name means the commit that the run began with."""
        if self.processes.is_first:
            self.folder.claim()
            self._pin_model()
        self.processes.barrier("the run's folder")
        if not self.processes.is_first:
            self._pin_model()

    def _pin_model(self) -> None:
        self.config, note = pin_model(self.config, self.folder.path)
        self.config = pin_teachers(self.config, self.folder.path)
        if note:
            self.display.note(note)

    def _finished(self) -> dict[str, Any] | None:
        """The summary of a run that has no step left; None where one is left."""
        newest, path, steps = self._newest(), self.folder.path, self.config.train.steps
        try:
            summary: Any = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if newest is None or not isinstance(summary, dict):
            return None
        is_scored = PurePath(str(summary.get("checkpoint", ""))).name == newest.path.name
        is_trained = not steps and is_warm(self.config, newest.state())
        if newest.phase == "rl":
            is_trained = newest.step >= steps
        if not is_scored or not is_trained:
            return None
        self._show_changes(newest)  # config.yaml has them from now on
        more = f"train.steps={2 * newest.step}" if newest.step and steps else "train.steps=100 (RL)"
        if unused := [key for key in self.folder.changed if key != "train.steps"]:
            self.display.note(
                f"no step is left that would use {', '.join(unused)}: nothing changes"
            )
        self.display.note(
            f"{path} is done, with {PHASE_WORDS[newest.phase]} step {newest.step} as its last. Nothing was "
            f"trained or evaluated now; the scores are those of summary.json. To train more: {more}. To "
            f"start anew: another run.name. To score it again: graft eval {short(path)}"
        )
        return summary

    def _newest(self) -> Checkpoint | None:
        existing = checkpoints(self.folder.checkpoints)
        return existing[-1] if existing else None

    def _open(self, newest: Checkpoint | None) -> RunContext:
        """Build the run, from its newest checkpoint where there is one, and check its settings."""
        warnings = refuse(settings_checks(self.config))
        if self.processes.is_first:
            remove_leftovers(self.folder.checkpoints)
        try:
            run = self._build(newest)
        except ModelFileError as error:
            if newest is None or str(newest.path) not in str(error):
                raise
            raise ModelFileError(self._without(newest, error)) from error
        run.show_notes()
        if newest is not None:
            run.state = newest.state()
            self.display.note(
                f"resuming {self.folder.path} after {newest.phase} step {newest.step}"
            )
            self._show_changes(newest)
        dtype = str(run.components.policy.dtype)
        self.journal.resume(newest, run.state.get("alarms", {}), dtype)
        for text in warnings + self._check_components(run.components) + self._check_held_out(run):
            self.journal.warn(text, is_new=newest is None)
        return run

    def _without(self, damaged: Checkpoint, error: ModelFileError) -> str:
        """How the run can go on without a checkpoint whose files were changed or lost."""
        older = [one.path.name for one in checkpoints(self.folder.checkpoints)][:-1]
        then = f"resumes after {older[-1]}" if older else "starts over, as there is no older one"
        return (
            f"the newest checkpoint of {self.folder.path} cannot be read: {error}. Or move "
            f"{damaged.path} away: the same command then {then}"
        )

    def _build(self, newest: Checkpoint | None) -> RunContext:
        config, weights = self.config, None if newest is None else newest.path
        if self.processes.world == 1:
            refuse_what_cannot_fit(config, weights)
        is_local = self.make_collector is None
        components = build_run(config, weights, self.processes, with_engine=is_local)
        make = self.make_collector or (lambda parts: make_collector(parts, self.processes))
        writer = CheckpointWriter(
            self.folder.checkpoints,
            components.tokenizer,
            keep_last=config.run.keep_last,
            processes=self.processes,
            later=config.run.save_later,
            source=config.model.path and str(latest_model(config.model.path)),
            names=() if components.actions is None else components.actions.names,
            turn_ends=components.chat.end_ids,
        )
        return RunContext(
            config,
            self.display,
            self.processes,
            self.folder,
            self.interrupt,
            self.journal,
            components,
            make(components),
            writer,
            self.started,
        )

    def _show_changes(self, newest: Checkpoint) -> None:
        """Settings that are new in this command, shown and recorded."""
        if self.processes.is_first:
            for change in self.folder.note_changes(newest.phase, newest.step):
                self.display.note(change)

    def _check_held_out(self, run: RunContext) -> list[str]:
        """Warnings about held-out tasks that the run trains on; its state remembers them for every table."""
        if not self.processes.is_first:
            return []
        parts = run.components
        found = run_leakage(self.config, parts.setup.make_env, parts.held_out.make_env)
        run.state["leakage"] = to_json(found)
        check = held_out_check(found)
        if check is not None and check.verdict == PASS:
            self.display.note(str(check))
            return []
        return refuse([] if check is None else [check])

    def _check_components(self, components: RunComponents) -> list[str]:
        """Warnings about model and environment; what cannot work is refused."""
        checks = [positions_check(self.config, components.policy.shape)]
        for item in self.config.task.envs:
            probe = components.setup.make_env(probe_of(item))
            checks.append(graded_check(self.config, item, probe))
        return refuse([check for check in checks if check is not None])

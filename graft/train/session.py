"""A run from start to summary: claim the folder, warm up, train, evaluate, and survive interruptions.

What is exact on resume: every draw is keyed by (seed, step, task, path), data is a function of the
step, and a checkpoint holds weights, optimizer and cursor. So the run that was killed and went on
and the run that was not have the same metrics, to the bit on a CPU.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, TextIO

import torch

from graft.config import Config, load_config
from graft.files import make_aside, put_in_place
from graft.models.io.load import read_json
from graft.models.policy import save_policy
from graft.protocols import Stateful
from graft.rollout.collectors.collector import Collector
from graft.rollout.collectors.request import RolloutRequest
from graft.train.build import RunComponents, build_run, make_learner, rates_of, sft_learner
from graft.train.distributed.process_group import ALONE, ProcessGroup
from graft.train.held_out import HeldOutScore, score_of
from graft.train.learner import Learner
from graft.train.memory.plan import has_reference
from graft.train.memory.workload import SFT_CHECK_EVERY, SFT_CHECK_TASKS
from graft.train.model import MODEL_FILE, load_reference, pin_model, refuse_what_cannot_fit
from graft.train.monitor.check import FAIL, PASS
from graft.train.monitor.display import Display
from graft.train.monitor.labels import PHASE_WORDS
from graft.train.monitor.run_check import check_attempts
from graft.train.monitor.settings_check import (
    graded_check,
    positions_check,
    refuse,
    settings_checks,
)
from graft.train.rl import RolloutSource, TaskStream, held_out_tasks, learn
from graft.train.rollout_engine import make_collector
from graft.train.run_dir.checkpoint import Checkpoint, checkpoints, latest_model
from graft.train.run_dir.checkpoint_writer import CheckpointWriter
from graft.train.run_dir.fingerprint import StepRecorder
from graft.train.run_dir.folder import RunFolder, RunStopped, out_of_disk
from graft.train.run_dir.interrupt import Interrupt
from graft.train.run_dir.journal import Journal
from graft.train.run_dir.names import short
from graft.train.sft import held_out_scores, sft_step
from graft.train.sft_dataset import Prefetcher, SFTDataset, make_course
from graft.train.step_metrics import commonest_failure
from graft.types import Episode, Status, Task
from graft.version import __version__

CHECKED_TASKS = 2
"""Attempted before the first step where no evaluation has done so."""


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
        """`make_collector` says who attempts the tasks; None: this process, or all that there are. With
        `waits` it is stopped by `interrupt.ask` alone, at the end of a step."""
        self.config, self.display, self.processes = config, display, processes
        self.make_collector = make_collector
        self.folder = RunFolder(config)
        self.started = time.perf_counter()
        self.interrupt = Interrupt(waits=waits or processes.world > 1)
        self.state: dict[str, Any] = {"seconds": {}}
        """Carried from checkpoint to checkpoint: scores before training, seconds per phase, cursor."""
        self.episodes: list[Episode] = []
        """Of the latest held-out evaluation: something to show."""
        self._has_told_of_room = False
        self.journal = Journal(self.folder, config, display, processes.is_first)

    def train(self) -> dict[str, Any]:
        """Warm-up if the recipe has one, evaluation, RL, evaluation; returns the summary.

        A run that is done already is left as it is: its summary is the one of then.
        """
        is_first = self.processes.is_first
        try:
            if is_first:
                self.folder.claim()
                self._pin_model()
            self.processes.barrier("the run's folder")
            if not is_first:
                self._pin_model()
            if (finished := self._finished()) is not None:
                return finished
            if is_first:
                self.folder.begin()
            with self.interrupt, self.journal:
                resumed = self._open()
                try:
                    if resumed is None or resumed.phase == "sft":
                        self._warm_up(resumed)
                        resumed = None
                    if self.config.train.steps:
                        self._reinforce(resumed)
                    self.saver.finish()
                    return self._summarise()
                finally:
                    self.collector.close()
        except Exception as error:
            if is_first and self.folder.is_ours:
                self.folder.stopped(str(error))
            raise
        finally:
            if is_first:
                self.folder.release()

    def _finished(self) -> dict[str, Any] | None:
        """The summary of a run that has no step left to make; None where one is left."""
        listed, path = checkpoints(self.folder.checkpoints), self.folder.path
        try:
            summary: Any = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        steps = self.config.train.steps
        if not listed or not isinstance(summary, dict):
            return None
        newest = listed[-1]
        is_scored = PurePath(str(summary.get("checkpoint", ""))).name == newest.path.name
        is_rl = newest.phase == "rl"
        is_trained = newest.step >= steps if is_rl else not steps and self._is_warm(newest.state())
        if not is_scored or not is_trained:
            return None
        self._tell_changes(newest)  # config.yaml has them from now on
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

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end a turn in this run's environment."""
        task = self.config.task
        return self.components.held_out.make_env(Task("probe", task.env)).stop if task.env else ()

    def _open(self) -> Checkpoint | None:
        """Load the newest checkpoint, or start anew; either way drop what lies behind it."""
        doubtful = refuse(settings_checks(self.config))
        existing = checkpoints(self.folder.checkpoints)
        newest = existing[-1] if existing else None
        if self.processes.is_first:
            for leftover in self.folder.checkpoints.glob(".*.partial"):
                shutil.rmtree(leftover, ignore_errors=True)
        weights = None if newest is None else newest.path
        if self.processes.world == 1:
            refuse_what_cannot_fit(self.config, weights)
        self.components: RunComponents = build_run(
            self.config, weights, self.processes, samples=self.make_collector is None
        )
        self.collector = (self.make_collector or self._local_collector)(self.components)
        self.saver = CheckpointWriter(
            self.folder.checkpoints,
            self.components.tokenizer,
            keep_last=self.config.run.keep_last,
            processes=self.processes,
            later=self.config.run.save_later,
            source=self.config.model.path and str(latest_model(self.config.model.path)),
            names=() if self.components.actions is None else self.components.actions.names,
            turn_ends=self.components.chat.end_ids,
        )
        self._tell_notes()
        if newest is not None:
            self.state = newest.state()
            self.display.note(
                f"resuming {self.folder.path} after {newest.phase} step {newest.step}"
            )
            self._tell_changes(newest)
        self.journal.resume(newest, self.state.get("alarms", {}), str(self.components.policy.dtype))
        checks = [positions_check(self.config, self.components.policy.shape)]
        if self.config.task.env:
            probe = self.components.setup.make_env(Task("probe", self.config.task.env))
            checks.append(graded_check(self.config, probe))
        doubtful += refuse([check for check in checks if check is not None])
        for text in doubtful:
            self.journal.warn(text, is_new=newest is None)
        return newest

    def _pin_model(self) -> None:
        """From now on a hub name means the commit that this run began with."""
        self.config, note = pin_model(self.config, self.folder.path)
        if note:
            self.display.note(note)

    def _tell_changes(self, newest: Checkpoint) -> None:
        """Settings that the run did not have before, shown and written down."""
        if self.processes.is_first:
            for change in self.folder.note_changes(newest.phase, newest.step):
                self.display.note(change)

    def _tell_notes(self) -> None:
        """What is worth knowing of the run's components, once."""
        for note in self.components.notes:
            self.display.note(note)
        self.components.notes.clear()

    def _local_collector(self, components: RunComponents) -> Collector:
        return make_collector(components, self.processes)

    def _publish(self, version: int) -> None:
        """Whoever samples has the learner's weights from now on."""
        self.collector.load(self.components.published(), version)

    def _stop_together(self) -> None:
        """Processes that work together end at the same step."""
        if self.interrupt.waits and self.processes.any(
            self.interrupt.is_pending, "whether anybody wants to stop"
        ):
            raise KeyboardInterrupt

    def _warm_up(self, resumed: Checkpoint | None) -> None:
        sft = self.config.sft
        if not sft.is_on or self._is_warm(self.state):
            return
        self.state["sft_planned"] = [sft.steps, sft.epochs]
        course = make_course(self.components)
        for note in course.notes:
            self.display.note(note)
        before = self.state.setdefault("sft_rows", course.fingerprint)
        if before != course.fingerprint:
            raise RunStopped(
                f"the rows of {sft.data} are not those that this run began with, so it cannot go on "
                "with them; put the file back, or give this run another run.name"
            )
        learner = sft_learner(self.components, course.steps)
        self._tell_notes()
        start = 0
        if resumed is not None:
            resumed.restore(learner)
            start = resumed.step
        self.display.phase(PHASE_WORDS["sft"], course.steps)
        clock = self._clock("sft")
        done = start
        try:
            with Prefetcher(course) as examples:
                for step in range(start + 1, course.steps + 1):
                    batch = examples(step)
                    with self.interrupt.held(), self.journal.evidence(step, batch):
                        metrics = sft_step(learner, batch)
                        done = step
                        if course.passes:
                            metrics["epoch"] = min(step * course.passes, sft.epochs or math.inf)
                        metrics |= self._look(learner, course, step)
                        self.journal.log(step, metrics, "sft")
                        is_followed = metrics.get("accuracy", -1.0) >= sft.stop_at > 0
                        self.state["sft_done"] = step == course.steps or is_followed
                        clock()
                        if self._is_due(step) or self.state["sft_done"]:
                            self._save("sft", step, learner)
                    self._stop_together()
                    if self.state["sft_done"]:
                        break
        except KeyboardInterrupt:
            self._save("sft", done, learner)
            self.saver.finish()
            raise

    def _is_warm(self, state: Mapping[str, Any]) -> bool:
        """Whether the warm-up is over; one that was resumed with more steps is not."""
        planned = [self.config.sft.steps, self.config.sft.epochs]
        return bool(state.get("sft_done")) and state.get("sft_planned", planned) == planned

    def _look(self, learner: Learner, course: SFTDataset, step: int) -> dict[str, float]:
        """What is held out, when it is time: rows, tasks, and whether a warm-up may stop."""
        sft, env = self.config.sft, self.config.task.env
        is_due = sft.eval_every > 0 and step % sft.eval_every == 0
        may_stop = sft.stop_at > 0 and step % SFT_CHECK_EVERY == 0
        found: dict[str, float] = {}
        if course.held_out and (is_due or step == course.steps or (may_stop and not env)):
            found |= held_out_scores(learner, course.held_out())
            loss, share = found["eval/loss"], found["eval/accuracy"]
            self.display.note(
                f"held-out rows, step {step}: loss {loss:.3f}, tokens right {share:.1%}"
            )
        if env and (is_due or may_stop):
            self._publish(step)
        if env and is_due:
            scores = self._evaluate(f"warm-up step {step}")
            found |= {f"eval/{name}": value for name, value in scores.items()}
        if may_stop:
            found["accuracy"] = self._followed() if env else found["eval/accuracy"]
        looked = {name: value for name, value in found.items() if name.startswith("eval/")}
        self.state["sft"] = {**self.state.get("sft", {}), **course.counts, **looked}
        return found

    def _followed(self) -> float:
        """Reward of held-out attempts that call a tool (of all, where there is none to call)."""
        tasks = held_out_tasks(self.config.task.env, SFT_CHECK_TASKS)
        score = self._attempt(tasks, 1.0)
        return score.reward_with_tool if score.tool_rate else score.reward

    def _attempt(self, tasks: Sequence[Task], temperature: float) -> HeldOutScore:
        """Held-out tasks, once each."""
        name = f"{len(tasks)} held-out episodes"
        request = RolloutRequest(tasks, name, held_out=True, temperature=temperature)
        score = score_of(self.collector.submit(request).result())
        self.journal.failures(name, score.episodes)
        leaves = [leaf for episode in score.episodes for leaf in episode.leaves]
        if all(leaf.status is Status.ENGINE_ERROR for leaf in leaves):  # no score of anything
            raise RunStopped(
                f"the engine completed none of {name}, mostly: {commonest_failure(score.episodes)}. The "
                "last checkpoint is intact; run the same command again once the engine is back"
            )
        return score

    def _reinforce(self, resumed: Checkpoint | None) -> None:
        config = self.config
        reference = None
        if has_reference(config) and not config.lora.rank:
            reference = self._reference(is_new=resumed is None)
        learner = make_learner(self.components, reference)
        self._tell_notes()
        tasks = TaskStream(config.task.env, config.run.seed, self.state.get("cursor", 0))
        done = 0
        if resumed is None:
            self._publish(0)
            self.state["before"] = self._evaluate("before")
            self._save("rl", 0, learner)
        else:
            resumed.restore(learner)
            done = resumed.step
            if isinstance(self.components.branch, Stateful) and "branch" in self.state:
                self.components.branch.restore(self.state["branch"])
        if done < config.train.steps:
            self._check_up(learner, done)
        self._publish(done)
        source = RolloutSource(self.components, self.collector, tasks)
        recorder = StepRecorder(learner, config.train.steps, rates_of(config))
        self.display.phase(PHASE_WORDS["rl"], config.train.steps)
        clock = self._clock("rl")
        try:
            for step in range(done + 1, config.train.steps + 1):
                self.processes.doing(f"samples for step {step}")
                rollouts = source.take(step)
                self.journal.failures(f"step {step}", rollouts.episodes)
                self.processes.doing(f"learns step {step}")
                with self.interrupt.held(), self.journal.evidence(step, rollouts.episodes):
                    learner.keeps_logprobs = self.journal.keeps_episodes(step)
                    before = recorder.prints() if learner.keeps_logprobs else None
                    learned = learn(self.components, learner, rollouts, step)
                    record = None if before is None else recorder.record(step, before)
                    metrics = learned.metrics
                    done = step
                    started = time.perf_counter()
                    self._publish(step)
                    metrics["time/sync"] = time.perf_counter() - started
                    self.state["cursor"] = rollouts.cursor
                    if isinstance(self.components.branch, Stateful):
                        self.state["branch"] = self.components.branch.state
                    self.state.pop("score", None)  # it belongs to the weights it was measured on
                    if config.run.eval_every and step % config.run.eval_every == 0:
                        scores = self._evaluate(f"step {step}")
                        metrics |= {f"eval/{k}": v for k, v in scores.items()}
                        self.state["score"] = scores["sampled"]
                    self._tell_of_full_contexts(metrics)
                    self.journal.log(
                        step, metrics, "rl", commonest_failure(rollouts.episodes, none="")
                    )
                    self.journal.keep(step, rollouts.episodes, learned, record)
                    clock()
                    if self._is_due(step) or step == config.train.steps:
                        self._save("rl", step, learner)
                self._stop_together()
        except KeyboardInterrupt:
            # the step that was cut is done again: its tasks come from the cursor of the last one
            self._save("rl", done, learner)
            self.saver.finish()
            raise

    def _check_up(self, learner: Learner, version: int) -> None:
        """The cheap checks of `graft doctor`, on attempts that the evaluation has just made."""
        episodes = self.episodes
        if not episodes:  # nothing was evaluated, or the run goes on from a checkpoint
            self._publish(version)
            tasks = held_out_tasks(self.config.task.env, CHECKED_TASKS)
            episodes = self.collector.submit(
                RolloutRequest(tasks, "a first look", held_out=True)
            ).result()
        chat, temperature = self.components.chat, self.config.rollout.temperature
        found = check_attempts(
            learner,
            episodes,
            chat,
            temperature,
            self.stop_strings,
            max_tokens=self.config.rollout.max_tokens,
        )
        for check in found:
            if check.verdict != PASS:
                self.display.note(str(check))
            if check.verdict == FAIL:
                raise RunStopped(
                    f"stopped before step {version + 1}: {check.name}: {check.seen}. {check.remedy}"
                )

    def _tell_of_full_contexts(self, metrics: dict[str, float]) -> None:
        """Once: prompts that leave no room are attempts that say nothing and earn nothing."""
        share = metrics.get("rollout/no_room", 0.0)
        if share and not self._has_told_of_room:
            self._has_told_of_room = True
            self.display.note(
                f"{share:.0%} of the attempts of this step could not say a word: their prompts fill "
                f"rollout.max_context={self.config.rollout.max_context}; raise it, or leave such "
                "tasks out"
            )

    def _reference(self, is_new: bool) -> Any:
        """The frozen policy of the KL term: the weights RL starts from, kept for every resumption."""
        path = self.folder.path / "reference"
        policy, is_first = self.components.policy, self.processes.is_first
        with out_of_disk(self.folder.path):
            if is_new:
                aside = make_aside(path) if is_first else None
                source = self.saver.source or None
                save_policy(policy, aside, special={}, source=source)
                if aside is not None:
                    put_in_place(aside, path)
                self.processes.barrier("the reference model")
        return load_reference(path, policy)

    def _evaluate(self, when: str) -> dict[str, float]:
        """Held-out scores, sampled and greedy."""
        config = self.config
        if not config.run.eval_tasks:
            return {}
        self.display.note(f"evaluating {config.run.eval_tasks} held-out tasks ({when})")
        tasks = held_out_tasks(config.task.env, config.run.eval_tasks)
        scores: dict[str, HeldOutScore] = {}
        clock = self._clock("eval")
        for name, temperature in (("sampled", config.rollout.temperature), ("greedy", 0.0)):
            scores[name] = self._attempt(tasks, temperature)
        clock()
        self.episodes = scores["sampled"].episodes
        if failed := scores["sampled"].failed:
            reason = commonest_failure(self.episodes)
            self.display.note(f"{failed:.0%} of the held-out attempts failed, mostly: {reason}")
        return {
            "sampled": scores["sampled"].reward,
            "greedy": scores["greedy"].reward,
            "tool_rate": scores["sampled"].tool_rate,
        }

    def _is_due(self, step: int) -> bool:
        every = self.config.run.save_every
        return every > 0 and step % every == 0

    def _save(self, phase: str, step: int, learner: Learner) -> None:
        if any(c.phase == phase and c.step == step for c in checkpoints(self.folder.checkpoints)):
            return
        self.state["alarms"] = self.journal.alarms.to_json()
        self.saver.save(phase, step, learner, self.state)

    def _clock(self, phase: str) -> Any:
        """Adds the seconds since the last call to the phase's account."""
        last = time.perf_counter()

        def tick() -> None:
            nonlocal last
            now = time.perf_counter()
            seconds: dict[str, float] = self.state.setdefault("seconds", {})
            seconds[phase] = seconds.get(phase, 0.0) + now - last
            last = now

        return tick

    def _summarise(self) -> dict[str, Any]:
        after = self._evaluate("after") if self.config.task.env else {}
        seconds = {**self.state["seconds"]}
        values: dict[str, Any] = {
            "name": self.config.run.name,
            "before": self.state.get("before", {}),
            "after": after,
            **({"sft": self.state["sft"]} if self.state.get("sft") else {}),
            "seconds": round(time.perf_counter() - self.started, 1),
            "seconds_per_phase": {name: round(value, 1) for name, value in seconds.items()},
            "parameters": sum(p.numel() for p in self.components.policy.parameters()),
            "processes": self.processes.world,
            "checkpoint": str(checkpoints(self.folder.checkpoints)[-1].path),
            **self._hub_model(),
            "versions": versions(),
            "machine": machine(self.components.policy.device),
        }
        if self.processes.is_first:
            self.folder.summary(values)
        return values

    def _hub_model(self) -> dict[str, Any]:
        """{"model": {"name": ..., "commit": ...}} where the run began with one of the hub's."""
        file = self.folder.path / MODEL_FILE
        known = read_json(file) if file.exists() else {}
        return {"model": {key: known[key] for key in ("name", "commit")}} if known else {}


def train_recipe(
    recipe: str | Mapping[str, Any] | Config,
    *overrides: str,
    quiet: bool = True,
    stream: TextIO | None = None,
) -> dict[str, Any]:
    """Run a recipe to its end, or go on with one that was interrupted; returns its summary.

    A dict of sections is a recipe too: train({"task": {"env": "calculator"}, "train": {"steps": 2}}).
    """
    config = recipe if isinstance(recipe, Config) else load_config(recipe, overrides)
    with Display(config.train.steps, quiet=quiet, stream=stream) as display:
        return Session(config, display).train()


def versions() -> Mapping[str, str]:
    return {"graft": __version__, "torch": torch.__version__, "python": platform.python_version()}


def machine(device: torch.device) -> Mapping[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "device": name or device.type,
        "threads": torch.get_num_threads(),
    }

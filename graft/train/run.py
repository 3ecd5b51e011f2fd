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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

import torch

from graft import __version__
from graft.config import Config, load_config
from graft.evaluate.run import Score, evaluate
from graft.models.decoder import Decoder
from graft.models.load import load_model
from graft.models.save import save_model
from graft.protocols import Stateful
from graft.train.checkpoint import Checkpoint, checkpoints, latest_model, save_checkpoint
from graft.train.course import Ahead, Course, make_course
from graft.train.describe import commonest_failure
from graft.train.display import Display
from graft.train.folder import RunFolder, RunStopped, out_of_disk
from graft.train.interrupt import Interrupt
from graft.train.learner import Learner
from graft.train.optimizer import NonFinite
from graft.train.plan import has_reference
from graft.train.rl import TaskStream, held_out_tasks, learn, roll_out
from graft.train.setup import (
    Parts,
    assemble,
    make_learner,
    refuse_what_cannot_fit,
    sft_learner,
)
from graft.train.sft import held_out_scores, sft_step
from graft.train.tracking import Track
from graft.types import Episode, Task

SFT_CHECK_EVERY = 25
"""Steps between looks at held-out tasks, where a warm-up may stop early."""
SFT_CHECK_TASKS = 128


class Session:
    """One process's part of a run; it owns the folder while it lasts."""

    def __init__(self, config: Config, display: Display) -> None:
        self.config, self.display = config, display
        self.folder = RunFolder(config)
        self.started = time.perf_counter()
        self.interrupt = Interrupt()
        self.state: dict[str, Any] = {"seconds": {}}
        """Carried from checkpoint to checkpoint: scores before training, seconds per phase, cursor."""
        self.episodes: list[Episode] = []
        """Of the latest held-out evaluation: something to show."""
        self._has_told_of_room = False

    def train(self) -> dict[str, Any]:
        """Warm-up if the recipe has one, evaluation, RL, evaluation; returns the summary."""
        try:
            self.folder.claim()
            with self.interrupt, self._track() as self.track:
                resumed = self._open()
                if resumed is None or resumed.phase == "sft":
                    self._warm_up(resumed)
                    resumed = None
                if self.config.train.steps:
                    self._reinforce(resumed)
                return self._summarise()
        finally:
            self.folder.release()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end a turn in this run's environment."""
        task = self.config.task
        return self.parts.held_out.make_env(Task("probe", task.env)).stop if task.env else ()

    def _track(self) -> Track:
        with out_of_disk(self.folder.path):
            return Track(
                self.folder.path, self.config.run.trackers, self.config.model_dump(mode="json")
            )

    def _open(self) -> Checkpoint | None:
        """Load the newest checkpoint, or start anew; either way drop what lies behind it."""
        existing = checkpoints(self.folder.checkpoints)
        newest = existing[-1] if existing else None
        for leftover in self.folder.checkpoints.glob(".*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        weights = None if newest is None else newest.path
        refuse_what_cannot_fit(self.config, weights)
        self.parts: Parts = assemble(self.config, weights)
        for note in self.parts.notes:
            self.display.note(note)
        with out_of_disk(self.folder.path):
            if newest is None:
                self.track.truncate_after("sft", -1)
            else:
                self.state = newest.state()
                self.track.truncate_after(newest.phase, newest.step)
                self.display.note(
                    f"resuming {self.folder.path} after {newest.phase} step {newest.step}"
                )
        return newest

    def _warm_up(self, resumed: Checkpoint | None) -> None:
        sft = self.config.sft
        if not sft.is_on or self.state.get("sft_done"):
            return
        course = make_course(self.parts)
        for note in course.notes:
            self.display.note(note)
        before = self.state.setdefault("sft_rows", course.fingerprint)
        if before != course.fingerprint:
            raise RunStopped(
                f"the rows of {sft.data} are not those that this run began with, so it cannot go on "
                "with them; put the file back, or give this run another run.name"
            )
        learner = sft_learner(self.parts, course.steps)
        start = 0
        if resumed is not None:
            resumed.restore(learner)
            start = resumed.step
        self.display.phase("warm-up", course.steps)
        clock = self._clock("sft")
        done = start
        try:
            with Ahead(course) as examples:
                for step in range(start + 1, course.steps + 1):
                    batch = examples(step)
                    with self.interrupt.held(), self._evidence(step, batch):
                        metrics = sft_step(learner, batch)
                        done = step
                        if course.passes:
                            metrics["epoch"] = min(step * course.passes, sft.epochs or math.inf)
                        metrics |= self._look(learner, course, step)
                        self._log(step, metrics, "sft")
                        is_followed = metrics.get("accuracy", -1.0) >= sft.stop_at > 0
                        self.state["sft_done"] = step == course.steps or is_followed
                        clock()
                        if self._is_due(step) or self.state["sft_done"]:
                            self._save("sft", step, learner)
                    if self.state["sft_done"]:
                        break
        except KeyboardInterrupt:
            self._save("sft", done, learner)
            raise

    def _look(self, learner: Learner, course: Course, step: int) -> dict[str, float]:
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
            self.parts.engine.load(None, version=step)  # what it kept is of older weights
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
        score = evaluate(tasks, self.parts.held_out, temperature=1.0)
        return score.reward_with_tool if score.tool_rate else score.reward

    def _reinforce(self, resumed: Checkpoint | None) -> None:
        config = self.config
        reference = None
        if has_reference(config) and not config.lora.rank:
            reference = self._reference(is_new=resumed is None)
        learner = make_learner(self.parts, reference)
        tasks = TaskStream(config.task.env, config.run.seed, self.state.get("cursor", 0))
        done = 0
        if resumed is None:
            self.state["before"] = self._evaluate("before")
            self._save("rl", 0, learner)
        else:
            resumed.restore(learner)
            done = resumed.step
            if isinstance(self.parts.branch, Stateful) and "branch" in self.state:
                self.parts.branch.restore(self.state["branch"])
        self.parts.engine.load(None, version=done)
        self.display.phase("reinforce", config.train.steps)
        clock = self._clock("rl")
        try:
            for step in range(done + 1, config.train.steps + 1):
                rollouts = roll_out(self.parts, tasks, step)
                with self.interrupt.held(), self._evidence(step, rollouts.episodes):
                    metrics = learn(self.parts, learner, rollouts, step)
                    done = step
                    self.state["cursor"] = tasks.cursor
                    if isinstance(self.parts.branch, Stateful):
                        self.state["branch"] = self.parts.branch.state
                    self.state.pop("score", None)  # it belongs to the weights it was measured on
                    if config.run.eval_every and step % config.run.eval_every == 0:
                        scores = self._evaluate(f"step {step}")
                        metrics |= {f"eval/{k}": v for k, v in scores.items()}
                        self.state["score"] = scores["sampled"]
                    self._tell_of_full_contexts(metrics)
                    self._log(step, metrics, "rl")
                    self._log_episodes(step, rollouts.episodes)
                    clock()
                    if self._is_due(step) or step == config.train.steps:
                        self._save("rl", step, learner)
        except KeyboardInterrupt:
            # the step that was cut is done again: its tasks come from the cursor of the last one
            self._save("rl", done, learner)
            raise

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

    def _reference(self, is_new: bool) -> Decoder:
        """The frozen policy of the KL term: the weights RL starts from, kept for every resumption."""
        path = self.folder.path / "reference"
        with out_of_disk(self.folder.path):
            if is_new:
                aside = path.with_name(".reference.partial")
                shutil.rmtree(aside, ignore_errors=True)
                save_model(self.parts.policy, aside)
                shutil.rmtree(path, ignore_errors=True)
                aside.rename(path)
        policy = self.parts.policy
        reference = load_model(path, dtype=policy.dtype, device=policy.device)
        return reference.requires_grad_(False)

    @contextmanager
    def _evidence(self, step: int, episodes: list[Episode]) -> Iterator[None]:
        """Numbers that are not finite stop the run and leave the batch behind."""
        try:
            yield
        except NonFinite as error:
            where = self.folder.path / "failed" / f"step_{step:06d}.jsonl"
            with out_of_disk(self.folder.path):
                where.parent.mkdir(exist_ok=True)
                # not Episode.dumps: what went wrong may be a NaN, and it must be seen
                lines = [json.dumps(episode.to_json()) + "\n" for episode in episodes]
                where.write_text("".join(lines), encoding="utf-8")
            raise RunStopped(
                f"step {step}: {error}. The batch is in {where}; the last good checkpoint is intact. "
                "Lower train.lr or train.max_grad_norm, or look at the batch for extreme log-probs"
            ) from error

    def _evaluate(self, when: str) -> dict[str, float]:
        """Held-out scores, sampled and greedy."""
        config = self.config
        if not config.run.eval_tasks:
            return {}
        self.display.note(f"evaluating {config.run.eval_tasks} held-out tasks ({when})")
        tasks = held_out_tasks(config.task.env, config.run.eval_tasks)
        scores: dict[str, Score] = {}
        clock = self._clock("eval")
        for name, temperature in (("sampled", config.rollout.temperature), ("greedy", 0.0)):
            scores[name] = evaluate(
                tasks,
                self.parts.held_out,
                temperature=temperature,
                concurrency=config.rollout.concurrency,
            )
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
        save_checkpoint(
            self.folder.checkpoints,
            phase,
            step,
            learner,
            self.parts.tokenizer,
            self.state,
            keep_last=self.config.run.keep_last,
            names=() if self.parts.actions is None else self.parts.actions.names,
            source=self.config.model.path and str(latest_model(self.config.model.path)),
        )

    def _log(self, step: int, metrics: dict[str, float], phase: Any) -> None:
        with out_of_disk(self.folder.path):
            self.track.log(step, metrics, phase)
        self.display.update(step, metrics)

    def _log_episodes(self, step: int, episodes: list[Episode]) -> None:
        every = self.config.run.log_episodes
        if every and step % every == 0:
            with out_of_disk(self.folder.path):
                self.track.episodes(step, episodes)

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
            "parameters": sum(p.numel() for p in self.parts.policy.parameters()),
            "checkpoint": str(checkpoints(self.folder.checkpoints)[-1].path),
            "versions": versions(),
            "machine": machine(self.parts.policy.device),
        }
        self.folder.summary(values)
        return values


def train_recipe(
    recipe: str | Config, *overrides: str, quiet: bool = True, stream: TextIO | None = None
) -> dict[str, Any]:
    """Run a recipe to its end, or go on with one that was interrupted; returns its summary."""
    config = load_config(recipe, overrides) if isinstance(recipe, str) else recipe
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

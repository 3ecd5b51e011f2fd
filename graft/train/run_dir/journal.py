"""The records of a running run: metrics, alarms, episodes, and the batch of a failed step.

Of several processes only the first one writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from graft.config import Config
from graft.files import append_text, write_text
from graft.train.algorithm import preset_of
from graft.train.learner import Learner
from graft.train.monitor.alarms import Alarm, Alarms
from graft.train.monitor.display import Display
from graft.train.monitor.settings_check import compares_attempts
from graft.train.optimizer import NonFinite
from graft.train.rl import StepResult
from graft.train.run_dir.checkpoint import Checkpoint
from graft.train.run_dir.expert_loads import ExpertLoads
from graft.train.run_dir.fingerprint import StepRecord
from graft.train.run_dir.folder import RunFolder, RunStopped, out_of_disk
from graft.train.run_dir.metrics_log import MetricsLog
from graft.train.run_dir.token_log import write_learned
from graft.train.run_dir.trackers import Phase
from graft.trust.masking import mask, mask_values
from graft.types import Episode

ERRORS = "errors.log"
"""File of a run's folder: exceptions of environments and tools, with tracebacks."""
MAX_TRACES = 1000
"""Different ones that a process writes: a tool whose errors name a row each would fill the disk."""


class Journal:
    """Writes the records of one run; a context manager."""

    def __init__(self, folder: RunFolder, config: Config, display: Display, is_first: bool) -> None:
        self.folder, self.config, self.display, self.is_first = folder, config, display, is_first
        self.alarms = Alarms()
        self._metrics: MetricsLog | None = None
        self._traces: set[str] = set()
        self._loads = ExpertLoads(folder.path)

    def __enter__(self) -> Journal:
        if self.is_first:
            with out_of_disk(self.folder.path):
                settings = self.config.written()
                self._metrics = MetricsLog(self.folder.path, self.config.run.trackers, settings)
        return self

    def __exit__(self, *_: object) -> None:
        if self._metrics is not None:
            with out_of_disk(self.folder.path):
                self._loads.write()
            self._metrics.close()

    def resume(self, newest: Checkpoint | None, alarms: Mapping[str, Any], dtype: str) -> None:
        """Remove records after the checkpoint that the run resumes from; None: all records."""
        if self._metrics is not None:
            with out_of_disk(self.folder.path):
                if newest is None:
                    self._metrics.truncate_after("sft", -1)
                else:
                    self._metrics.truncate_after(newest.phase, newest.step)
        self.alarms = Alarms(
            dtype,
            staleness=self.config.rollout.staleness,
            max_grad_norm=self.config.train.max_grad_norm,
            is_grouped=bool(compares_attempts(preset_of(self.config))),
            state=alarms,
        )

    def warn(self, text: str, is_new: bool) -> None:
        """A warning about the run's settings; recorded for a new run, shown at every start."""
        if self._metrics is None:
            return
        if is_new:
            with out_of_disk(self.folder.path):
                warning = Alarm(0, "settings", "warn", text).to_json()
                self._metrics.alarm(warning | {"phase": "sft" if self.config.sft.is_on else "rl"})
        self.display.alarm(text, "warn")

    def log(self, step: int, metrics: dict[str, float], phase: Phase, failure: str = "") -> None:
        """Record a step's metrics and the alarms they raise; `failure` is the commonest failure."""
        if self._metrics is None:
            return
        with out_of_disk(self.folder.path):
            self._metrics.log(step, metrics, phase)
        self.display.update(step, metrics)
        for alarm in self.alarms.check(step, metrics, failure) if phase == "rl" else []:
            with out_of_disk(self.folder.path):
                self._metrics.alarm(alarm.to_json() | {"phase": phase})
            self.display.alarm(alarm.text, alarm.level, step)

    def experts(self, step: int, learner: Learner, phase: Phase) -> None:
        """Record how many tokens each expert got in a step."""
        if self._metrics is not None and learner.loads is not None:
            layers = learner.policy.shape.expert_layers
            with out_of_disk(self.folder.path):
                self._loads.add(phase, step, layers, learner.loads)

    def failures(self, when: str, episodes: Sequence[Episode]) -> None:
        """Append tracebacks of environments and tools to `errors.log`, each once."""
        if not self.is_first:
            return
        for episode in episodes:
            for span in episode.spans:
                trace = span.info.get("traceback")
                if not trace or trace in self._traces or len(self._traces) >= MAX_TRACES:
                    continue
                self._traces.add(trace)
                text = f"{when}, task {episode.task.id}: {span.info['error']}\n{trace}\n"
                if len(self._traces) == MAX_TRACES:
                    text += f"these are {MAX_TRACES} different ones; further ones are not written\n"
                with out_of_disk(self.folder.path):
                    append_text(self.folder.path / ERRORS, mask(text))

    def sync(self) -> None:
        """The records of all steps so far are on the disk."""
        if self._metrics is not None:
            with out_of_disk(self.folder.path):
                self._metrics.sync()

    def keeps_episodes(self, step: int) -> bool:
        every = self.config.run.log_episodes
        return bool(every) and step % every == 0

    def keep(
        self, step: int, episodes: list[Episode], learned: StepResult, record: StepRecord | None
    ) -> None:
        """Record episodes, advantages and log-probs, and the weights of a step: see `replay.replay`."""
        if self._metrics is None or record is None:
            return
        assert learned.logprobs is not None
        with out_of_disk(self.folder.path):
            self._metrics.episodes(step, episodes)
            write_learned(self.folder.path, step, episodes, learned.batch, learned.logprobs)
            record.write(self.folder.path)

    @contextmanager
    def evidence(self, step: int, episodes: list[Episode]) -> Iterator[None]:
        """Turn non-finite numbers into a RunStopped, after writing the batch to `failed/`; a RunStopped
        says where this step's tracebacks are."""
        try:
            yield
        except RunStopped as error:
            if not any("traceback" in span.info for one in episodes for span in one.spans):
                raise
            raise RunStopped(f"{error}, as does {self.folder.path / ERRORS}") from error
        except NonFinite as error:
            where = self.folder.path / "failed" / f"step_{step:06d}.jsonl"
            if self.is_first:
                with out_of_disk(self.folder.path):
                    where.parent.mkdir(exist_ok=True)
                    # not Episode.dumps, which refuses the NaN that has to be recorded
                    lines = [json.dumps(episode.to_json()) + "\n" for episode in episodes]
                    write_text(where, mask_values("".join(lines)))
            raise RunStopped(
                f"step {step}: {error}. The batch is in {where}; the last good checkpoint is intact. "
                "Lower train.lr or train.max_grad_norm, or look at the batch for extreme log-probs"
            ) from error

"""What a run does beside an RL step: logs, evaluations, checkpoints, the state of a resumption."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from graft.deadlines import waiting
from graft.files import POLL
from graft.rollout.collector import StalenessWindow
from graft.train.learner import Learner
from graft.train.learner_build import rates_of
from graft.train.phases.context import RunContext
from graft.train.phases.evaluation import evaluate_held_out
from graft.train.rl import StepResult
from graft.train.rollouts.step_rollouts import StepRollouts
from graft.train.run_dir.fingerprint import Prints, StepRecord, StepRecorder
from graft.train.step_metrics import commonest_failure
from graft.types import Episode


class RunHooks:
    """The hooks of one run; `done` is the last step whose update was made."""

    def __init__(
        self, run: RunContext, learner: Learner, done: int, window: StalenessWindow
    ) -> None:
        self.run, self.learner, self.done, self.window = run, learner, done, window
        self._recorder = StepRecorder(learner, run.config.train.steps, rates_of(run.config))
        self._clock = run.clock("rl")
        self._before: tuple[int, Prints] | None = None  # where the step is recorded
        self._record: StepRecord | None = None
        self._has_warned = False
        self.on_first: Callable[[Sequence[Episode]], None] | None = None
        """Gets the episodes of the first step before they are learned from."""

    def on_collect(self, step: int) -> None:
        self.run.processes.doing(f"sampling, step {step}")

    @contextmanager
    def learning(self, step: int, rollouts: StepRollouts) -> Iterator[None]:
        """An update is never interrupted; where it fails, the batch is kept as evidence."""
        run = self.run
        run.journal.failures(f"step {step}", rollouts.episodes)
        if self.on_first is not None:
            self.on_first(rollouts.episodes)
            self.on_first = None
        run.processes.doing(f"learning, step {step}")
        with run.interrupt.held(), run.journal.evidence(step, rollouts.episodes):
            self.learner.keeps_logprobs = run.journal.keeps_episodes(step)
            self._before = self._recorder.prints() if self.learner.keeps_logprobs else None
            yield

    def on_learned(self, step: int) -> None:
        self.done = step
        self._record = None if self._before is None else self._recorder.record(step, self._before)

    def on_published(self, step: int, rollouts: StepRollouts, result: StepResult) -> None:
        run, metrics = self.run, result.metrics
        run.state["cursor"] = rollouts.cursor
        run.state |= run.components.algo.state
        self._evaluate(step, metrics)
        self._warn_of_full_contexts(metrics)
        run.journal.log(step, metrics, "rl", commonest_failure(rollouts.episodes, none=""))
        run.journal.experts(step, self.learner, "rl")
        run.journal.keep(step, rollouts.episodes, result, self._record)
        self._clock()
        if run.is_save_due(step) or step == run.config.train.steps:
            run.save("rl", step, self.learner, self._ahead())

    def _ahead(self) -> dict[int, list[Episode]]:
        """Episodes of later steps: a resumed run learns from these, not from others of newer weights.

        A request to stop does not wait for them.
        """
        run, window = self.run, self.window
        if run.processes.world == 1:  # of several processes each takes part in an exchange
            with waiting("the episodes of later steps, for the checkpoint"):
                while not window.is_done and not run.interrupt.is_pending:
                    time.sleep(POLL)
            if not window.is_done:
                return {}
        return window.ahead()

    def _evaluate(self, step: int, metrics: dict[str, float]) -> None:
        run, every = self.run, self.run.config.run.eval_every
        run.state.pop("score", None)  # of earlier weights
        if every and step % every == 0:
            scores = evaluate_held_out(run, f"step {step}")
            metrics |= {f"eval/{name}": value for name, value in scores.items()}
            run.state["score"] = scores["sampled"]

    def _warn_of_full_contexts(self, metrics: dict[str, float]) -> None:
        """Warn once: attempts whose prompt leaves no room sample nothing and earn nothing."""
        share = metrics.get("rollout/no_room", 0.0)
        if share and not self._has_warned:
            self._has_warned = True
            self.run.display.note(
                f"{share:.0%} of the attempts of this step sampled no token: their prompts fill "
                f"rollout.max_context={self.run.config.rollout.max_context}; raise it, or leave such "
                "tasks out"
            )

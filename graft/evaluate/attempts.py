"""Numbered attempts at tasks, each reported when it ends: what an evaluation samples.

    todo   gsm:test:0 [0, 1, 2, 3]      none of its attempts is stored yet
           gsm:test:1 [2]               all but one are

Attempts at one task share its prompt. There is no barrier: when enough attempts have ended, at whatever
tasks, the next task begins.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from graft.evaluate.answer_measures import NOT, answer_measures
from graft.evaluate.samples import StoredSample
from graft.rewards.answers import in_words, last_answer
from graft.rewards.judge.judge import NOT_ATTEMPTED
from graft.rollout.episode_builder import EpisodeBuilder
from graft.rollout.event_loop import run
from graft.rollout.failure import CommonMistake, RolloutFailure, concurrently, together
from graft.rollout.live_trajectory import LiveTrajectory
from graft.rollout.setup import ProgramAttempt, RolloutSetup
from graft.types import Author, Episode, Status, Task

Todo = tuple[Task, Sequence[int]]
"""A task, and the numbers of the attempts to make."""


class Attempts(EpisodeBuilder):
    """An episode builder whose caller numbers the trajectories; the numbers seed their draws."""

    async def start(self, number: int) -> LiveTrajectory:
        assert self._prompt is not None, "call open() first"
        env = await self.fresh_env()
        trajectory = LiveTrajectory(self, number, self._prompt.fork(self.key(number)), env, tip=0)
        self.trajectories.append(trajectory)
        return trajectory

    async def sample(self, number: int) -> StoredSample:
        """Make attempt `number`."""
        started = time.perf_counter()
        one = await self.start(number) if self.programs is None else self.programs.attempt(number)
        await one.finish()
        if (failure := getattr(one, "failure", None)) is not None:
            self.on_failure(failure)
        episode = self.episode if self.programs is None else self.programs.episode()
        return self._sample_of(one, episode, time.perf_counter() - started)

    def failed(self, number: int, failure: RolloutFailure) -> StoredSample:
        """The task could not be posed."""
        task = self.episode.task
        source = task.data_source or task.env
        status, error = str(failure.status), str(failure)
        return StoredSample(task.id, task.seed, number, source, status=status, error=error)

    def _sample_of(
        self, attempted: LiveTrajectory | ProgramAttempt, episode: Episode, seconds: float
    ) -> StoredSample:
        leaf, spans, task = attempted.leaf, episode.spans, episode.task
        assert leaf is not None, "call finish() first"
        contexts = [[spans[i] for i in episode.walk(tip)] for tip in leaf.tips]
        written = [span for one in contexts for span in one if span.author is not Author.TASK]
        prompt = [span for span in contexts[0] if span.author is Author.TASK]
        turns = [span for span in written if span.author is Author.POLICY]
        is_done = leaf.status is Status.DONE
        answer = last_answer(turns[-1].text) if turns and is_done else ""
        # a server counts its own tokens
        counted: int | None = getattr(getattr(attempted, "context", None), "sampled", None)
        return StoredSample(
            task=task.id,
            seed=task.seed,
            sample=attempted.number,
            source=task.data_source,
            text="".join(span.text for span in written),
            answer=answer,
            reward=leaf.reward if leaf.status.is_trainable else 0.0,
            status=str(leaf.status),
            prompt_tokens=sum(map(len, prompt)),
            tokens=sum(map(len, turns)) if counted is None else counted,
            tool_calls=int(leaf.metrics.get("tool_calls", 0)),
            tools=calls_by_tool(leaf.metrics),
            measures=answer_measures(in_words(answer), task.answer) | graded(leaf.metrics),
            seconds=round(seconds, 3),
            error=str(spans[leaf.tips[-1]].info.get("error", "")),
        )


def graded(metrics: Mapping[str, float]) -> dict[str, float]:
    """Whether the judge found no attempt at an answer, of a judge with SimpleQA's grades."""
    return {NOT: metrics[NOT_ATTEMPTED]} if NOT_ATTEMPTED in metrics else {}


def calls_by_tool(metrics: Mapping[str, float]) -> dict[str, int]:
    """
    >>> calls_by_tool({"tools/python/calls": 2.0, "tools/python/failures": 1.0, "turns": 3.0})
    {'python': 2}
    """
    parts = ((name.split("/"), value) for name, value in metrics.items())
    return {
        name[1]: int(value)
        for name, value in parts
        if len(name) == 3 and (name[0], name[2]) == ("tools", "calls")
    }


async def attempt(
    task: Task,
    numbers: Sequence[int],
    setup: RolloutSetup,
    on_sample: Callable[[StoredSample], None],
    on_failure: Callable[[RolloutFailure], None] = lambda failure: None,
) -> None:
    """The attempts at one task; `on_sample` is called with each when it ends."""
    builder = Attempts(task, setup)
    builder.on_failure = on_failure
    async with builder:
        try:
            await builder.open()
        except RolloutFailure as failure:
            on_failure(failure)
            for number in numbers:
                on_sample(builder.failed(number, failure))
            return

        async def run_attempt(number: int) -> None:
            try:
                sample = await builder.sample(number)
            except RolloutFailure as failure:  # its environment could not be copied
                on_failure(failure)
                sample = builder.failed(number, failure)
            on_sample(sample)

        await concurrently(run_attempt, numbers)


def make_attempts(
    todo: Iterable[Todo],
    setup: RolloutSetup,
    on_sample: Callable[[StoredSample], None],
    *,
    at_a_time: int = 256,
) -> None:
    """Make all attempts, `at_a_time` at once. An exception of `on_sample` ends the evaluation."""
    mistakes, statuses = CommonMistake(), set[Status]()

    async def everyone() -> None:
        free = asyncio.Semaphore(at_a_time)

        async def run_task(task: Task, numbers: Sequence[int], places: int) -> None:
            remaining = len(numbers)

            def on_end(sample: StoredSample) -> None:
                nonlocal remaining
                remaining -= 1
                if (
                    remaining < places
                ):  # a task with more attempts than the limit takes the whole limit
                    free.release()
                statuses.add(Status(sample.status))
                on_sample(sample)

            await attempt(task, numbers, setup, on_end, mistakes.note)

        async with together() as group:
            for task, numbers in todo:
                places = min(len(numbers), at_a_time)
                for _ in range(places):
                    await free.acquire()
                group.create_task(run_task(task, numbers, places))

    run(everyone)
    mistakes.check(statuses)

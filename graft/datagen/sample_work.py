"""Sample the attempts at tasks that a log lacks, and record them there."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graft.config import Config
from graft.datagen.accepted_rows import Row, why_dead
from graft.datagen.attempt_log import AttemptLog
from graft.evaluate.evaluator import DOWN_AFTER, is_servers_fault
from graft.evaluate.model_source import EndpointSpec
from graft.rollout.branches.branch import independent
from graft.rollout.collect import build_episode
from graft.rollout.failure import concurrently
from graft.rollout.options import RolloutOptions
from graft.rollout.recorded import NotRecordable, outcome_of, prompt_of_context, spans_of_attempt
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.train.errors import RunStopped
from graft.train.step_metrics import is_dead
from graft.train.tasks import TRAIN_SEEDS, TaskStream
from graft.types import Author, Episode, Finish, Message, Trajectory

ENOUGH_FAILURES = 64
"""Attempts after which a tool or environment counts as broken if none ended."""
SECONDS_BETWEEN_NEWS = 10.0


class SampleWork:
    """Samples what is missing, and records each task when its attempts have ended."""

    def __init__(
        self,
        config: Config,
        setup: RolloutSetup,
        log: AttemptLog,
        tools: Mapping[str, Any],
        tasks: int,
        say: Callable[[str], None],
        server: EndpointSpec | None = None,
    ) -> None:
        self.config, self.setup, self.server = config, setup, server
        self.log, self.tools, self.tasks, self.say = log, tools, tasks, say
        self.lost_in_a_row = 0
        self.statuses, self.errors = Counter[str](), Counter[str]()
        self.news = time.monotonic() + SECONDS_BETWEEN_NEWS

    def sample(self, todo: Sequence[int], options: RolloutOptions) -> None:
        """Attempt the tasks of these numbers; the options have their temperature and seed."""
        samples, seed = options.samples or 1, options.seed or 0
        config, branch = self.config, independent(samples)
        sampling = replace(self.setup.sampling, **options.draws)
        # step 0, which no run has: separate draws
        setup = replace(self.setup, sampling=sampling, salt=seed * TRAIN_SEEDS, self_play=False)
        at_a_time = config.rollout.concurrency
        if self.server is not None:  # each attempt is a request
            at_a_time = max(1, at_a_time // samples)

        async def sample_task(number: int) -> None:
            task = next(TaskStream(config.task.envs, seed, cursor=number))
            self.note(number, await build_episode(task, setup, branch))

        asyncio.run(concurrently(sample_task, todo, at_a_time))

    def note(self, number: int, episode: Episode) -> None:
        """Record the attempts at a task."""
        attempts = self._attempts(episode)
        task = episode.task
        known = self.tools.get(task.env)
        tools = {"tools": known} if known else {}
        about = {"seed": task.seed, "data_source": task.data_source or task.env}
        prompt = {"messages": list(task.prompt), **tools}
        self.log.append(number, {**about, **prompt, "attempts": attempts})
        self.statuses.update(attempt["status"] for attempt in attempts)
        self.errors.update(attempt["error"] for attempt in attempts if "error" in attempt)
        if self.server is not None:
            self._stop_if_down(attempts)
        if self.statuses.total() >= ENOUGH_FAILURES and is_dead(self.statuses.elements()):
            raise RunStopped(why_dead(self.errors))
        if time.monotonic() > self.news:
            self.say(f"{len(self.log.places):,} of {self.tasks:,} tasks")
            self.news = time.monotonic() + SECONDS_BETWEEN_NEWS

    def _stop_if_down(self, attempts: Iterable[Row]) -> None:
        for attempt in attempts:
            error = attempt.get("error", "")
            is_lost = is_servers_fault(attempt["status"], error)
            self.lost_in_a_row = self.lost_in_a_row + 1 if is_lost else 0
            if self.lost_in_a_row >= DOWN_AFTER:
                raise RunStopped(
                    f"{DOWN_AFTER} attempts in a row were lost, the last to: {error}. Once the server "
                    "is back, the same command with --resume completes the rest"
                )

    def _attempts(self, episode: Episode) -> list[Row]:
        found: list[Row] = []
        for number, leaf in enumerate(episode.leaves):
            rows = [row for row in episode.trajectories() if row.leaf_index == number]
            attempt: Row = {"sample": number, **outcome_of(rows, leaf)}
            if not leaf.status.is_trainable:
                attempt["error"] = str(episode.spans[leaf.tips[-1]].info.get("error", leaf.status))
                found.append(attempt)
                continue
            try:
                attempt["contexts"] = [
                    self._context(row)
                    for row in rows
                    if any(span.author is Author.POLICY for span in row.spans)
                ]
            except NotRecordable as error:
                attempt["unwritable"] = str(error)
            found.append(attempt)
        return found

    def _context(self, row: Trajectory) -> Row:
        chat, actions = self.setup.chat, self.setup.actions
        if self.server is not None and self.server.api == "chat":
            return {"messages": conversation_of(row, chat)}
        own_prompt = {"messages": prompt_of_context(row)} if row.context else {}
        return {**own_prompt, "spans": spans_of_attempt(row, chat, actions)}


def conversation_of(row: Trajectory, chat: Chat) -> list[Message]:
    """Prompt and answers as messages. A truncated answer cannot be expressed as a message."""
    if any(span.info.get("finish") == Finish.LENGTH for span in row.spans):
        raise NotRecordable("it was truncated, and as a message it would train an early end")
    messages = prompt_of_context(row)
    for span in spans_of_attempt(row, chat):
        role = "assistant" if span["author"] == "policy" else span.get("role", "user")
        messages.append({"role": role, "content": span["text"]})
    return messages

"""Checks of a recipe's environments that need no model: prompts, rewards, cheats, tools, copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any

from graft.config import Config
from graft.doctor.cheats import cheat_check
from graft.doctor.isolation import isolation_check
from graft.doctor.rewards import TRIES, RewardTrial, reward_check
from graft.doctor.tools import tool_checks
from graft.envs.base import as_messages
from graft.rewards import make_reward
from graft.text.chat import Chat
from graft.train.build import env_factory
from graft.train.leakage import held_out_check, run_leakage
from graft.train.monitor.check import FAIL, PASS, WARN, Check
from graft.train.tasks import TaskStream
from graft.types import Task
from graft.user_code import source_of

TOOL_DEADLINE = 60.0
REWARDED, JUDGED = 8, 2
"""Tasks that the reward is tried on; fewer for a reward that calls a service, such as a judge."""
CHEATED = 8
"""Tasks that every cheat is played on."""


class EnvChecks:
    """The environments of a recipe, each checked on its first tasks."""

    def __init__(self, config: Config, chat: Chat) -> None:
        self.config, self.chat = config, chat

    @property
    def make_env(self) -> Callable[[Task], Any]:
        return env_factory(self.config, self.chat.tokenizer)

    def prompts(self) -> Iterator[Check]:
        """Each environment poses a task, and its prompt leaves space for an answer."""
        for task in first_tasks(self.config, 1):
            yield self._first_prompt(task)

    def held_out(self) -> Iterator[Check]:
        """Held-out tasks are not those of training."""
        held_out = env_factory(self.config, self.chat.tokenizer, held_out=True)
        found = run_leakage(self.config, self.make_env, held_out)
        yield from filter(None, [held_out_check(found)])

    def rewards(self) -> Iterator[Check]:
        """Right answers earn more than garbage."""
        for config, trial in self._trials():
            number, tries = (JUDGED, 1) if asks_a_service(trial.reward) else (REWARDED, TRIES)
            check = reward_check(trial, first_tasks(config, number), config.sft.demo_args, tries)
            yield self._named(check, config.task.label)

    def cheats(self) -> Iterator[Check]:
        """Answers that know nothing earn nothing."""
        for config, trial in self._trials():
            if asks_a_service(trial.reward):
                seen = "not played: the reward asks a service, and each of a hundred answers costs a request"
                check = Check("cheats", PASS, seen)
            else:
                check = cheat_check(trial, first_tasks(config, CHEATED))
            yield self._named(check, config.task.label)

    def tools(self) -> Iterator[Check]:
        """Every tool answers a call."""
        deadline = min(TOOL_DEADLINE, self.config.rollout.deadline)
        for task in first_tasks(self.config, 1):
            for check in tool_checks(self.make_env(task), deadline, task.seed):
                yield self._named(check, task.env)

    def isolation(self) -> Iterator[Check]:
        """Copies of an environment share nothing that changes."""
        for task in first_tasks(self.config, 1):
            yield self._named(isolation_check(self.make_env, task), task.env)

    def _first_prompt(self, task: Task) -> Check:
        chat, rollout = self.chat, self.config.rollout
        with closing(self.make_env(task)) as env:
            observation, info = env.reset(task.seed)
            if env.observe_as == "raw":
                length = len(chat.encode(str(observation), is_start=True))
            else:
                length = len(chat.prompt(as_messages(observation), info.get("tools")))
        most = rollout.max_context
        seen = f"{task.env}: its first prompt has {length:,} tokens of {most:,}"
        if length + rollout.max_tokens <= most:
            return Check("env", PASS, seen)
        way_out = f"raise rollout.max_context={most} (a turn may have {rollout.max_tokens:,})"
        return Check("env", FAIL if length >= most else WARN, seen, way_out)

    def _trials(self) -> Iterator[tuple[Config, RewardTrial]]:
        """Each environment's own recipe and reward."""
        for config in self.config.of_each_env():
            reward = make_reward(config.task.reward) if config.task.reward else None
            yield config, RewardTrial(self.make_env, reward, self.chat, config.rollout.max_turns)

    def _named(self, check: Check, env: str) -> Check:
        """The check with the name of its environment, if there are several."""
        several = len(self.config.task.envs) > 1
        return check._replace(seen=f"{env}: {check.seen}") if several else check


def first_tasks(config: Config, count: int) -> list[Task]:
    """The first tasks of each environment."""
    streams = [TaskStream([item], config.run.seed) for item in config.task.envs]
    return [task for stream in streams for task in islice(stream, count)]


def asks_a_service(reward: Any) -> bool:
    """Whether a reward waits for others, as a judge does; bundled ones that only compute do not."""
    parts = [one.reward for one in getattr(reward, "components", ())] or [reward]
    ours = ("graft.rewards.answers", "graft_envs.code.grading")
    return any(
        getattr(one, "blocking", False) and getattr(source_of(one), "__module__", "") not in ours
        for one in parts
    )

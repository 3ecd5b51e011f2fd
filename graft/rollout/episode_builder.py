"""Build one episode: pose the task, start trajectories from its prompt, settle their leaves.

Sampled tokens are never re-encoded, and within a context tokens are only appended.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graft.envs.base import BaseEnv
from graft.envs.checked import as_info, as_reset
from graft.protocols import Context, Env, Observation
from graft.rollout.demonstration import decided
from graft.rollout.episode_draft import EpisodeDraft
from graft.rollout.failure import RolloutFailure, boundary
from graft.rollout.live_trajectory import LiveTrajectory
from graft.rollout.match import Match, frozen_drafts, match_of
from graft.rollout.setup import ProgramAttempt, ProgramGroup, RolloutSetup
from graft.rollout.user_calls import agent_host, call, fork_env, info_of_reset, try_close
from graft.types import Author, Leaf, Message, Span, Task
from graft.user_code import UserCodeError, UserObject, check_json


class EnvUnavailable(BaseEnv):
    """Stands for an environment that could not be made."""

    env_id = "none"


class EpisodeBuilder(EpisodeDraft):
    """An episode in progress: its prompt is open, and trajectories start from it.

    `index` is the position of the task among those that are attempted together.
    """

    def __init__(self, task: Task, setup: RolloutSetup, index: int = 0) -> None:
        super().__init__(task, setup.for_task(task))
        self.index = index
        self.trajectories: list[LiveTrajectory] = []
        self.has_machine = False
        """Whether commands of agents run on a machine of the environment."""
        self.is_match = False
        """Whether an attempt is a game in which every seat has a trajectory of its own."""
        self.num_matches = 0
        self._env: Env | None = None
        self._prompt: Context | None = None
        self._tip = 0  # the last span that all trajectories share
        self._frozen: dict[str, EpisodeDraft] = {}
        self.programs: ProgramGroup | None = None
        """Where programs attempt the task: their attempts."""
        self.program_attempts: list[ProgramAttempt] = []
        self._num_programs = 0

    async def __aenter__(self) -> EpisodeBuilder:
        return self

    async def __aexit__(self, *error: object) -> None:
        for trajectory in self.trajectories:
            trajectory.close()
        if self._prompt is not None:
            self._prompt.close()
        for draft in (self, *self._frozen.values()):
            draft.close_prompts()
        if self.programs is not None:
            self.programs.close()
        if self._env is not None:
            try_close(self._env)

    async def open(self) -> None:
        """Pose the task and write its prompt, the root of the tree; programs write their own prompts."""
        observation, messages, info = await self._pose()
        if self.setup.agent is not None:
            posed = self.episode.task, self.setup, self.fresh_env
            self.programs = self.setup.agent.open(*posed, has_machine=self.has_machine)
        elif not self.is_match:
            async with boundary(f"env {self.episode.task.env} prompt", self.setup.deadline):
                tokens = self._prompt_tokens(observation, messages, info)
            text = "".join(str(message.get("content") or "") for message in messages)
            self._open_prompt(tokens, text)

    async def _pose(self) -> tuple[Observation, list[Message], dict[str, Any]]:
        """Reset the environment; the task then has its prompt and answer."""
        setup, task = self.setup, self.episode.task
        async with boundary(f"env {task.env} reset", setup.deadline):
            self._env = setup.make_env(task)
            who = UserObject(self._env, "env", "reset")
            observation, info = as_reset(await call(self._env, self._env.reset, task.seed), who)
            for key in ("answer", "meta", "data_source"):
                check_json(info.get(key), who, f"info[{key!r}]")
            meta = as_info(info.get("meta"), who)
        host = None if setup.agent is None else agent_host(self._env)
        if host is not None:
            self.has_machine, observation = True, host.prompt  # an agent has tools of its own
        messages = (
            [{"role": "user", "content": setup.chat.visible(observation)}]
            if isinstance(observation, str)
            else list(observation)
        )
        self.episode.task = replace(
            task,
            prompt=tuple(messages),
            answer=info.get("answer", task.answer),
            data_source=info.get("data_source") or task.data_source or task.env,
            meta={**task.meta, **meta},
        )
        self.info = info_of_reset(info)
        if setup.self_play and match_of(self._env) is not None:
            if setup.start:
                raise UserCodeError(
                    f"attempts that begin in mode {setup.start!r} have one prompt, and env {task.env!r} has "
                    "one per seat; leave the starting mode out, or set self_play=False in task.args"
                )
            if setup.agent is not None:
                raise UserCodeError(
                    f"env {task.env!r} is a game of several seats, which agents of task.agent cannot play; "
                    "leave task.agent out, or set self_play=False in task.args"
                )
            self.is_match, self._frozen = True, frozen_drafts(self)
        return observation, messages, info

    def _prompt_tokens(
        self, observation: Observation, messages: list[Message], info: dict[str, Any]
    ) -> list[int]:
        assert self._env is not None
        who = UserObject(self._env, "env", "reset")
        try:
            if self._env.observe_as == "raw":  # a wrapper has put it through the chat template
                tokens, _ = self.prompt_tokens(str(observation))
            else:
                self.tools = info.get("tools")
                tokens, self.transcript = self.prompt_tokens(messages)
        except ValueError as error:
            row = getattr(getattr(self._env, "unwrapped", self._env), "where", "")
            what = f"the prompt of {who}" + (f" ({row})" if row else "")
            raise UserCodeError(f"{what} cannot be written: {error}") from error
        if not tokens:
            raise UserCodeError(f"the prompt of {who} is empty; there is nothing to continue")
        return tokens

    def _open_prompt(self, tokens: list[int], text: str) -> None:
        """The root span and the context that all trajectories fork."""
        setup = self.setup
        self.episode.append(Span(None, Author.TASK, tokens, text=text))
        self._prompt = setup.engine.open(tokens)
        if setup.start and setup.actions is not None:
            entry = setup.actions.entry(setup.start)
            text = setup.chat.tokenizer.decode_after(entry.tokens, tokens[-1])
            span = decided(0, entry, text, skip=len(entry.tokens))
            span.version, span.info = setup.engine.version, {"forced": setup.start}
            self._tip = self.episode.append(span)
            self._prompt.append(entry.tokens)
            self._prompt.mode = entry.mode

    @property
    def num_attempts(self) -> int:
        """Attempts at the task, without twins and without one that is sampled in another way."""
        own = sum(one.twin_of is None and one.sampling is None for one in self.trajectories)
        return self.num_matches or len(self.program_attempts) or own

    async def attempt(self) -> LiveTrajectory | Match | ProgramAttempt:
        """A new attempt from the start, to be finished: a trajectory, a game with all its seats, or what
        a program does."""
        if self.programs is not None:
            return self.start_program()
        if not self.is_match:
            return await self.root()
        async with boundary(f"env {self.episode.task.env} reset", self.setup.deadline):
            env = self.setup.make_env(self.episode.task)
        self.num_matches += 1
        return Match(self, self._frozen, self.num_matches - 1, env, self.trajectories)

    def start_program(
        self, source: ProgramAttempt | None = None, num_replayed: int = 0
    ) -> ProgramAttempt:
        """A new attempt of a program, to be finished: from the start, or a fork of `source` that repeats
        its first calls."""
        assert self.programs is not None, "open() comes first"
        number, self._num_programs = self._num_programs, self._num_programs + 1
        if source is None:
            made = self.programs.attempt(number)
        else:
            made = self.programs.fork(number, source, num_replayed)
        self.program_attempts.append(made)
        return made

    def drop_program(self, attempt: ProgramAttempt) -> None:
        """Take out a fork that was given up."""
        assert self.programs is not None
        self.programs.drop(attempt)
        self.program_attempts.remove(attempt)

    async def root(self, purpose: str = "") -> LiveTrajectory:
        """A new trajectory from the prompt, which is computed once for all of them.

        Where its environment cannot be made, the trajectory has ended already, with the reason.
        """
        assert self._prompt is not None, "open() comes first"
        failure: RolloutFailure | None = None
        try:
            env = await self.fresh_env()
        except RolloutFailure as error:
            env, failure = EnvUnavailable(), error
        trajectory = self.add(
            self._prompt.fork(self.key(len(self.trajectories), purpose)), env, self._tip
        )
        if failure is not None:
            self.on_failure(failure)
            failure.write(self.episode.spans[0].info)
            await trajectory.end(failure.status)
        return trajectory

    def add(self, context: Context, env: Env, tip: int) -> LiveTrajectory:
        """One more trajectory, which continues span `tip`; leaves are in the order of their numbers."""
        trajectory = LiveTrajectory(self, len(self.trajectories), context, env, tip)
        self.trajectories.append(trajectory)
        return trajectory

    async def fork(self, trajectory: LiveTrajectory) -> LiveTrajectory:
        """A second trajectory with the same past, independent from here on."""
        env = await fork_env(trajectory.env, self.setup, self.episode.task, trajectory.actions)
        twin = trajectory.copy(len(self.trajectories), env)
        self.trajectories.append(twin)
        return twin

    async def fresh_env(self) -> Env:
        """The environment as it posed the task, before any turn."""
        assert self._env is not None, "open() comes first"
        return await fork_env(self._env, self.setup, self.episode.task, actions=[])

    def cut(self, tip: int, at: int) -> int:
        """The last span of the first `at` tokens on the way to `tip`; a span that is longer is split.

        [0 "ab" <- 1 "cdef"], cut(1, 4): 1, now "cd" and followed by 2 "ef"; cut(1, 2): 0, as it is
        """
        spans, last, end = self.episode.spans, 0, 0
        for index in self.episode.walk(tip):
            start, end = end, end + len(spans[index])
            if start < at < end:
                self._split(index, at - start)
                return index
            if end > at:
                break
            last = index
        return last

    def settle(self) -> None:
        """Leaves in the order in which their trajectories began, or of their seats."""
        if self.programs is not None:
            self.episode = self.programs.episode()
            for one in self.program_attempts:
                if one.failure is not None:
                    self.on_failure(one.failure)
            return
        ordered = sorted(self.trajectories, key=lambda one: one.number)
        leaves = {one: one.leaf for one in ordered if one.leaf is not None}
        self.episode.leaves = [*leaves.values()]
        for trajectory, leaf in leaves.items():
            if trajectory.twin_of is not None:
                leaf.twin = [*leaves].index(trajectory.twin_of)

    def _split(self, index: int, at: int) -> None:
        """`Episode.split`, with the tips of all trajectories corrected: later spans move by one."""
        span, decode = self.episode.spans[index], self.setup.chat.tokenizer.decode_after
        before = [] if span.parent is None else self.episode.spans[span.parent].tokens
        head = decode(span.tokens[:at], before[-1] if before else None)
        fits = span.text.startswith(head)  # not where the cut goes through a character
        tail = span.text[len(head) :] if fits else decode(span.tokens[at:], span.tokens[at - 1])
        self.episode.split(index, at, (head, tail))
        for trajectory in self.trajectories:
            trajectory.tip += trajectory.tip >= index
            trajectory.past = [tip + (tip >= index) for tip in trajectory.past]
            if trajectory.leaf is not None:
                trajectory.leaf.tips = (*trajectory.past, trajectory.tip)

    def fail(self, failure: RolloutFailure) -> None:
        """The task itself could not be posed: one leaf holds the reason."""
        if not self.episode.spans:
            self.episode.append(Span(None, Author.TASK, []))
        failure.write(self.episode.spans[0].info)
        self.episode.leaves.append(Leaf((0,), status=failure.status))

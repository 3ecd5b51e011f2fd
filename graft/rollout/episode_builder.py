"""Grow one episode: a tree whose paths sample, act, and fork.

A path is a live attempt: an engine context, an environment, and the last span it wrote. One turn of
it samples until the policy stops, hands the text to the environment, and appends the answer. What
was sampled is never re-encoded; the context only ever grows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from graft.actions.actions import Actions
from graft.envs.base import BaseEnv
from graft.protocols import Context, Engine, Env, Reward
from graft.rollout.failure import RolloutFailure, boundary
from graft.rollout.last_info import info_of_reset
from graft.rollout.live_trajectory import LiveTrajectory, call, close_env, fork_env
from graft.text.chat import TEMPLATE, Chat
from graft.text.transcript import Transcript
from graft.types import Author, Episode, Leaf, Message, Sampling, Span, Task
from graft.user_code import Giver, UserCodeError, as_info, as_posed, check_json


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """Where episodes take place, and within what limits."""

    engine: Engine
    chat: Chat
    make_env: Callable[[Task], Env]
    sampling: Sampling
    reward: Reward | None = None
    """None takes the environment's own rewards, summed over the turns."""
    max_turns: int = 8
    max_context: int = 4096
    deadline: float = 600.0
    """Seconds any single wait may take: one completion, one answer of an environment."""
    salt: int = 0
    """Makes the draws of this step differ from those of another; see `draw_key`."""
    actions: Actions | None = None
    """None: calls are text that the environment has to find."""
    prefill: str = ""
    """What every answer begins with; part of the prompt, so never trained."""
    samples: int | None = None
    """Attempts that a branch has to grow, twins aside; None: as many as it likes."""


def draw_key(salt: int, task: str, path: int) -> int:
    """64 bits that name a path's random draws, whatever runs beside it and in whatever order."""
    return int.from_bytes(blake2b(f"{salt}/{task}/{path}".encode(), digest_size=8).digest(), "big")


class EnvUnavailable(BaseEnv):
    """In the place of an environment that could not be made."""

    env_id = "none"


class EpisodeBuilder:
    """An episode while it grows: its prompt is open, paths start from it.

    `place` is the task's among those that are attempted together.
    """

    def __init__(self, task: Task, setup: RolloutSetup, place: int = 0) -> None:
        self.setup, self.place = setup, place
        self.episode = Episode(task)
        self.paths: list[LiveTrajectory] = []
        self.tools: Any = None
        """Schemas that the chat template shows in every prompt of this task."""
        self.info: Mapping[str, Any] = {}
        """What the environment said beside the task."""
        self.keep_open = False
        """True: contexts of ended paths stay open, for a branch that forks in the past."""
        self.transcript: Transcript | None = None
        """The prompt, where the chat template is followed to the letter."""
        self._env: Env | None = None
        self._prompt: Context | None = None

    async def __aenter__(self) -> EpisodeBuilder:
        return self

    async def __aexit__(self, *error: object) -> None:
        for path in self.paths:
            path.close()
        if self._prompt is not None:
            self._prompt.close()
        if self._env is not None:
            close_env(self._env)

    async def open(self) -> None:
        """Pose the task and write its prompt, the root of the tree."""
        setup, task = self.setup, self.episode.task
        async with boundary(f"env {task.env} reset", setup.deadline):
            self._env = setup.make_env(task)
            who = Giver(self._env, "env", "reset")
            observation, info = as_posed(await call(self._env, self._env.reset, task.seed), who)
            for key in ("answer", "meta", "data_source"):
                check_json(info.get(key), who, f"info[{key!r}]")
            meta = as_info(info.get("meta"), who)
        messages = (
            [{"role": "user", "content": observation}]
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
        try:
            if self._env.observe_as == "raw":  # a wrapper has put it through the chat template
                tokens, _ = self.begin(str(observation))
            else:
                self.tools = info.get("tools")
                tokens, self.transcript = self.begin(messages)
        except ValueError as error:
            raise UserCodeError(f"the prompt of {who} cannot be written: {error}") from error
        if not tokens:
            raise UserCodeError(f"the prompt of {who} is empty; there is nothing to continue")
        text = "".join(str(message.get("content") or "") for message in messages)
        self.episode.append(Span(None, Author.TASK, tokens, text=text))
        self._prompt = setup.engine.open(tokens)

    def begin(
        self, prompt: str | list[Message], tools: Any = None
    ) -> tuple[list[int], Transcript | None]:
        """The tokens of a prompt and of what the answer begins with; a text is already rendered.

        `tools` are those of a prompt that brings its own; an empty list is none.
        """
        chat, prefill = self.setup.chat, self.setup.prefill
        if isinstance(prompt, str):
            return chat.prefilled(chat.tokenizer.encode(prompt), prefill), None
        offered = self.tools if tools is None else tools or None
        tokens = chat.prefilled(chat.prompt(prompt, offered), prefill)
        if chat.history != TEMPLATE:
            return tokens, None
        return tokens, Transcript.of(chat, prompt, offered, tokens, prefill)

    async def root(self, purpose: str = "") -> LiveTrajectory:
        """A new path from the prompt; the prompt is computed once however many there are.

        Where its environment cannot be made, the path is a leaf already, and says why.
        """
        assert self._prompt is not None, "open() comes first"
        failure: RolloutFailure | None = None
        try:
            env = await self.fresh_env()
        except RolloutFailure as error:
            env, failure = EnvUnavailable(), error
        path = self.add(self._prompt.fork(self.key(len(self.paths), purpose)), env, tip=0)
        if failure is not None:
            failure.write(self.episode.spans[0].info)
            await path.end(failure.status)
        return path

    async def fresh_env(self) -> Env:
        """The environment as it posed the task, before any turn."""
        assert self._env is not None, "open() comes first"
        return await fork_env(self._env, self.setup, self.episode.task, actions=[])

    def key(self, path: int, purpose: str = "") -> int:
        """Names the draws of a path; other draws than its tokens have a purpose of their own."""
        return draw_key(self.setup.salt, self.episode.task.id + purpose, path)

    def add(self, context: Context, env: Env, tip: int) -> LiveTrajectory:
        """One more path; it goes on behind span `tip`."""
        path = LiveTrajectory(self, len(self.paths), context, env, tip)
        self.paths.append(path)
        return path

    def cut(self, tip: int, at: int) -> int:
        """The last span of the first `at` tokens on the way to `tip`; one that goes on is split.

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
        """Leaves in the order their paths began, whoever finished first."""
        ended = [path for path in self.paths if path.leaf is not None]
        self.episode.leaves = [path.leaf for path in ended if path.leaf is not None]
        for path in ended:
            if path.leaf is not None and path.twin_of is not None:
                path.leaf.twin = ended.index(path.twin_of)

    def _split(self, index: int, at: int) -> None:
        """`Episode.split`, and every path still knows where it stands: later spans move up by one."""
        span, decode = self.episode.spans[index], self.setup.chat.tokenizer.decode_after
        before = [] if span.parent is None else self.episode.spans[span.parent].tokens
        head = decode(span.tokens[:at], before[-1] if before else None)
        fits = span.text.startswith(head)  # not where the cut goes through a character
        tail = span.text[len(head) :] if fits else decode(span.tokens[at:], span.tokens[at - 1])
        self.episode.split(index, at, (head, tail))
        for path in self.paths:
            path.tip += path.tip >= index
            path.past = [tip + (tip >= index) for tip in path.past]
            if path.leaf is not None:
                path.leaf.tips = (*path.past, path.tip)

    def fail(self, failure: RolloutFailure) -> None:
        """The task itself could not be posed: one leaf says so."""
        if not self.episode.spans:
            self.episode.append(Span(None, Author.TASK, []))
        failure.write(self.episode.spans[0].info)
        self.episode.leaves.append(Leaf((0,), status=failure.status))

"""Grow one episode: a tree whose paths sample, act, and fork.

A path is a live attempt: an engine context, an environment, and the last span it wrote. One turn of
it samples until the policy stops, hands the text to the environment, and appends the answer. What
was sampled is never re-encoded; the context only ever grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from graft.protocols import Context, Engine, Env, Reward
from graft.rollout.failure import Failure, boundary
from graft.rollout.threads import in_thread
from graft.text.chat import Chat
from graft.types import (
    Author,
    Episode,
    Finish,
    Leaf,
    Sampling,
    Span,
    Status,
    Task,
    Trajectory,
    Turn,
)


@dataclass(frozen=True, slots=True)
class Setting:
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


def draw_key(salt: int, task: str, path: int) -> int:
    """64 bits that name a path's random draws, whatever runs beside it and in whatever order."""
    return int.from_bytes(blake2b(f"{salt}/{task}/{path}".encode(), digest_size=8).digest(), "big")


class Growth:
    """An episode while it grows: its prompt is open, paths start from it."""

    def __init__(self, task: Task, setting: Setting) -> None:
        self.setting = setting
        self.episode = Episode(task)
        self.paths: list[Path] = []
        self.tools: Any = None
        """Schemas that the chat template shows in every prompt of this task."""
        self._env: Env | None = None
        self._prompt: Context | None = None

    async def __aenter__(self) -> Growth:
        return self

    async def __aexit__(self, *error: object) -> None:
        for path in self.paths:
            path.close()
        if self._prompt is not None:
            self._prompt.close()
        if self._env is not None:
            self._env.close()

    async def open(self) -> None:
        """Pose the task and write its prompt, the root of the tree."""
        setting, task = self.setting, self.episode.task
        async with boundary(f"env {task.env} reset", setting.deadline):
            self._env = setting.make_env(task)
            observation, info = await _call(self._env, self._env.reset, task.seed)
        messages = (
            [{"role": "user", "content": observation}]
            if isinstance(observation, str)
            else list(observation)
        )
        self.episode.task = replace(
            task,
            prompt=tuple(messages),
            answer=info.get("answer", task.answer),
            data_source=task.data_source or task.env,
        )
        if self._env.observe_as == "raw":  # a wrapper has put it through the chat template
            tokens = setting.chat.tokenizer.encode(str(observation))
        else:
            self.tools = info.get("tools")
            tokens = setting.chat.prompt(messages, self.tools)
        text = "".join(str(message.get("content") or "") for message in messages)
        self.episode.append(Span(None, Author.TASK, tokens, text=text))
        self._prompt = setting.engine.open(tokens)

    async def root(self) -> Path:
        """A new path from the prompt; the prompt is computed once however many there are."""
        assert self._env is not None and self._prompt is not None, "open() comes first"
        key = draw_key(self.setting.salt, self.episode.task.id, len(self.paths))
        env = await _fork_env(self._env, self.setting, self.episode.task, actions=[])
        return self._add(Path(self, len(self.paths), self._prompt.fork(key), env, tip=0))

    def settle(self) -> None:
        """Leaves in the order their paths began, whoever finished first."""
        self.episode.leaves = [path.leaf for path in self.paths if path.leaf is not None]

    def _add(self, path: Path) -> Path:
        self.paths.append(path)
        return path

    def fail(self, failure: Failure) -> None:
        """The task itself could not be posed: one leaf says so."""
        if not self.episode.spans:
            self.episode.append(Span(None, Author.TASK, []))
        self.episode.spans[0].info["error"] = str(failure)
        self.episode.leaves.append(Leaf((0,), status=failure.status))


class Path:
    """One live attempt."""

    def __init__(self, growth: Growth, number: int, context: Context, env: Env, tip: int) -> None:
        self.growth, self.number = growth, number
        self.context, self.env, self.tip = context, env, tip
        self.past: list[int] = []  # the tips of contexts that an observation has replaced
        self.actions: list[str] = []
        self.metrics: dict[str, float] = {"turns": 0.0, "tool_calls": 0.0, "tool_failures": 0.0}
        self.reward = 0.0
        self.leaf: Leaf | None = None

    @property
    def is_live(self) -> bool:
        return self.leaf is None

    async def finish(self) -> None:
        """Take turns until it is over."""
        while self.is_live:
            await self.turn()

    async def turn(self) -> None:
        """Sample, act, read the answer. A failure ends this path and nothing else."""
        try:
            await self._turn()
        except Failure as failure:
            self.growth.episode.spans[self.tip].info["error"] = str(failure)
            self.end(failure.status)

    async def _turn(self) -> None:
        setting = self.growth.setting
        room = setting.max_context - len(self.context.tokens)
        if room <= 0:
            return self.end(Status.TRUNCATED)
        sampling = self._sampling(room)
        async with boundary(f"completion of {self.growth.episode.task.id}", setting.deadline):
            completion = await self.context.sample(sampling)
        is_closed = setting.chat.is_closed(completion.tokens)
        text = self._words(completion.tokens, is_closed)
        span = Span.sampled(self.tip, completion, text)
        self.tip = self.growth.episode.append(span)
        self.metrics["turns"] += 1
        if completion.finish in (Finish.LENGTH, Finish.ABORT):
            is_cut = completion.finish is Finish.LENGTH
            return self.end(Status.TRUNCATED if is_cut else Status.ABORTED)

        async with boundary(f"env {self.growth.episode.task.env} step", setting.deadline):
            turn: Turn = await _call(self.env, self.env.step, text)
            if not math.isfinite(turn.reward):
                raise ValueError(f"reward {turn.reward} is not a finite number")
        self.actions.append(text)
        span.reward = turn.reward
        self.reward += turn.reward
        self._count(turn.info)
        if turn.is_over:
            return self.end(Status.DONE if turn.terminated else Status.TRUNCATED)
        if self.metrics["turns"] >= setting.max_turns:
            return self.end(Status.TRUNCATED)
        self._observe(turn, is_closed)

    def _sampling(self, room: int) -> Sampling:
        """The setting's sampling, cut to the room that is left and stopped where a turn ends."""
        asked, chat = self.growth.setting.sampling, self.growth.setting.chat
        end = () if chat.end_ids or not chat.end_text else (chat.end_text,)
        limit = min(asked.max_tokens, room)
        return _within(asked, limit, (*self.env.stop, *end), tuple(chat.end_ids))

    def _words(self, tokens: list[int], is_closed: bool) -> str:
        """What the environment hears: the turn without its end, be it the template's or plain eos."""
        chat = self.growth.setting.chat
        if not is_closed and tokens and tokens[-1] == chat.tokenizer.eos_id:
            tokens = tokens[:-1]
        text = chat.tokenizer.decode(tokens)
        return text.removesuffix(chat.end_text) if is_closed else text

    def _observe(self, turn: Turn, is_closed: bool) -> None:
        """Append the environment's words: inside the policy's own turn, or as a chat message.

        A turn may say how by itself: a tool's result inline, the world's answer as a message. A
        wrapper that rewrites the history gives the whole next prompt, and a new context begins.
        """
        chat, observation = self.growth.setting.chat, turn.observation
        role = turn.info.get("observe_as", self.env.observe_as)
        if role == "prompt":
            message = {"role": "user", "content": observation}
            return self._begin_anew(chat.prompt([message], self.growth.tools), observation)
        if role == "raw":
            return self._begin_anew(chat.tokenizer.encode(observation), observation)
        if role == "inline":
            tokens = chat.tokenizer.encode(observation)
        else:
            several = turn.info.get("tool_results") if role == "tool" else None
            said = several or [observation]  # calls made in one message are answered one by one
            messages = [{"role": role, "content": text} for text in said]
            tokens = chat.extend(messages, closed=is_closed)
        self.tip = self.growth.episode.append(Span(self.tip, Author.ENV, tokens, text=observation))
        self.context.append(tokens)

    def _begin_anew(self, tokens: list[int], text: str) -> None:
        """Go on from a new root; the leaf will have one walk per context."""
        growth = self.growth
        self.past.append(self.tip)
        self.tip = growth.episode.append(Span(None, Author.TASK, tokens, text=text))
        self.context.close()
        name = f"{growth.episode.task.id}/{len(self.past)}"  # its draws are its own
        self.context = growth.setting.engine.open(
            tokens, key=draw_key(growth.setting.salt, name, self.number)
        )

    def _count(self, info: dict[str, Any]) -> None:
        if "tool" in info:
            self.metrics["tool_calls"] += info.get("tool_calls", 1)
            failures = info.get("tool_failures", not info.get("tool_ok", True))
            self.metrics["tool_failures"] += failures
        for name, value in info.items():
            if name.startswith("tools/"):  # one tool's calls, failures, seconds in this episode
                self.metrics[name] = float(value)

    async def fork(self) -> Path:
        """A second path with the same past; from here on the two are strangers."""
        growth = self.growth
        key = draw_key(growth.setting.salt, growth.episode.task.id, len(growth.paths))
        env = await _fork_env(self.env, growth.setting, growth.episode.task, self.actions)
        twin = Path(growth, len(growth.paths), self.context.fork(key), env, self.tip)
        twin.past = [*self.past]
        twin.actions, twin.metrics, twin.reward = [*self.actions], {**self.metrics}, self.reward
        return growth._add(twin)

    def end(self, status: Status) -> None:
        """Become a leaf."""
        episode, reward = self.growth.episode, self.growth.setting.reward
        self.leaf = Leaf((*self.past, self.tip), self.reward, status, metrics=self.metrics)
        if reward is not None and self.metrics["turns"] and status.is_trainable:
            spans = [episode.spans[i] for i in episode.walk(self.tip)]
            row = Trajectory(_as_only_leaf(episode, self.leaf), 0, len(self.past), spans)
            self.leaf.reward = reward(episode.task, row)
            if not math.isfinite(self.leaf.reward):
                raise ValueError(
                    f"the reward of task {episode.task.id!r} is {self.leaf.reward}; a reward function "
                    "must return a finite number"
                )
            last = next(span for span in spans[::-1] if span.author is Author.POLICY)
            last.reward += self.leaf.reward - self.reward  # turns still add up to the leaf's reward
        self.close()

    def close(self) -> None:
        self.context.close()
        self.env.close()


@lru_cache(maxsize=1024)  # one object for equal settings: the engine batches by identity
def _within(asked: Sampling, limit: int, stop: tuple[str, ...], ends: tuple[int, ...]) -> Sampling:
    return replace(
        asked,
        max_tokens=limit,
        min_tokens=min(asked.min_tokens, limit),
        stop=(*asked.stop, *stop),
        stop_tokens=(*asked.stop_tokens, *ends),
    )


def _as_only_leaf(episode: Episode, leaf: Leaf) -> Episode:
    """The episode as one attempt sees it."""
    return Episode(episode.task, episode.spans, [leaf])


async def _call(env: Env, function: Callable[..., Any], *args: Any) -> Any:
    """Envs that wait for something run on a thread, so that nobody waits with them."""
    return await in_thread(function, *args) if env.blocking else function(*args)


async def _fork_env(env: Env, setting: Setting, task: Task, actions: list[str]) -> Env:
    if env.forkable:
        return env.fork()
    async with boundary(f"env {task.env} replay", setting.deadline):
        copy = setting.make_env(task)
        await _call(copy, copy.reset, task.seed)
        for action in actions:
            await _call(copy, copy.step, action)
    return copy

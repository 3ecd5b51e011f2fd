"""One live attempt: sample, act, read the answer, until it is over.

With actions, sampling also stops where a call is complete, and the environment need not look for it:

    policy  "So compare A and B"    env.step(Called(text, "compare", ("A", "B")))
    env     ": A < B\n"             "A < B" in the answer template of the actions, inline

A turn may be begun and finished later: a branch that looks at the first tokens after an observation
takes them with `begin`, and may `fork` there; the fork has the same past and none of these tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from graft.protocols import Context, Env, Reward
from graft.rewards.weighted import WeightedSum
from graft.rollout.failure import RolloutFailure, boundary
from graft.rollout.last_info import last_info
from graft.rollout.threads import in_thread
from graft.text.transcript import Transcript
from graft.types import (
    Author,
    Called,
    Completion,
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
from graft.user_code import (
    Giver,
    UserCodeError,
    as_number,
    as_posed,
    as_turn,
    check_fork,
    naming,
    raised,
    user_frame,
)

if TYPE_CHECKING:
    from graft.rollout.episode_builder import EpisodeBuilder, RolloutSetup


class LiveTrajectory:
    """An engine context, an environment, and the last span written."""

    def __init__(
        self, builder: EpisodeBuilder, number: int, context: Context, env: Env, tip: int
    ) -> None:
        self.builder, self.number = builder, number
        self.context, self.env, self.tip = context, env, tip
        self.past: list[int] = []  # the tips of contexts that an observation has replaced
        self.transcripts: list[Transcript] = (
            [] if builder.transcript is None else [builder.transcript]
        )
        """What the context showed before each turn, where the template is followed to the letter."""
        self.actions: list[str] = []  # what the environment heard, turn by turn
        self.metrics: dict[str, float] = {"turns": 0.0, "tool_calls": 0.0, "tool_failures": 0.0}
        self.reward = 0.0
        self.info: Mapping[str, Any] = builder.info
        """Of the environment's last answer."""
        self.leaf: Leaf | None = None
        self.twin_of: LiveTrajectory | None = None
        """The path that this one is the counterfactual of."""
        self.begun: Span | None = None
        """The last it has said of a turn that is not over."""
        self.turn_spans: list[Span] = []
        """What it has sampled in its latest turn: two or more where new weights came in the middle."""
        self.spoken: Span | None = None
        """The last span that it has sampled itself."""
        self._mode: int | None = None  # of the context, before what is begun
        self._finish: Finish | None = None  # how a turn ended that nobody has heard yet
        self._is_acting = False

    @property
    def is_live(self) -> bool:
        return self.leaf is None

    @property
    def spans(self) -> list[Span]:
        """All it went through, context after context."""
        episode = self.builder.episode
        return [episode.spans[i] for tip in (*self.past, self.tip) for i in episode.walk(tip)]

    @property
    def has_room(self) -> bool:
        """Whether it may say one more token."""
        return self._sampling(None) is not None

    async def finish(self) -> None:
        """Take turns until it is over."""
        while self.is_live:
            await self.turn()

    async def turn(self) -> None:
        """Sample what is left of a turn, act, read the answer. A failure ends this path, no other."""
        await self._unless_it_fails(self._turn())

    async def begin(self, tokens: int) -> None:
        """Sample the first `tokens` of the next turn; `turn` goes on from there."""
        await self._unless_it_fails(self._speak(tokens))

    async def _unless_it_fails(self, steps: Awaitable[None]) -> None:
        try:
            await steps
        except RolloutFailure as failure:
            failure.write(self.builder.episode.spans[self.tip].info)
            if self._is_acting and getattr(self.env, "tools", None):  # no turn tells of this call
                self.metrics["tools/broken"] = self.metrics.get("tools/broken", 0.0) + 1
                self.builder.episode.spans[self.tip].info["tool_calls"] = 1
            await self.end(failure.status)

    async def _turn(self) -> None:
        setup = self.builder.setup
        if self._finish is None:
            await self._speak()
        if self.leaf is not None or self.begun is None:
            return None
        span, finish, self.begun, self._finish = self.begun, self._finish, None, None
        self.metrics["turns"] += 1
        if finish in (Finish.LENGTH, Finish.ABORT):
            return await self.end(Status.TRUNCATED if finish is Finish.LENGTH else Status.ABORTED)

        is_closed = setup.chat.is_closed(self._turn_tokens())
        said = self._said(is_call=finish is Finish.EXIT)
        self._is_acting = True
        async with boundary(f"env {self.builder.episode.task.env} step", setup.deadline):
            turn = as_turn(
                await call(self.env, self.env.step, said), Giver(self.env, "env", "step")
            )
            self._is_acting = False
        self.actions.append(said)
        span.reward = turn.reward
        self.reward += turn.reward
        self.info = turn.info
        self.count(turn.info)
        if "tool" in turn.info:
            refused = turn.info.get("tool_refusals", 0)
            span.info["tool_calls"] = turn.info.get("tool_calls", 1) - refused
        if turn.is_over:
            return await self.end(Status.DONE if turn.terminated else Status.TRUNCATED)
        if self.metrics["turns"] >= setup.max_turns:
            return await self.end(Status.TRUNCATED)
        async with boundary(f"env {self.builder.episode.task.env} answer", setup.deadline):
            self._observe(turn, said, is_closed)

    async def _speak(self, most: int | None = None) -> None:
        """Sample the turn, or `most` tokens of it, after what of it is there already.

        Where new weights come in the middle, it goes on with them in a span of its own.
        """
        setup = self.builder.setup
        finish, is_part = Finish.PAUSE, False
        while finish is Finish.PAUSE:
            sampling = self._sampling(most)
            if sampling is None:
                return await self.end(Status.TRUNCATED)
            if self.begun is None:
                self._mode = self.context.mode
            async with boundary(f"completion of {self.builder.episode.task.id}", setup.deadline):
                grammar = None if setup.actions is None else setup.actions.grammar
                completion = await self.context.sample(sampling, grammar)
            finish, said = completion.finish, len(completion.tokens)
            if said or finish is not Finish.PAUSE:
                self._write(completion)
            if finish is Finish.PAUSE and said == sampling.max_tokens:
                finish = Finish.LENGTH  # paused behind the last token that was asked for
            is_part = finish is Finish.LENGTH and said == most
            most = None if most is None else most - said
        self._finish = None if is_part and self.has_room else finish

    def _write(self, completion: Completion) -> None:
        """Add what was sampled: to the span it goes on with, where both are of the same weights.

        The words of a turn stand in its last span, those before it have none: a character may lie
        across the seam, and whoever looks for an answer finds it whole.
        """
        span = self.begun
        if span is None:
            self.turn_spans = []
        tokens = self._turn_tokens() + completion.tokens
        text = self._words(tokens)
        if span is not None and span.version == completion.version:
            span.go_on(completion, text)
        else:
            if span is not None:
                span.text = ""
            self.begun = Span.sampled(self.tip, completion, text)
            self.tip = self.builder.episode.append(self.begun)
            self.turn_spans.append(self.begun)
        self.spoken = self.begun

    def _turn_tokens(self) -> list[int]:
        return [token for span in self.turn_spans for token in span.tokens]

    def _sampling(self, most: int | None) -> Sampling | None:
        """The setup's sampling, cut to the room that is left and stopped where a turn ends.

        None where there is no room. With actions a call ends by itself, not by a stop string.
        `most` tokens are asked for only where more could follow.
        """
        setup = self.builder.setup
        asked, chat = setup.sampling, setup.chat
        begun = sum(map(len, self._open_spans()))
        limit = min(asked.max_tokens - begun, setup.max_context - len(self.context.tokens))
        if limit <= 0:
            return None
        limit = limit if most is None or most >= limit else most
        end = () if chat.end_ids or not chat.end_text else (chat.end_text,)
        stop = self.env.stop if setup.actions is None else ()
        return _within(asked, limit, (*stop, *end), tuple(chat.end_ids), begun)

    def _open_spans(self) -> list[Span]:
        """The policy's spans since somebody else spoke: one, or more where it was split or forced."""
        spans = [self.builder.episode.spans[i] for i in self.builder.episode.walk(self.tip)]
        others = [i for i, span in enumerate(spans) if span.author is not Author.POLICY]
        return spans[others[-1] + 1 :]

    def _said(self, is_call: bool) -> str:
        """What the environment hears: the text of the turn, which may be a call."""
        spans, actions = self._open_spans(), self.builder.setup.actions
        text = spans[0].text
        if len(spans) > 1:  # decoded as one: a character may lie across the seam
            text = self._words([token for span in spans for token in span.tokens])
        if not is_call or actions is None:
            return text
        chosen = [action for span in spans for action in span.actions]
        tool, arguments = actions.read(chosen, [mode for span in spans for mode in span.modes])
        return Called(text, tool, arguments)

    def _words(self, tokens: list[int]) -> str:
        """The text of the context's last tokens, without the end of the turn."""
        written = self.context.tokens
        last = written[-len(tokens) - 1] if len(written) > len(tokens) else None
        return self.builder.setup.chat.words(tokens, last)

    def _observe(self, turn: Turn, said: str, is_closed: bool) -> None:
        """Append the environment's words: inside the policy's own turn, or as a chat message.

        A turn may say how by itself: a tool's result inline, the world's answer as a message. A
        wrapper that rewrites the history gives the whole next prompt, and a new context begins; so
        it does where the chat template rewrites and is followed to the letter.
        """
        builder, observation, last = self.builder, turn.observation, self.context.tokens[-1]
        chat, actions = builder.setup.chat, builder.setup.actions
        role = turn.info.get("observe_as", self.env.observe_as)
        if role == "prompt":
            message = {"role": "user", "content": observation}
            return self._begin_anew(*builder.begin([message]), observation)
        if role == "raw":
            return self._begin_anew(*builder.begin(observation), observation)
        if role == "messages":  # a request of its own: a sub-agent's, or a rewritten history
            asked, tools = turn.info["messages"], turn.info.get("tools")
            return self._begin_anew(*builder.begin(asked, tools), observation)
        if role == "inline":
            if actions is not None and isinstance(said, Called):
                observation = actions.render(said.tool, observation)
            tokens = chat.tokenizer.encode_plain(observation, last)
        else:
            several = turn.info.get("tool_results") if role == "tool" else None
            words = several or [observation]  # calls made in one message are answered one by one
            messages = [{"role": role, "content": text} for text in words]
            if self.transcripts:
                known, written = self.transcripts[-1], self.context.tokens
                transcript, tokens, is_new = known.answered(chat, written, messages)
                if is_new:
                    return self._begin_anew(tokens, transcript, transcript.shown)
                self.transcripts.append(transcript)
            else:
                tool = str(turn.info.get("tool") or "tool")
                tokens = chat.extend(messages, closed=is_closed, last=last, tool=tool)
        self.tip = builder.episode.append(Span(self.tip, Author.ENV, tokens, text=observation))
        self.context.append(tokens)

    def _begin_anew(self, tokens: list[int], transcript: Transcript | None, text: str) -> None:
        """Go on from a new root; the leaf will have one walk per context."""
        builder = self.builder
        self.past.append(self.tip)
        root = Span(None, Author.TASK, tokens, text=text)
        self.transcripts = []
        if transcript is not None:
            self.transcripts = [transcript]
            root.info["messages"] = transcript.spoken(builder.setup.chat)
        self.tip = builder.episode.append(root)
        self.context.close()
        key = builder.key(self.number, f"/{len(self.past)}")  # its draws are its own
        self.context = builder.setup.engine.open(tokens, key=key)

    def count(self, info: dict[str, Any]) -> None:
        """Add up what a turn says of tools."""
        if "tool" in info:
            self.metrics["tool_calls"] += info.get("tool_calls", 1)
            failures = info.get("tool_failures", not info.get("tool_ok", True))
            self.metrics["tool_failures"] += failures
        for name, value in info.items():
            if name.startswith("tools/"):  # one tool's calls, failures, seconds in this episode
                who = Giver(self.env, "env", "step")
                self.metrics[name] = as_number(value, who, verb=f"gave as info[{name!r}]")

    async def fork(self) -> LiveTrajectory:
        """A second path with the same past; from here on the two are strangers.

        Of a turn that is begun it has nothing: it goes on behind the last observation.
        """
        builder = self.builder
        env = await fork_env(self.env, builder.setup, builder.episode.task, self.actions)
        key, tip = builder.key(len(builder.paths)), self.tip
        if self.begun is None:
            context = self.context.fork(key)
        else:
            first, said = self.turn_spans[0], len(self._turn_tokens())
            assert first.parent is not None
            context = self.context.fork(key, at=len(self.context.tokens) - said)
            context.mode, tip = self._mode, first.parent
        twin = builder.add(context, env, tip)
        twin.past, twin.transcripts = [*self.past], [*self.transcripts]
        twin.actions, twin.metrics, twin.reward = [*self.actions], {**self.metrics}, self.reward
        twin.info = self.info
        return twin

    async def end(self, status: Status) -> None:
        """Become a leaf."""
        tips, info = (*self.past, self.tip), last_info(self.info)
        self.leaf = Leaf(tips, self.reward, status, metrics=self.metrics, info=info)
        if self.metrics["turns"] and status.is_trainable:
            await self._judge(self.leaf)
        if self.builder.keep_open:
            close_env(self.env)
        else:
            self.close()

    async def _judge(self, leaf: Leaf) -> None:
        """Let the setup's reward, if it has one, take the place of the environment's."""
        episode, setup = self.builder.episode, self.builder.setup
        reward = setup.reward
        if reward is None:
            return
        spans = [episode.spans[i] for i in episode.walk(self.tip)]
        row = Trajectory(_as_only_leaf(episode, leaf), 0, len(self.past), spans)
        async with boundary(f"the reward of {episode.task.id}", setup.deadline):
            earned = await ask(reward, episode.task, row)
        leaf.reward = earned
        if self.spoken is not None:  # not a span of the path that it is a fork of
            self.spoken.reward += earned - self.reward  # turns still add up to the leaf's reward

    def close(self) -> None:
        self.context.close()
        close_env(self.env)


@lru_cache(maxsize=1024)  # one object for equal settings: the engine batches by identity
def _within(
    asked: Sampling, limit: int, stop: tuple[str, ...], ends: tuple[int, ...], begun: int
) -> Sampling:
    return replace(
        asked,
        max_tokens=limit,
        min_tokens=min(max(asked.min_tokens - begun, 0), limit),
        stop=(*asked.stop, *stop),
        stop_tokens=(*asked.stop_tokens, *ends),
        begun=begun,
    )


def _as_only_leaf(episode: Episode, leaf: Leaf) -> Episode:
    """The episode as one attempt sees it."""
    return Episode(episode.task, episode.spans, [leaf])


async def ask(reward: Reward, task: Task, row: Trajectory) -> float:
    """What an attempt earns. A reward that waits, as a judge does, gets a thread; of several that are
    added up, those that wait do so at the same time, and the others stay in this thread."""
    if isinstance(reward, WeightedSum):
        values = await asyncio.gather(*(ask(one.reward, task, row) for one in reward.components))
        return reward.total(values, row.leaf)
    who, waits = Giver(reward, "reward"), getattr(reward, "blocking", False)
    try:
        given_back = await in_thread(reward, task, row) if waits else reward(task, row)
    except SystemExit as error:
        raise UserCodeError(
            f"{who} called exit({error.code}) for task {task.id!r}; it must return a finite number"
        ) from error
    except Exception as error:
        if isinstance(error, UserCodeError) or not user_frame(error):
            raise
        raise raised(f"{who}, asked about task {task.id!r},", error) from error
    return as_number(given_back, who, f"a finite number (task {task.id!r})")


async def call(env: Env, function: Callable[..., Any], *args: Any) -> Any:
    """Envs that wait for something run on a thread, so that nobody waits with them."""
    return await in_thread(function, *args) if env.blocking else function(*args)


def close_env(env: Env) -> None:
    with naming(env, "close() of"):
        env.close()


async def fork_env(env: Env, setup: RolloutSetup, task: Task, actions: Sequence[str]) -> Env:
    """A copy; of an env that cannot be copied, a new one that lives through the same turns."""
    if env.forkable:
        async with boundary(f"env {task.env} fork", setup.deadline):
            twin = env.fork()
            check_fork(twin, env)
            return twin
    async with boundary(f"env {task.env} replay", setup.deadline):
        copy = setup.make_env(task)
    try:
        async with boundary(f"env {task.env} replay", setup.deadline):
            as_posed(await call(copy, copy.reset, task.seed), Giver(copy, "env", "reset"))
    except BaseException:
        copy.close()
        raise
    await replay(copy, setup, task, actions)
    return copy


async def replay(env: Env, setup: RolloutSetup, task: Task, actions: Sequence[str]) -> list[Turn]:
    """Live through turns that another env has lived through; if that fails, the env is closed."""
    turns: list[Turn] = []
    try:
        async with boundary(f"env {task.env} replay", setup.deadline):
            for action in actions:
                turn = await call(env, env.step, action)
                turns.append(as_turn(turn, Giver(env, "env", "step")))
                if turns[-1].is_over:
                    raise ValueError(
                        f"turn {len(turns)} ended the episode, which it did not before"
                    )
    except BaseException:
        env.close()
        raise
    return turns

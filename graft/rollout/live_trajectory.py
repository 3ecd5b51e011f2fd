"""One live attempt: sample, act, observe, until it is over.

With actions, sampling also stops where a call is complete, and the environment need not look for it:

    policy  "So compare A and B"    env.step(CallText(text, "compare", ("A", "B")))
    env     ": A < B\n"             "A < B" in the answer template of the actions, inline

A branch may sample the first tokens of a turn with `begin`, decide, and fork (`EpisodeBuilder.fork`): the
fork has the same past and none of these tokens. `turn` samples the rest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Any

from graft.envs.checked import as_turn
from graft.protocols import Context, Env
from graft.rollout.episode_draft import EpisodeDraft
from graft.rollout.failure import RolloutFailure, boundary
from graft.rollout.partial_turn import PartialTurn, TurnStage
from graft.rollout.setup import limited_sampling
from graft.rollout.user_calls import call, compute_reward, last_info, state_of, try_close
from graft.structure import Structure
from graft.text.transcript import Transcript
from graft.types import (
    Author,
    CallText,
    Completion,
    Episode,
    Finish,
    Leaf,
    Sampling,
    Span,
    Status,
    Trajectory,
    Turn,
)
from graft.user_code import UserObject, as_number

INVALID_ACTION = "<｜INVALID_ACTION｜>"
"""What GEM's trainer sends to an environment in place of a response that was cut off."""


class LiveTrajectory:
    """An engine context, an environment, and the last span written."""

    def __init__(
        self, draft: EpisodeDraft, number: int, context: Context, env: Env, tip: int
    ) -> None:
        self.draft, self.number = draft, number
        self.context, self.env, self.tip = context, env, tip
        self.past: list[int] = []  # the tips of contexts that an observation has replaced
        self.transcripts: list[Transcript] = [] if draft.transcript is None else [draft.transcript]
        """What the context showed before each turn, where the template is followed to the letter."""
        self.actions: list[str] = []  # what env.step was called with, turn by turn
        self.metrics: dict[str, float] = {"turns": 0.0, "tool_calls": 0.0, "tool_failures": 0.0}
        self.reward = 0.0
        self.info: Mapping[str, Any] = draft.info
        """Of the environment's last answer."""
        self.leaf: Leaf | None = None
        self.twin_of: LiveTrajectory | None = None
        """The trajectory that this one is the counterfactual of."""
        self.seat, self.match = "", -1  # of a game with several agents
        self.sampling: Sampling | None = None
        """In place of the setup's."""
        self.structure: Structure | None = None
        """Of this turn, in place of the sampling's."""
        self.partial = PartialTurn()

    @property
    def is_live(self) -> bool:
        return self.leaf is None

    @property
    def spans(self) -> list[Span]:
        """All spans from its first context to its last."""
        episode = self.draft.episode
        return [episode.spans[i] for tip in (*self.past, self.tip) for i in episode.walk(tip)]

    @property
    def last_sampled(self) -> Span | None:
        """The last span that it has sampled itself; one that it shares as a fork is not."""
        return self.partial.spans[-1] if self.partial.spans else None

    @property
    def can_sample(self) -> bool:
        """Whether turn and context have room for one more token."""
        return self._sampling(None) is not None

    @property
    def has_turns(self) -> bool:
        """Whether the limit of turns allows one more."""
        return self.metrics["turns"] < self.draft.setup.max_turns

    async def finish(self) -> None:
        """Take turns until it is over."""
        while self.is_live:
            await self.turn()

    async def turn(self) -> None:
        """Sample the rest of a turn, act, observe. A failure ends this trajectory and no other."""
        await self._ending_on_failure(self._turn())

    async def begin(self, tokens: int) -> None:
        """Sample the first `tokens` of the next turn; `turn` samples the rest."""
        await self._ending_on_failure(self._sample(tokens))

    async def _ending_on_failure(self, steps: Awaitable[None]) -> None:
        try:
            await steps
        except RolloutFailure as failure:
            self.draft.on_failure(failure)
            info = self.draft.episode.spans[self.tip].info
            failure.write(info)
            # no turn reports a call that broke the step
            if self.partial.stage is TurnStage.ACTING and getattr(self.env, "tools", None):
                self.metrics["tools/broken"] = self.metrics.get("tools/broken", 0.0) + 1
                info["tool_calls"] = 1
            await self.end(failure.status)

    async def _turn(self) -> None:
        action = await self.decide()
        if action is not None:
            turn = await self._act(action)
            await self.receive(action, turn, is_last=not self.has_turns)
        elif self.is_live:
            is_cut = self.partial.finish is Finish.LENGTH
            await self.end(Status.TRUNCATED if is_cut else Status.ABORTED)

    async def decide(self) -> str | None:
        """Sample the rest of a turn: the argument of env.step; None where no turn was completed."""
        if self.partial.stage is not TurnStage.SAMPLED:  # `begin` may have sampled all of it
            await self._sample()
        if not self.is_live:
            return None
        finish, self.partial.stage = self.partial.finish, TurnStage.OVER
        self.metrics["turns"] += 1
        if finish is Finish.LENGTH and self.draft.setup.cut_turns == "step":
            return INVALID_ACTION
        if finish in (Finish.LENGTH, Finish.ABORT):
            return None
        return self._action(is_call=finish is Finish.EXIT)

    async def receive(self, action: str, turn: Turn, is_last: bool = False) -> None:
        """Take the environment's answer; `is_last`: the limit of turns is reached."""
        setup = self.draft.setup
        await self.record(action, turn)
        if turn.is_over:
            return await self.end(Status.DONE if turn.terminated else Status.TRUNCATED)
        if is_last:
            return await self.end(Status.TRUNCATED)
        async with boundary(f"env {self.draft.episode.task.env} answer", setup.deadline):
            self._observe(turn, action, setup.chat.is_closed(self.partial.tokens))

    async def _sample(self, most: int | None = None) -> None:
        """Sample the turn, or `most` tokens of it, after the tokens of it that are there already.

        Where new weights arrive in the middle, the rest is sampled with them, in a span of its own.
        """
        setup, task = self.draft.setup, self.draft.episode.task
        grammar = None if setup.actions is None else setup.actions.grammar
        if not self.partial.is_open:
            async with boundary(f"env {task.env} answer_schema", setup.deadline):
                schema = self.info.get("answer_schema")
                self.structure = None if schema is None else Structure.of(schema)
        finish, is_first_part = Finish.PAUSE, False
        while finish is Finish.PAUSE:
            sampling = self._sampling(most)
            if sampling is None:
                return await self.end(Status.TRUNCATED)
            mode = self.partial.mode if self.partial.is_open else self.context.mode
            async with boundary(f"completion of {task.id}", setup.deadline):
                completion = await self.context.sample(sampling, grammar)
            finish, count = completion.finish, len(completion.tokens)
            if count or finish is not Finish.PAUSE:
                async with boundary(f"env {task.env} state", setup.deadline):
                    self._append(completion, mode)
            if finish is Finish.PAUSE and count == sampling.max_tokens:
                finish = Finish.LENGTH  # paused behind the last token of the request
            is_first_part = finish is Finish.LENGTH and count == most
            most = None if most is None else most - count
        if not (is_first_part and self.can_sample):
            self.partial.stage, self.partial.finish = TurnStage.SAMPLED, finish

    def _append(self, completion: Completion, mode: int | None) -> None:
        """Add sampled tokens: to the last span of the turn, where both are of the same weights.

        The text of a turn is kept in its last span, and those before it have none: a character may
        lie across the seam, and a search for an answer finds it whole.
        """
        if not self.partial.is_open:
            self.partial = PartialTurn(mode=mode, stage=TurnStage.SAMPLING)
        spans = self.partial.spans
        text = self._text_of(self.partial.tokens + completion.tokens)
        if spans and spans[-1].version == completion.version:
            return spans[-1].extend(completion, text)
        if spans:
            spans[-1].text = ""
        state = state_of(self.env, self.info)
        began = {"state": state} if state else {}
        spans.append(Span.sampled(self.tip, completion, text, **began))
        self.tip = self.draft.episode.append(spans[-1])

    def _sampling(self, most: int | None) -> Sampling | None:
        """The setup's sampling, limited to the tokens that are left, with the ends of a turn as stops.

        None where no token is left. With actions the grammar ends a call, not a stop string. The
        limit is `most` only where more could follow.
        """
        setup = self.draft.setup
        base, chat = self.sampling or setup.sampling, setup.chat
        if self.structure is not None:
            base = replace(base, structure=self.structure)
        begun = sum(map(len, self._open_spans()))
        limit = min(base.max_tokens - begun, setup.max_context - len(self.context.tokens))
        if limit <= 0:
            return None
        limit = limit if most is None or most >= limit else most
        end = () if chat.end_ids or not chat.end_text else (chat.end_text,)
        stop = self.env.stop if setup.actions is None else ()
        return limited_sampling(base, limit, (*stop, *end), tuple(chat.end_ids), begun)

    def _open_spans(self) -> list[Span]:
        """The policy's spans behind the last span of another author.

        Usually one; more where new weights arrived, a span was split, or a call was forced.
        """
        spans = [self.draft.episode.spans[i] for i in self.draft.episode.walk(self.tip)]
        others = [i for i, span in enumerate(spans) if span.author is not Author.POLICY]
        return spans[others[-1] + 1 :]

    def _action(self, is_call: bool) -> str:
        """The argument of env.step: the text of the turn, which may be a call."""
        spans, actions = self._open_spans(), self.draft.setup.actions
        text = spans[0].text
        if len(spans) > 1:  # decoded as one: a character may lie across the seam
            text = self._text_of([token for span in spans for token in span.tokens])
        if not is_call or actions is None:
            return text
        chosen = [action for span in spans for action in span.actions]
        tool, arguments = actions.read(chosen, [mode for span in spans for mode in span.modes])
        return CallText(text, tool, arguments)

    def _text_of(self, tokens: list[int]) -> str:
        """The text of the context's last tokens, without the end of the turn."""
        written = self.context.tokens
        last = written[-len(tokens) - 1] if len(written) > len(tokens) else None
        return self.draft.setup.chat.turn_text(tokens, last)

    async def _act(self, action: str) -> Turn:
        """The environment's answer."""
        env, setup = self.env, self.draft.setup
        self.partial.stage = TurnStage.ACTING
        async with boundary(f"env {self.draft.episode.task.env} step", setup.deadline):
            turn = as_turn(await call(env, env.step, action), UserObject(env, "env", "step"))
            self.partial.stage = TurnStage.OVER
        return turn

    async def record(self, action: str, turn: Turn) -> None:
        """Reward, info and tool counts of a turn."""
        self.actions.append(action)
        self.reward += turn.reward
        self.info = turn.info
        async with boundary(f"env {self.draft.episode.task.env} info", self.draft.setup.deadline):
            self.count_tools(turn.info)
            if (span := self.last_sampled) is None:  # it lost without a single token
                return
            span.reward += turn.reward
            if "tool" in turn.info:
                refused = turn.info.get("tool_refusals", 0)
                span.info["tool_calls"] = turn.info.get("tool_calls", 1) - refused

    def count_tools(self, info: dict[str, Any]) -> None:
        """Add a turn's tool calls to the metrics."""
        if "tool" in info:
            self.metrics["tool_calls"] += info.get("tool_calls", 1)
            failures = info.get("tool_failures", not info.get("tool_ok", True))
            self.metrics["tool_failures"] += failures
        for name, value in info.items():
            if name.startswith("tools/"):  # one tool's calls, failures, seconds in this episode
                who = UserObject(self.env, "env", "step")
                self.metrics[name] = as_number(value, who, verb=f"gave as info[{name!r}]")

    def _observe(self, turn: Turn, action: str, is_closed: bool) -> None:
        """Append the observation: inside the policy's own turn, or as a chat message.

        The info of a turn may decide which: a tool's result inline, the world's answer as a message.
        A wrapper that rewrites the history gives the whole next prompt, which starts a new context;
        so does a chat template that rewrites and is followed to the letter.
        """
        draft, observation, last = self.draft, turn.observation, self.context.tokens[-1]
        chat, actions = draft.setup.chat, draft.setup.actions
        role = turn.info.get("observe_as", self.env.observe_as)
        if role == "prompt":
            message = {"role": "user", "content": observation}
            return self._new_context(*draft.prompt_tokens([message]), observation)
        if role == "raw":
            return self._new_context(*draft.prompt_tokens(observation), chat.visible(observation))
        if role == "messages":  # a request of its own: a sub-agent's, or a rewritten history
            prompt, tools = turn.info["messages"], turn.info.get("tools")
            return self._new_context(*draft.prompt_tokens(prompt, tools), observation)
        if role == "inline":
            if actions is not None and isinstance(action, CallText):
                observation = actions.render(action.tool, observation)
            tokens = chat.tokenizer.encode_plain(observation, last)
        else:
            results = turn.info.get("tool_results") if role == "tool" else None
            texts = results or [observation]  # calls made in one message are answered one by one
            messages = [{"role": role, "content": text} for text in texts]
            if self.transcripts:
                known, written = self.transcripts[-1], self.context.tokens
                transcript, tokens, is_new = known.answered(chat, written, messages)
                if is_new:
                    return self._new_context(tokens, transcript, transcript.shown)
                self.transcripts.append(transcript)
            else:
                tool = str(turn.info.get("tool") or "tool")
                tokens = chat.extend(messages, closed=is_closed, last=last, tool=tool)
        self.tip = draft.episode.append(Span(self.tip, Author.ENV, tokens, text=observation))
        self.context.append(tokens)

    def _new_context(self, tokens: list[int], transcript: Transcript | None, text: str) -> None:
        """Continue from a new root; the leaf will have one walk per context."""
        draft = self.draft
        self.past.append(self.tip)
        root = Span(None, Author.TASK, tokens, text=text)
        self.transcripts = []
        if transcript is not None:
            self.transcripts = [transcript]
            root.info["messages"] = transcript.plain_messages(draft.setup.chat)
        self.tip = draft.episode.append(root)
        self.context.close()
        key = draft.key(self.number, f"/{len(self.past)}")  # draws of its own
        self.context = draft.setup.engine.open(tokens, key=key)

    def copy(self, number: int, env: Env) -> LiveTrajectory:
        """A second trajectory with the same past and draws of its own; `env` is a copy of its environment.

        It has no token of a turn in progress: it continues behind the last observation.
        """
        turn, key, tip = self.partial, self.draft.key(number), self.tip
        if not turn.is_open:
            context = self.context.fork(key)
        else:
            parent = turn.spans[0].parent
            assert parent is not None
            context = self.context.fork(key, at=len(self.context.tokens) - len(turn.tokens))
            context.mode, tip = turn.mode, parent
        twin = LiveTrajectory(self.draft, number, context, env, tip)
        twin.past, twin.transcripts = [*self.past], [*self.transcripts]
        twin.actions, twin.metrics, twin.reward = [*self.actions], {**self.metrics}, self.reward
        twin.info = self.info
        return twin

    async def end(self, status: Status) -> None:
        """Become a leaf."""
        tips = (*self.past, self.tip)
        leaf = Leaf(tips, self.reward, status, metrics=self.metrics, info=last_info(self.info))
        if self.seat:
            leaf.seat, leaf.match = self.seat, self.match
        if self.metrics["turns"] and status.is_trainable:
            await self._apply_reward(leaf)
        self.leaf = leaf
        if not self.draft.keep_open:
            self.context.close()
        if error := try_close(self.env):
            failure = RolloutFailure(Status.ENV_ERROR, str(error))
            failure.__cause__ = error
            leaf.status = failure.status if leaf.status.is_trainable else leaf.status
            failure.write(self.draft.episode.spans[self.tip].info)
            self.draft.on_failure(failure)

    async def _apply_reward(self, leaf: Leaf) -> None:
        """The setup's reward function, where there is one, replaces the environment's rewards."""
        episode, setup = self.draft.episode, self.draft.setup
        if setup.reward is None:
            return
        spans = [episode.spans[i] for i in episode.walk(self.tip)]
        alone = Episode(episode.task, episode.spans, [leaf])  # as this attempt sees it
        trajectory = Trajectory(alone, 0, len(self.past), spans)
        async with boundary(f"the reward of {episode.task.id}", setup.deadline):
            leaf.reward = await compute_reward(setup.reward, episode.task, trajectory)
        if self.last_sampled is not None:  # turns still add up to the leaf's reward
            self.last_sampled.reward += leaf.reward - self.reward

    def close(self) -> None:
        self.context.close()
        try_close(self.env)

"""One attempt of an agent at a task: every call that it makes, token-exactly, as spans of one forest.

session = gateway.open(task)                 # a key and an address for the agent
answers = await session.answer(request)      # for each call: sampled, and recorded
session.reward(1.0)                          # for the attempt, or for one answer
leaf = session.end()                         # one leaf, with a tip for each context

An agent that nobody can snapshot is forked by starting it anew: its first calls are answered from the record
of another attempt, as long as it makes the same calls, and share their spans.

fork = gateway.open(task, forest=session.forest, number=8, replay=session.record[:3])
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from graft.engine.errors import EngineError
from graft.gateway.canonical import text_of
from graft.gateway.drawing import DrawnTurn, TurnForm
from graft.gateway.forest import CallForest, LiveContext, Node
from graft.gateway.history import Answered, CallHistory, Prompt, RecordedCall
from graft.gateway.policy import ServedPolicy
from graft.gateway.reading import read_answer
from graft.gateway.request import AgentRequest, PolicyAnswer, RefusedRequest
from graft.gateway.roots import SUMMARY, USER
from graft.gateway.speakers.contexts import ContextRecord, settle_beginnings, settle_roles
from graft.gateway.speakers.endpoint import ModelEndpoint
from graft.gateway.speakers.main_choice import MainChoice, choose_main
from graft.rollout.failure import together
from graft.rollout.setup import draw_key
from graft.rollout.user_calls import in_thread
from graft.types import Author, Completion, Episode, Finish, Leaf, Span, Status, Task
from graft.user_code import MAX_REWARD, UserCodeError, as_reward, refusal

LONG_TEXT, MANY_MESSAGES = 50_000, 500
"""Characters and messages of a request from which on its text is rendered and encoded on a thread."""
PLACE = re.compile(r"\.\d+")
"""The number of an item in the name of a field: tools.0.type is tools.type."""
MAX_CHARACTERS = 512
"""Of a token, on average: more are refused before they are encoded."""


class AgentSession:
    """An attempt while it runs. `number` is its number among the attempts at the task."""

    def __init__(
        self,
        policy: ServedPolicy,
        task: Task,
        forest: CallForest,
        salt: int = 0,
        number: int = 0,
        metadata: Mapping[str, Any] | None = None,
        replay: Sequence[RecordedCall] = (),
        on_end: Callable[[AgentSession], None] | None = None,
        takes_rewards: bool = True,
    ) -> None:
        """takes_rewards: False, its client may not give it rewards."""
        self.policy, self.task, self.forest = policy, task, forest
        self._on_end, self.takes_rewards = on_end, takes_rewards
        self.salt, self.number, self.metadata = salt, number, metadata or {}
        self.id, self.key = secrets.token_hex(8), secrets.token_urlsafe(24)
        self.counts: Counter[str] = Counter()
        self.contexts: list[ContextRecord] = []
        self.leaf: Leaf | None = None
        self.is_rewarded = False
        self.fault: tuple[Status, str] | None = None
        """Why the policy could not answer the last request: an attempt that ends so is not trained."""
        self.reward_fault = ""
        """Why a reward could not be taken: what the attempt earned is not known, so it is not trained."""
        self.history = CallHistory(policy)
        self.record: list[RecordedCall] = []
        """Its answered calls in the order of their completion."""
        self._replay: dict[str, list[RecordedCall]] = {}
        for call in replay:
            self._replay.setdefault(call.asked, []).append(call)
        self.main = MainChoice()
        """The conversation that is the agent's, known when the attempt has ended."""
        self._frozen: dict[str, AgentSession] = {}  # what frozen models said to the agent
        self._num_known: list[int] = []  # conversations when each context began
        self._own: dict[Node, int] = {}  # what was sampled, and the number of its context
        self._given: dict[str, list[PolicyAnswer]] = {}  # by request, for retries
        self._under_way: Counter[str] = Counter()
        self._lives: list[LiveContext] = []
        self.refusal = ""
        """Why the last request was refused for what it asks; "" if it was not."""
        self.is_cut = False
        """Whether a limit refused the last request."""
        self._earned = 0.0

    def speaker(self, model: str) -> AgentSession | ModelEndpoint:
        """Who answers requests for a model of this name: the policy, a frozen model, or an endpoint.

        What a frozen model says is a session of its own, with its own forest: nothing of it is recorded here.
        All attempts at a task get the same answer to the same request, so that forks repeat it.
        """
        route = self.policy.routes.route(model)
        if isinstance(route, ModelEndpoint):
            self.counts["passed_calls"] += 1
            return route
        if route is None:
            return self
        self.counts["frozen_calls"] += 1
        if route.path not in self._frozen:
            policy, task = self.policy.frozen(route.path), self.forest.task
            forest = CallForest(task, policy.engine, policy.chat.tokenizer.decode_after)
            self._frozen[route.path] = AgentSession(policy, task, forest, self.salt)
        return self._frozen[route.path]

    async def answer(self, request: AgentRequest) -> list[PolicyAnswer]:
        """The policy's answers, `request.n` of them. To cancel it means that the client has gone."""
        if self.leaf is not None:
            raise RefusedRequest("this attempt has ended; open a new session", "not_found")
        self.counts["provider_tools"] += self.policy.check_tools(request)
        self.counts["formats"] += request.format is not None
        request, names = self.history.named(self.policy.with_format(request))
        asked = f"{names[-1]}/{request.sampling_key}"
        own = f"{request.agent}/{asked}"  # two sub-agents may ask the same
        self.counts["calls"] += 1
        if own in self._given:
            self.counts["retries"] += 1
            return self._given[own]
        if self._replay:
            return self._replayed(request, names, asked)
        form = await self.policy.form_of(request)
        prompt = self._admitted(request, await self._made(request, names))
        numbers = range(self._under_way[asked], self._under_way[asked] + request.n)
        self._under_way[asked] += request.n
        clock = asyncio.timeout(self.policy.deadline)
        try:
            async with clock:
                answers = await _all(
                    [self._sample(request, names, prompt, f"{asked}/{n}", form) for n in numbers]
                )
        except TimeoutError as error:
            if not clock.expired():
                raise
            self.fault = Status.TIMEOUT, f"waited {self.policy.deadline:g} s for an answer"
            raise RefusedRequest(self.fault[1], "overloaded") from error
        except EngineError as error:
            self.fault = Status.ENGINE_ERROR, str(error)
            raise RefusedRequest(str(error), "internal") from error
        finally:
            self._under_way[asked] -= request.n
        self.fault = None  # a client that asked again has its answer
        self._given[own] = answers
        return answers

    async def count_tokens(self, request: AgentRequest) -> int:
        """The tokens of the request's prompt."""
        asked = self.policy.with_format(request)
        return len((await self._made(*self.history.named(asked))).tokens)

    def reward(self, value: float, response_id: str | None = None) -> None:
        """Add to the attempt's reward; with `response_id` that answer has earned it."""
        if self.leaf is not None:
            raise RefusedRequest("this attempt has ended; its reward is final", "not_found")
        if not self.takes_rewards:
            raise RefusedRequest(
                "this attempt is graded by the tests of its task, and takes no other reward",
                "permission",
            )
        try:
            value = as_reward(value, "the reward", verb="is")
            if abs(total := self.total + value) > MAX_REWARD:
                raise refusal("the sum of the rewards", total, "a number from -1e12 to 1e12", "is")
        except UserCodeError as error:
            self.reward_fault = str(error)
            raise
        if response_id is None:
            self._earned += value
        elif response_id in self.history.answers:
            done = self.history.answers[response_id]
            if done.live is not None:  # else it is from the record, with the reward it earned there
                done.nodes[-1].span.reward += value
        else:
            raise RefusedRequest(
                f"no answer of this session has the id {response_id!r}", "not_found"
            )
        self.is_rewarded = True

    def refuse(self, refused: RefusedRequest) -> None:
        """Remember why the last request was refused; a limit of ours is remembered elsewhere."""
        self.refusal = "" if self.is_cut else str(refused)
        name = PLACE.sub("", refused.param or "")
        if name and (self.refusal or refused.kind == "invalid"):
            self.counts[f"refused_fields/{name}"] += 1

    def forfeit(self) -> None:
        """Take back all rewards so far."""
        self._earned = 0.0
        for done in self.history.answers.values():
            if done.live is not None:  # else it is from the record of another attempt
                for node in done.nodes:
                    node.span.reward = 0.0

    @property
    def total(self) -> float:
        """What the attempt has earned so far."""
        return self._earned + sum(node.span.reward for node in self._own)

    def end(self, status: Status = Status.DONE, info: Mapping[str, Any] | None = None) -> Leaf:
        """Become a leaf of the forest. Samples that still run are given up."""
        if self.leaf is not None:
            return self.leaf
        for live in self._lives:
            live.context.close()
        for other in self._frozen.values():
            other.end(Status.ABORTED)
            other.forest.close()
        self.policy.routes.note_names()
        status, why = self.status_at_end(status)
        info = {**(info or {}), "error": why} if why else info
        tips = self._tips()
        self._settle_roles()
        self._mask_untrained()
        metrics = {
            "turns": float(len(self.history.answers)),
            "tool_calls": float(self.counts["tool_calls"]),
            "tool_failures": 0.0,
            "contexts": float(len(self.contexts)),
            **{f"agent/{name}": float(count) for name, count in sorted(self.counts.items())},
        }
        contexts = [asdict(self.contexts[self._own[node]]) for node in tips]
        self.leaf = Leaf((), self.total, status, metrics=metrics)
        self.leaf.info = {**(info or {}), "contexts": contexts}
        trained = [node for node in self._own if any(node.span.mask)]
        if trained:  # turns add up to the leaf's reward
            trained[-1].span.reward += self._earned
        if not tips:  # it made no call: the leaf stands at the prompt, or at an empty one
            root = Span(None, Author.TASK, [])
            tips = [self.forest.roots[0] if self.forest.roots else self.forest.add(root, None)]
        self.forest.leaves.append((self.number, tips, self.leaf))
        if self._on_end is not None:
            self._on_end(self)
        return self.leaf

    def episode(self) -> Episode:
        """This attempt alone, as its agent may see it: nothing that grades it, nothing of other attempts."""
        task = self.forest.task
        shown = Task(task.id, task.env, task.prompt, data_source=task.data_source)
        answers = self.history.answers.values()
        sampled = {node for one in answers if one.live is not None for node in one.nodes}
        return self.forest.part(shown, self._own, sampled)

    def status_at_end(self, status: Status) -> tuple[Status, str]:
        """The status of an attempt that ends so, and why it is another one."""
        if not status.is_trainable:
            return status, ""
        if self.fault is not None:
            return self.fault
        if self.reward_fault:
            return Status.ENV_ERROR, self.reward_fault
        if not self._own:
            return Status.ENV_ERROR, "the agent ended without a call that was answered"
        return (Status.TRUNCATED if status is Status.DONE and self.is_cut else status), ""

    async def _made(self, request: AgentRequest, names: list[str]) -> Prompt:
        """The request as tokens; a long text is encoded on a thread, while other sessions go on."""
        size = sum(len(text_of(one)) for one in request.messages if one["role"] != "assistant")
        if size > MAX_CHARACTERS * self.policy.max_context:
            self.is_cut = True
            self.counts["refused"] += 1
            raise RefusedRequest(
                f"the messages have {size} characters, and a context may have {self.policy.max_context} "
                "tokens (rollout.max_context)",
                "context_length",
            )
        if size <= LONG_TEXT and len(request.messages) <= MANY_MESSAGES:
            return self.history.prompt(request, names)
        return await in_thread(self.history.prompt, request, names)

    def _admitted(self, request: AgentRequest, prompt: Prompt) -> Prompt:
        """The prompt with the start of its answer, unless a limit refuses it."""
        policy = self.policy
        prompt = self._with_opening(request, prompt)
        calls = len(self.history.answers) + self._under_way.total() + request.n
        refused: RefusedRequest | None = None
        if calls > policy.max_calls:
            refused = RefusedRequest(
                f"this attempt may make {policy.max_calls} calls of the policy and has made them "
                "(rollout.max_turns)"
            )
        elif len(prompt.tokens) >= policy.max_context:
            refused = RefusedRequest(
                f"the prompt has {len(prompt.tokens)} tokens, and a context may have "
                f"{policy.max_context} (rollout.max_context)",
                "context_length",
            )
        self.is_cut = refused is not None
        if refused is not None:
            self.counts["refused"] += 1
            raise refused
        return prompt

    def _with_opening(self, request: AgentRequest, prompt: Prompt) -> Prompt:
        """The prompt with the start of the answer that the request demands."""
        opening = self.policy.opening(request)
        if not opening:
            return prompt
        prefilled = self.policy.chat.encode(opening, prompt.tokens[-1])
        text = prompt.text and f"{prompt.text}\n{opening}"
        return replace(prompt, tokens=prompt.tokens + prefilled, text=text, begun=len(prefilled))

    async def _sample(
        self, request: AgentRequest, names: list[str], prompt: Prompt, asked: str, form: TurnForm
    ) -> PolicyAnswer:
        key = draw_key(self.salt, f"{self.task.id}/{asked}", self.number)
        sampling, as_trained = self.policy.sampling_for(request, len(prompt.tokens), form.turn)
        self.counts["sampling_overridden"] += self.policy.overrides(request)
        live, cached = self._live(prompt, key)
        context = self._context(request, prompt)
        chat, start = self.policy.chat, len(prompt.tokens) - prompt.begun
        begun = prompt.tokens[start:]
        turn = DrawnTurn(live, sampling, chat.tokenizer, self.policy.syntax, form.call, begun)
        parts, drawing = turn.parts, asyncio.ensure_future(turn.draw())
        try:
            await asyncio.shield(drawing)
        except asyncio.CancelledError:
            live.context.close()  # what was sampled so far is returned
            self._lives.remove(live)
            with suppress(Exception):
                await drawing
            self.counts["dropped"] += 1
            self._record(prompt, parts, context, is_trained=False)
            raise
        if parts[-1].finish is Finish.ABORT:
            raise RefusedRequest("this attempt has ended; its samples were given up", "not_found")
        nodes = self._record(prompt, parts, context, as_trained)
        tokens = [token for part in parts for token in part.tokens]
        text = nodes[-1].span.text = chat.turn_text(tokens, prompt.tokens[-1])
        if prompt.begun:
            text = chat.turn_text([*begun, *tokens], prompt.tokens[start - 1])
        used = len(prompt.tokens), cached
        told = replace(request, tool_choice="none") if turn.is_lost else request
        answer, message = read_answer(
            self.policy, told, text, parts, f"{key:016x}", used, prompt.tokens
        )
        nodes[-1].span.info["answer"] = answer.id
        self.counts["tool_calls"] += len(answer.calls)
        self.counts["malformed_calls"] += answer.info.get("malformed_calls", 0) + turn.is_lost
        self.contexts[context].answers.append(answer.id)
        before = () if prompt.known is None else prompt.known.reasoning
        done = Answered(
            answer,
            nodes,
            live,
            prompt.tokens + tokens,
            prompt.transcript,
            (*before, answer.reasoning),
            context,
            prompt.role,
            self.contexts[context].thread,
        )
        self._keep(request, names, RecordedCall(asked.rpartition("/")[0], message, done))
        return answer

    def _keep(self, request: AgentRequest, names: list[str], call: RecordedCall) -> None:
        """Remember an answered call, for the request that continues it and for forks."""
        self.history.add(request, names, call.message, call.done)
        self.record.append(call)

    def _replayed(self, request: AgentRequest, names: list[str], asked: str) -> list[PolicyAnswer]:
        """The recorded answers to a request; another request means that the prefix does not repeat."""
        calls = self._replay.pop(asked, None)
        if calls is None:
            why = "the agent's first calls did not repeat, so this fork was given up"
            self.fault = Status.ABORTED, why
            raise RefusedRequest(why)
        self.counts["replayed"] += 1
        prompt = self.history.prompt(request, names)
        context = self._context(request, prompt)
        for call in calls:
            thread = self.contexts[context].thread
            done = replace(call.done, live=None, context=context, role=prompt.role, thread=thread)
            self._own |= dict.fromkeys(done.nodes, context)
            self.contexts[context].answers.append(done.answer.id)
            self._keep(request, names, replace(call, done=done))
        answers = [call.done.answer for call in calls]
        self._given[f"{request.agent}/{asked}"] = answers
        return answers

    def _live(self, prompt: Prompt, key: int) -> tuple[LiveContext, int]:
        """A context with the prompt's tokens that nothing else samples from, and how many were there."""
        known = prompt.known
        if known is not None and known.is_last:
            live = known.live
            assert live is not None
            live.is_busy = True
            live.context.append(prompt.tokens[len(known.tokens) :])
            return live, len(known.tokens)
        free = [one.context for one in self._lives if not one.is_busy]
        if known is None:
            parked, shared = self.forest.park(prompt.tokens, key, free)
            live = LiveContext(parked.fork(key), is_busy=True)
        else:
            context, shared = self.forest.context(prompt.tokens, key, free)
            live = LiveContext(context, is_busy=True)
        self._lives.append(live)
        return live, shared

    def _context(self, request: AgentRequest, prompt: Prompt) -> int:
        """The number of the context that a request belongs to; a new root begins one."""
        if prompt.known is not None:
            return prompt.known.context
        thread = prompt.thread
        if thread is None:
            thread = 1 + max((record.thread for record in self.contexts), default=-1)
        record = ContextRecord(
            prompt.reason, prompt.role, request.agent, prompt.after, prompt.change, thread
        )
        self.contexts.append(record)
        self._num_known.append(len(self.history.conversations))
        self.counts[f"roots/{prompt.reason}"] += 1
        if prompt.summary is not None and prompt.reason == "compaction":
            prompt.summary.role = SUMMARY
        return len(self.contexts) - 1

    def _record(
        self, prompt: Prompt, parts: list[Completion], context: int, is_trained: bool
    ) -> tuple[Node, ...]:
        """Write a request and what was sampled for it into the forest; the nodes of the sample."""
        start = 0 if prompt.known is None else len(prompt.known.tokens)
        behind = None if prompt.known is None else prompt.known.nodes[-1]
        place = self.forest.place(prompt.tokens[start:], behind, self._own, prompt.text)
        nodes: list[Node] = []
        for part in parts:
            if part.tokens or (part is parts[-1] and not nodes):
                span = Span.sampled(-1, part)
                span.mask = span.mask if is_trained else [False] * len(span)
                place = self.forest.add(span, place)
                self._own[place] = context
                nodes.append(place)
        return tuple(nodes)

    def _tips(self) -> list[Node]:
        """The last node of each context, in the order in which they were completed."""
        inner = {above for node in self._own for above in node.path()[:-1]}
        return [node for node in self._own if node not in inner]

    def _settle_roles(self) -> None:
        """Say whose each context and answer is, now that all conversations of the attempt are known."""
        known, answers = self.history.conversations, self.history.answers.values()
        main = self.main = choose_main(known, self.forest.task, self.policy.main)
        settle_roles(main, self.contexts, answers)
        self.counts["no_main"] += main.thread is None and bool(main.threads)
        if main.thread is not None:
            self.counts["user_answers"] += sum(done.role == USER for done in answers)
            settle_beginnings(main.thread, self.contexts, known, self._num_known)

    def _mask_untrained(self) -> None:
        """Mask the answers of roles that are not trained."""
        for done in self.history.answers.values():
            if done.role not in self.policy.trained_roles:
                for node in done.nodes:
                    node.span.mask = [False] * len(node.span)


async def _all(samples: list[Any]) -> list[PolicyAnswer]:
    """All results; the first failure cancels the others."""
    if len(samples) == 1:
        return [await samples[0]]
    async with together() as group:
        tasks = [group.create_task(one) for one in samples]
    return [task.result() for task in tasks]

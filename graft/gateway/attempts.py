"""Attempts of agents inside a rollout: n sessions of one task become one Episode.

The environment only poses the task. Each attempt is a session, and a program (`programs`) that calls it as
its model provider until it is done. What it earned, the first of these that there is:

    the program        a number that it returns, or writes into the file $GRAFT_REWARD_FILE
    its session        POST /graft/sessions/ID/reward, client.reward(...); added to the above
    task.reward        on the main agent's last context (`speakers.main_choice`)
    the environment    its step with the last answer, where that ends the episode

On a machine of the environment (`AgentHost`) the policy can do what the program can: there only the last two
count, and the step grades the machine that the program has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

from graft.envs.checked import as_turn
from graft.gateway.address import GatewayAddress
from graft.gateway.client import AgentClient
from graft.gateway.forest import CallForest, Node
from graft.gateway.gateway import Gateway
from graft.gateway.history import RecordedCall
from graft.gateway.programs import AgentProgram, CommandAgent, Outcome, is_crash
from graft.gateway.roots import TRAINED_ROLES
from graft.gateway.session import AgentSession
from graft.gateway.speakers.main_choice import MainPattern, explain_no_main
from graft.gateway.speakers.routes import ModelRoutes
from graft.protocols import Engine, Env
from graft.rollout.failure import RolloutFailure, boundary
from graft.rollout.setup import ProgramAttempt, RolloutSetup
from graft.rollout.user_calls import agent_host, call, compute_reward, last_info, try_close
from graft.types import Author, Episode, Leaf, Span, Status, Task, Trajectory
from graft.user_code import UserCodeError, UserObject

MAX_SHOWN_OUTPUT = 2_000
"""Characters of a crashed program's output in the info of its leaf: the end."""
MakeEnv = Callable[[], Awaitable[Env]]


class AgentAttempts:
    """The agent of a RolloutSetup: the same program for every task.

    seconds         that one attempt may take
    concurrency     attempts at a time, over all tasks; 0: as many as the program suggests
    honour_client   sample with the temperature that clients ask for; see Gateway
    trained_roles   whose answers are trained: main, sub-agent, summary, user
    main            what the conversation has that task.reward reads
    provider_tools  drop or refuse tools that a provider would run
    formats         enforce the formats that clients ask for, or ask for them in the prompt
    on_crash        of an attempt whose program crashes on an answer: zero, its reward; or drop it
    routes          which model answers which name; None: the policy answers all
    frozen          engines of the frozen models among them, by path
    """

    def __init__(
        self,
        program: AgentProgram,
        address: GatewayAddress,
        *,
        seconds: float = 1800.0,
        concurrency: int = 0,
        honour_client: bool = False,
        trained_roles: Sequence[str] = TRAINED_ROLES,
        main: MainPattern = MainPattern(),
        on_crash: str = "zero",
        provider_tools: str = "drop",
        formats: str = "enforce",
        routes: ModelRoutes | None = None,
        frozen: Mapping[str, Engine] | None = None,
    ) -> None:
        self.program, self.address = program, address
        self.seconds, self.concurrency = seconds, concurrency or program.concurrency
        self.honour_client, self.trained_roles = honour_client, tuple(trained_roles)
        self.main, self.routes, self.frozen = main, routes or ModelRoutes(), dict(frozen or {})
        self.on_crash, self.provider_tools, self.formats = on_crash, provider_tools, formats
        self._gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )
        self._gateways: dict[Any, Gateway] = {}

    def open(
        self, task: Task, setup: RolloutSetup, fresh_env: MakeEnv, has_machine: bool = False
    ) -> AgentGroup:
        """The attempts at one task that was posed; `fresh_env` makes its environment again."""
        return AgentGroup(self, task, setup, fresh_env, has_machine=has_machine)

    def gateway(self, setup: RolloutSetup, kind: type[Gateway] = Gateway) -> Gateway:
        """The gateway with the engine and the limits of a setup."""
        limits = setup.sampling, setup.max_context, setup.max_turns, setup.deadline
        key = id(setup.engine), id(setup.chat), *limits, kind
        if key not in self._gateways:
            self._gateways[key] = kind(
                setup.engine,
                setup.chat,
                sampling=setup.sampling,
                max_context=setup.max_context,
                max_calls=setup.max_turns,
                deadline=setup.deadline,
                honour_client=self.honour_client,
                trained_roles=self.trained_roles,
                main=self.main,
                provider_tools=self.provider_tools,
                formats=self.formats,
                routes=self.routes,
                frozen=self.frozen,
            )
        return self._gateways[key]

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A place among the attempts that run at a time."""
        gate = self._gates.setdefault(
            asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency)
        )
        async with gate:
            yield

    def close(self) -> None:
        self.address.close()
        for engine in self.frozen.values():
            engine.close()


class AgentGroup:
    """The attempts at one task; they share a forest."""

    def __init__(
        self,
        agents: AgentAttempts,
        task: Task,
        setup: RolloutSetup,
        fresh_env: MakeEnv,
        kind: type[Gateway] = Gateway,
        has_machine: bool = False,
    ) -> None:
        self.agents, self.setup, self.fresh_env = agents, setup, fresh_env
        self.runs_inside = has_machine and isinstance(agents.program, CommandAgent)
        """Whether the program runs on a machine of the environment, which then grades it."""
        self.gateway = agents.gateway(setup, kind)
        self.forest: CallForest = self.gateway.forest(task)

    def attempt(self, number: int, replay: Sequence[RecordedCall] = ()) -> AgentAttempt:
        """replay: calls of another attempt that this one repeats before it samples."""
        return AgentAttempt(self, number, replay)

    def fork(self, number: int, source: ProgramAttempt, num_replayed: int) -> AgentAttempt:
        """An attempt that repeats the first calls of a complete one."""
        assert isinstance(source, AgentAttempt)
        return AgentAttempt(self, number, source.record[:num_replayed], source)

    def drop(self, attempt: ProgramAttempt) -> None:
        """Take out a fork that was given up: it has sampled nothing."""
        leaves = self.forest.leaves
        leaves[:] = [one for one in leaves if one[2] is not attempt.leaf]

    def episode(self) -> Episode:
        return self.forest.episode()

    def close(self) -> None:
        self.forest.close()


class AgentAttempt:
    """One attempt, from the start of the program to its leaf.

    Its first calls get the answers of `replay`, the beginning of the record of `source`, which it forks.
    """

    def __init__(
        self,
        group: AgentGroup,
        number: int,
        replay: Sequence[RecordedCall] = (),
        source: AgentAttempt | None = None,
    ) -> None:
        self.group, self.number, self.replay = group, number, replay
        self.source: ProgramAttempt | None = source
        self.num_replayed = len(replay)
        self.session: AgentSession | None = None
        self.env: Env | None = None
        """The environment on whose machine the program runs."""
        self.leaf: Leaf | None = None
        self.failure: RolloutFailure | None = None

    @property
    def record(self) -> list[RecordedCall]:
        """Its answered calls."""
        return [] if self.session is None else self.session.record

    @property
    def calls(self) -> list[list[Span]]:
        """The spans that were sampled for each call, in the order of their completion."""
        return [[node.span for node in call.done.nodes] for call in self.record]

    @property
    def is_given_up(self) -> bool:
        """Whether a fork did not come to a call of its own."""
        return self.source is not None and len(self.record) <= self.num_replayed

    async def finish(self) -> None:
        """Run the program to its end, and settle what the attempt earned."""
        group, agents = self.group, self.group.agents
        async with agents.turn(), agents.address.serving(group.gateway):
            session = self.session = group.gateway.open(
                group.forest.task,
                forest=group.forest,
                salt=group.setup.salt,
                number=self.number,
                replay=self.replay,
                takes_rewards=not group.runs_inside,
            )
            try:
                outcome = await self._run(session)
                self.leaf = await self._settle(session, outcome)
            finally:
                session.end(Status.ABORTED)  # where it was cancelled; else it has ended
                if self.env is not None:
                    try_close(self.env)

    async def _run(self, session: AgentSession) -> Outcome:
        agents, task = self.group.agents, self.group.forest.task
        client = AgentClient(session, *agents.address.urls(session))
        try:
            async with boundary(f"env {task.env} agent", agents.seconds, "agent.seconds"):
                if self.group.runs_inside:
                    self.env = await self.group.fresh_env()
                    client.host = agent_host(self.env)
                outcome = await agents.program(task, client)
                if outcome.reward is not None and not self.is_given_up:
                    session.reward(outcome.reward)
                return outcome
        except RolloutFailure as failure:
            self.failure = failure
            return Outcome()
        finally:
            with suppress(Exception):  # connections of an attempt that is over
                await client.close()

    async def _settle(self, session: AgentSession, outcome: Outcome) -> Leaf:
        failure = self.failure
        info = dict(outcome.info)
        status = Status.DONE
        if failure is not None:
            # an agent that gives up because a limit or a fault refused its call: the session knows which
            is_refused = session.is_cut or session.fault is not None
            if session.refusal and not is_refused and is_crash(failure):
                failure.add(f"the gateway had refused its last request: {session.refusal}")
            info["error"] = str(failure)
            is_cause = is_refused and failure.status is Status.ENV_ERROR
            status = Status.DONE if is_cause else failure.status
            if not is_refused and is_crash(failure) and session.history.answers:
                session.counts["crashes"] += 1
                info["output"] = failure.trace[-MAX_SHOWN_OUTPUT:]
                status = self._status_of_crash(session)
        if self.is_given_up:  # its spans are those of another attempt: nothing is written into them
            return session.end(Status.ABORTED)
        leaf = session.end(status, last_info(info))
        if failure is not None and leaf.status not in (Status.DONE, Status.TRUNCATED):
            failure.write(self._tips(leaf)[-1].span.info)
        if leaf.status in (Status.DONE, Status.TRUNCATED) and not session.is_rewarded:
            try:
                await self._grade(session, leaf)
            except RolloutFailure as failure:
                self.failure, leaf.status = failure, failure.status
                leaf.info["error"] = str(failure)
                failure.write(self._tips(leaf)[-1].span.info)
        return leaf

    def _status_of_crash(self, session: AgentSession) -> Status:
        """What becomes of an attempt that crashed; a refused request is no fault of the policy."""
        if session.refusal or self.group.agents.on_crash == "drop":
            return Status.ENV_ERROR
        session.forfeit()
        return Status.CRASHED

    async def _grade(self, session: AgentSession, leaf: Leaf) -> None:
        """The reward function of the setup, else the environment's step, on the main agent's last context."""
        setup, task = self.group.setup, self.group.forest.task
        tips = self._tips(leaf)
        if session.main.thread is None:
            raise RolloutFailure(
                Status.ENV_ERROR, explain_no_main(session.main, self.group.agents.main)
            )
        threads = [one.get("thread") for one in leaf.info.get("contexts", [])]
        place = len(threads) - 1 - threads[::-1].index(session.main.thread)
        spans = [node.span for node in tips[place].path()]
        trajectory = Trajectory(Episode(task, spans, [leaf]), 0, place, spans)
        if setup.reward is not None:
            async with boundary(f"the reward of {task.id}", setup.deadline):
                value = await compute_reward(setup.reward, task, trajectory)
        else:
            value = await self._env_reward(trajectory.answer_text, leaf)
        leaf.reward += value
        sampled = [one for one in spans if one.author is Author.POLICY]
        if sampled:  # turns add up to the leaf's reward
            sampled[-1].reward += value

    async def _env_reward(self, answer: str, leaf: Leaf) -> float:
        setup, task = self.group.setup, self.group.forest.task
        env = self.env or await self.group.fresh_env()
        # tools around a host are a policy's, and an agent's answer may look like a call of one
        acting = agent_host(self.env) or env
        try:
            async with boundary(f"env {task.env} step", setup.deadline):
                turn = as_turn(await call(env, acting.step, answer), UserObject(env, "env", "step"))
                if turn.is_over and turn.info.get("is_graded", True):
                    if self.env is not None:
                        leaf.info |= last_info(turn.info)
                    return turn.reward
                raise UserCodeError(
                    f"the attempt of the agent at task {task.id!r} has no reward: the agent returned none "
                    f"and posted none, there is no task.reward, and env {task.env!r} does not grade a single "
                    "answer. Return a number from the agent, write one into the file $GRAFT_REWARD_FILE, "
                    "POST /graft/sessions/ID/reward, or set task.reward"
                )
        finally:
            if env is not self.env:
                try_close(env)

    def _tips(self, leaf: Leaf) -> list[Node]:
        return next(tips for _, tips, one in self.group.forest.leaves if one is leaf)

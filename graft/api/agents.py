"""Agents that exist already, from Python: functions as attempts, and an address for any client.

@graft.rollout                                     with graft.agent(engine) as gateway:
async def agent(task, client):                         with gateway.session("2+3?") as session:
    said = await client.chat(task.prompt)                  run_my_agent(session.base_url, session.key)
    return float("5" in said["content"])                   session.reward(1.0)
graft.collect(engine, "arithmetic", agent=agent)       learner.step(gateway.episodes())
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from graft.api.collect import TEMPERATURE, TRUNCATION, AgentLike, collect
from graft.api.engine import PolicyEngine, engine_for
from graft.api.policy import Policy
from graft.api.speakers import ModelRuleLike, frozen_samplers, speaker_options
from graft.envs.checked import why_no_message
from graft.signatures import explain_arguments
from graft.types import Episode, Message, Sampling, Status, Task
from graft.user_code import UserCodeError, as_reward, describe_value

T = TypeVar("T")
NOTHING: Mapping[str, Any] = {}
ROLES = ("main", "sub-agent", "summary")
"""Whose answers are trained unless one says otherwise; "user", a simulated one, may be added."""


class RolloutFunction:
    """An agent with its limits, which is a function or a command; what `graft.rollout` makes."""

    def __init__(self, function: Any, **options: Any) -> None:
        from graft.gateway.programs import FunctionAgent, make_program

        self.function, self.options = function, options
        self.program = make_program(function)
        if isinstance(self.program, FunctionAgent):
            self.program.options = options
        self.__name__ = getattr(function, "__name__", "agent")
        self.__doc__ = function.__doc__ if callable(function) else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself."""
        return self.function(*args, **kwargs)

    def collect(self, engine: PolicyEngine, *args: Any, **kwargs: Any) -> list[Episode]:
        """`graft.collect` with this agent."""
        return collect(engine, *args, agent=self, **kwargs)


@explain_arguments
def rollout(
    function: AgentLike | None = None,
    *,
    seconds: float = 1800.0,
    concurrency: int = 0,
    roles: Sequence[str] = ROLES,
    client_sampling: bool = False,
    on_crash: str = "zero",
    main: Mapping[str, str] = NOTHING,
    models: Mapping[str, ModelRuleLike] = NOTHING,
    embeddings: Mapping[str, str] = NOTHING,
) -> Any:
    """Make a function an agent: it gets a task and a client of the policy, and returns a reward.

    >>> @graft.rollout(seconds=60)
    ... async def agent(task, client):
    ...     said = await client.chat(task.prompt)
    ...     return float("5" in said["content"])
    >>> episodes = graft.collect(engine, "arithmetic", agent=agent)

    function         (task, client) or (task): async, or blocking, which runs on a thread; or a command or
                     "module:function", as in a recipe
    seconds          that one attempt may take
    concurrency      attempts at a time; 0: 512
    roles            whose answers are trained: main, sub-agent, summary, user
    client_sampling  sample with the temperature that the function asks for; answers that are drawn
                     otherwise than `collect` says are then not trained
    on_crash         zero: an attempt in which the function raises after an answer is trained with
                     reward 0; drop: it is not trained
    main             what the agent's own conversation has, which a reward reads: shell patterns of model,
                     system or tools, such as {"tools": "bash"}
    models           which model answers a name or pattern: "policy", {"endpoint": URL}, or a graft.Engine
                     whose policy is not trained
    embeddings       {"endpoint": URL} of the server that embeds texts
    """
    options = {
        "seconds": seconds,
        "concurrency": concurrency,
        "trained_roles": tuple(roles),
        "honour_client": client_sampling,
        "on_crash": on_crash,
        **speaker_options(main, models, embeddings),
    }
    if on_crash not in ("zero", "drop"):
        raise UserCodeError(f"graft.rollout(on_crash={on_crash!r}): known are zero and drop")
    if function is None:
        return lambda given: RolloutFunction(given, **options)
    if not callable(function) and not isinstance(function, str | Sequence):
        raise UserCodeError(
            f"graft.rollout takes a function or a command, not {describe_value(function)}"
        )
    return RolloutFunction(function, **options)


class OpenedSession:
    """One attempt of an agent, for the program that starts it."""

    def __init__(self, served: ServedAgents, held: Any) -> None:
        self._served, self._held = served, held
        self.id, self.key = held.id, held.key
        self.base_url, self.anthropic_base_url = served.address.urls(held)

    @property
    def task(self) -> Task:
        return self._held.forest.task

    def reward(self, value: float, response_id: str | None = None) -> None:
        """Add to the attempt's reward; with `response_id` one answer has earned it."""
        from graft.gateway.dialects.dialect import answer_id

        named = None if response_id is None else answer_id(response_id)
        number = as_reward(value, "session.reward()", verb="was given")
        self._served.on_loop(lambda: self._held.reward(number, named))

    def end(self, status: str = "done") -> None:
        """The attempt is over; ending it twice is fine."""
        if status not in {*Status}:
            raise UserCodeError(f"end({status!r}): no such status; known: {', '.join(Status)}")
        self._served.on_loop(lambda: self._served.sessions.finish(self._held, Status(status)))

    def __enter__(self) -> OpenedSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end("done" if kind is None else "env_error")


class ServedAgents:
    """A policy behind an address, while a `with graft.agent(...)` block lasts."""

    def __init__(
        self, engine: PolicyEngine, host: str, port: int, token: str = "", **limits: Any
    ) -> None:
        from graft.gateway.address import GatewayAddress
        from graft.gateway.gateway import Gateway
        from graft.gateway.open_sessions import OpenSessions

        self.engine = engine
        self.gateway = Gateway(engine.sampler, engine.policy.chat, **limits)
        self.sessions = OpenSessions(self.gateway, salt=engine.seed, on_change=self._hold)
        self.address = GatewayAddress(host, port, token)
        self.address.app.source = self.sessions
        self._holding = ExitStack()
        self._is_held = False
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="graft-gateway", daemon=True)

    @property
    def url(self) -> str:
        """The address of the server: http://127.0.0.1:41987"""
        return self.address.url

    @property
    def token(self) -> str:
        """Opens sessions over HTTP: POST /graft/sessions."""
        return self.address.token

    def session(self, task: Task | str | Sequence[Message] | None = None) -> OpenedSession:
        """A new attempt: at a Task (those with one id are one group), at a prompt, or at nothing known."""
        if isinstance(task, str):
            task = Task(task, "gateway", ({"role": "user", "content": task},))
        elif task is not None and not isinstance(task, Task):
            if not isinstance(task, Sequence) or any(map(why_no_message, task)):
                raise UserCodeError(
                    f"session() was given {describe_value(task)}; give a graft.Task, a text, or "
                    "a list of messages: "
                    "[{'role': 'user', 'content': '...'}]"
                )
            messages = tuple(task)
            task = Task(str(messages), "gateway", messages)
        given = task
        held = self.on_loop(lambda: self.sessions.begin(given, {}))
        return OpenedSession(self, held)

    def episodes(self) -> list[Episode]:
        """Those of the tasks whose sessions have all ended, each once; for `learner.step`."""
        drawn: Sampling = self.gateway.policy.sampling
        made = self.on_loop(self.sessions.take)
        for episode in made:
            how = {
                TEMPERATURE: drawn.temperature,
                TRUNCATION: [drawn.top_k, drawn.top_p],
            }
            episode.spans[0].info |= how
        return made

    def on_loop(self, work: Callable[[], T]) -> T:
        """The result of a call on the gateway's event loop."""
        if not self._thread.is_alive():
            raise UserCodeError("this gateway is closed; open another one: graft.agent(...)")

        async def call() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def start(self) -> None:
        """Listen, on a thread of its own."""
        self._thread.start()
        self._started.result()

    def finish(self) -> None:
        """End the sessions that are open."""
        self.on_loop(self.sessions.close)

    def close(self) -> None:
        """End what still runs, and free the address."""
        if self._thread.is_alive():
            self.finish()
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self.address.close()

    def _run(self) -> None:
        async def serve() -> None:
            async with self.address.serving(self.gateway):
                self._started.set_result(None)
                await self._stop.wait()

        try:
            self._loop.run_until_complete(serve())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)
        finally:
            self._loop.close()

    def _hold(self, num_running: int) -> None:
        """Keep the weights as they are while a session is open: `learner.step` refuses meanwhile."""
        if num_running and not self._is_held:
            self._holding.enter_context(self.engine.sampling(self))
        elif not num_running:
            self._holding.close()
        self._is_held = bool(num_running)


@explain_arguments
@contextmanager
def agent(
    policy: Policy | PolicyEngine,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_tokens: int = 256,
    max_calls: int = 100,
    max_context: int | None = None,
    roles: Sequence[str] = ROLES,
    client_sampling: bool = False,
    main: Mapping[str, str] = NOTHING,
    models: Mapping[str, ModelRuleLike] = NOTHING,
    embeddings: Mapping[str, str] = NOTHING,
    seed: int = 0,
    host: str = "127.0.0.1",
    port: int = 0,
    deadline: float = 600.0,
    token: str = "",
) -> Iterator[ServedAgents]:
    """Serve a policy to agents that exist already, and keep their calls token-exactly as episodes.

    >>> with graft.agent(policy) as gateway:
    ...     with gateway.session("What is 2+3?") as session:
    ...         api = openai.OpenAI(base_url=session.base_url, api_key=session.key)
    ...         ...
    ...         session.reward(1.0)
    ...     learner.step(gateway.episodes())

    While a session is open the weights stay as they are: end it before `learner.step`. Sessions can also be
    opened over HTTP: POST gateway.url/graft/sessions, with gateway.token as the bearer's.

    policy           a Policy, or an Engine of one
    temperature      of sampling; clients that ask for another get this one
    top_p            below 1: only the likeliest tokens that together have this probability
    top_k            only this number of the likeliest tokens; 0: all
    max_tokens       sampled tokens per answer
    max_calls        answers per session
    max_context      tokens of one context, the answer included; None: 4096, or the model's window
    roles            whose answers are trained: main, sub-agent, summary, user
    client_sampling  honour the client's temperature, top_p and top_k; such answers are not trained
    main             what the agent's own conversation has, as of `graft.rollout`
    models           which model answers a name, as of `graft.rollout`
    embeddings       the server that embeds texts, as of `graft.rollout`
    seed             of the draws, where `policy` is no Engine
    host             address to listen on
    port             0: a free one
    deadline         seconds that one answer may take
    token            opens sessions over HTTP; "": a new one
    """
    rules = speaker_options(main, models, embeddings)
    with engine_for(policy, seed) as engine, frozen_samplers(engine, rules) as speakers:
        window = engine.policy.model.shape.max_positions
        served = ServedAgents(
            engine,
            host,
            port,
            token,
            sampling=Sampling(temperature, top_k, top_p, max_tokens=max_tokens),
            max_context=min(4096, window) if max_context is None else max_context,
            max_calls=max_calls,
            deadline=deadline,
            honour_client=client_sampling,
            trained_roles=roles,
            **speakers,
        )
        try:
            served.start()
            yield served
        finally:
            served.close()

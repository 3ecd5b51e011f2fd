"""A `verifiers` environment as a graft env: its requests to a model go to our policy.

A verifiers env drives the episode: its harness calls a model, its task scores the trace at the end.
Here the episode runs in the background against a local model server, and each request to that server
is an observation.

    reset(seed) -> the messages of the first request
    step(text)  -> answers it; the next request, or the rewards of the finished episode

A request that extends the last one and its answer appends the new messages. Any other (a sub-agent's, a
second agent's, a history that the harness has rewritten) is a whole prompt, and starts another context.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from graft.envs.plain import plain
from graft.tools.event_loop import loop, start
from graft.trust import check_name
from graft.types import Message, Turn
from graft_interop.external import ExternalEnv
from graft_interop.messages import added, as_assistant, text_of
from graft_interop.model_server import ModelRequest, ModelServer

POLL_SECONDS = 0.05  # between checks of whether the episode has ended


class VerifiersEnv(ExternalEnv):
    """Calls to the env's tools are written in the `style` of `graft.text.parse.tool_calls`.

    An observation after the first is the text of the messages since the policy's answer; they are in
    `info["messages"]`, the offered tools in `info["tools"]` of the reset, all rewards by name in the
    last info. Where a request does not extend the last one, `info["observe_as"]` is "messages", and
    `info` has all its messages and tools. An agent that is not trainable needs its own model. It does
    not fork: the episode runs in the harness's own processes.
    """

    blocking = True
    forkable = False

    def __init__(
        self,
        env: Any,
        *,
        style: str = "hermes",
        max_tasks: int = 1000,
        max_turns: int | None = None,
        timeout: float = 300.0,
    ) -> None:
        """`env`: a verifiers Env, or the id of an installed taskset.

        An id gets verifiers' chat harness without tools in a local process. At most `max_tasks` tasks
        are loaded; the seed picks one of them. `timeout`: seconds the env may take between
        an answer and its next request, and the policy between a request and its answer.
        """
        super().__init__(max_turns)
        self.env: Any = load(env) if isinstance(env, str) else env
        self.style = style
        self.timeout = timeout
        self.tasks = list(itertools.islice(iter(self.env.taskset), max_tasks))
        if not self.tasks:
            raise ValueError("the taskset of this verifiers env is empty")
        self.server = ModelServer(timeout)
        self.request: ModelRequest | None = None
        self.traces: dict[str, Any] = {}
        """The traces of the episode's agents, by the session id of their requests."""
        self.episode: Future[Any] | None = None
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._stop = asyncio.Event()
        self._service: Future[None] | None = None

    def begin(self, seed: int) -> tuple[list[Message], Mapping[str, Any]]:
        self._cancel()
        self._serve()
        task = self.tasks[self.rng.randrange(len(self.tasks))]
        self.episode = start(self._play(task))
        request = self._next_request()
        if request is None:
            fault = error_of(self.episode.result())
            raise RuntimeError(f"the verifiers episode ended before its first request: {fault}")
        self.answer = getattr(task.data, "answer", None)
        return request.messages, {"task": task.data.idx, "tools": request.tools}

    def respond(self, action: str) -> Turn:
        assert self.request is not None and self.episode is not None  # reset came first
        last, answer = self.request, as_assistant(action, self.style, self.request)
        last.answer(answer)
        request = self._next_request()
        if request is None:
            return self._last_turn(self.episode.result())
        fresh = added(last, answer, request)
        texts = [text_of(message) for message in fresh or request.messages]
        if fresh is None:
            whole = {"messages": request.messages, "tools": request.tools}
            return Turn("\n".join(texts), info={**whole, "observe_as": "messages"})
        role = fresh[0]["role"]
        several = {"tool_results": texts} if role == "tool" else {}
        return Turn("\n".join(texts), info={"messages": fresh, "observe_as": role, **several})

    async def _play(self, task: Any) -> Any:
        self._is_idle.clear()
        self.traces = {}

        def keep_trace(trace: Any) -> None:
            self.traces[trace.id] = trace

        try:
            return await self.env.run_episode(task, context(self.server.url), on_trace=keep_trace)
        finally:
            self._is_idle.set()

    def _last_turn(self, episode: Any) -> Turn:
        traces = [trace for trace in episode.traces if getattr(trace.agent, "trainable", True)]
        rewards = {name: one for trace in traces for name, one in trace.rewards.items()}
        info: dict[str, Any] = {
            "rewards": {name: None if one is None else one.value for name, one in rewards.items()},
            "metrics": {name: value for trace in traces for name, value in trace.metrics.items()},
            "stop": traces[0].stop_condition if traces else None,
        }
        if fault := error_of(episode):
            return Turn("", truncated=True, info={**info, "error": fault})
        reward = sum(trace.reward for trace in traces) / max(1, len(traces))
        is_truncated = any(trace.is_truncated for trace in traces)
        return Turn("", reward, not is_truncated, is_truncated, plain(info))

    def _next_request(self) -> ModelRequest | None:
        """The next request of the episode; None if it has ended."""
        assert self.episode is not None
        ends = time.monotonic() + self.timeout
        while time.monotonic() < ends:
            try:
                self.request = self.server.requests.get(timeout=POLL_SECONDS)
                self._refuse_untrained(self.request)
                return self.request
            except queue.Empty:
                if self.episode.done():
                    self.request = None
                    return None
        self._cancel()
        raise TimeoutError(f"the verifiers env took more than {self.timeout:g} s for a turn")

    def _refuse_untrained(self, request: ModelRequest) -> None:
        """The policy must not answer for an agent that is not trainable: its tokens would be trained."""
        trace = self.traces.get(request.session)
        agent = getattr(trace, "agent", None)
        if agent is None or getattr(agent, "trainable", True):
            return
        self._cancel()
        raise ValueError(
            f"the verifiers agent {agent.name!r} is not trainable, and its requests reach the policy because "
            f"it has no model; give it one in the environment's config: {agent.name}={{model: ..., "
            "client: {base_url: ...}}"
        )

    def _serve(self) -> None:
        """Keep the env's own servers up from the first episode to close()."""
        if self._service is not None:
            return
        is_up: Future[None] = Future()

        async def serve() -> None:
            try:
                async with self.env.serving():
                    is_up.set_result(None)
                    await self._stop.wait()
            except BaseException as fault:
                if is_up.done():
                    raise
                is_up.set_exception(fault)

        self._service = asyncio.run_coroutine_threadsafe(serve(), loop())
        is_up.result(self.timeout)

    def _cancel(self) -> None:
        """Cancel the running episode, if there is one."""
        if self.episode is not None and not self.episode.done():
            self.episode.cancel()
        if self.request is not None:
            self.request.refuse()
        # its last requests must not be mistaken for the first ones of the next episode
        self._is_idle.wait(self.timeout)
        while not self.server.requests.empty():
            self.server.requests.get().refuse()
        self.request = self.episode = None

    def close(self) -> None:
        self._cancel()
        if self._service is not None:
            loop().call_soon_threadsafe(self._stop.set)
            self._service.result(self.timeout)
            self._service = None
        self.server.close()


def error_of(episode: Any) -> str:
    """Why an episode failed, "" if it did not."""
    faults = [*episode.errors, *(one for trace in episode.traces for one in trace.errors)]
    if not faults or episode.ok:
        return ""
    return f"{faults[-1].type}: {faults[-1].message}"


def context(url: str) -> Any:
    """verifiers' context for a model at this address."""
    vf = library()
    client = vf.EvalClientConfig(base_url=url, api_key_var="GRAFT_NO_API_KEY")
    return vf.ModelContext(model="policy", client=client)


def load(taskset_id: str) -> Any:
    """The env of an installed taskset, with everything on this machine."""
    check_name(taskset_id, "taskset of verifiers")
    library()
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils import loaders

    agent: dict[str, Any] = {"runtime": {"type": "subprocess"}}
    if loaders.default_harness_id(taskset_id) == "bash":  # the taskset has no harness of its own
        agent["harness"] = {"id": "null"}
    agents = agent_config_fields(loaders.env_config_type(taskset_id).model_validate({}))
    config = {"taskset": {"id": taskset_id}, **dict.fromkeys(agents, agent)}
    return loaders.load_environment(loaders.resolve_env_config(config))


def library() -> Any:
    try:
        import verifiers.v1
    except ImportError as error:
        raise ImportError(
            'verifiers is not installed: pip install "graft-rl[verifiers]"'
        ) from error
    return verifiers.v1

"""A `verifiers` environment as a graft env: whatever it asks its model, it asks our policy.

A verifiers env runs by itself: its harness calls a model, its task scores the trace at the end. So
we turn it around: the episode runs in the background against a model server of ours, and each
request to that server is an observation.

    reset(seed) -> the messages of the first request
    step(text)  -> its answer goes out; the next request, or the rewards of the finished episode

A request that goes on from the last one and its answer appends what is new. Any other (a sub-agent's, a
second agent's, a history that the harness has rewritten) is a whole prompt, and a context of its own.
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

from graft.envs.interop.external import ExternalEnv, plain
from graft.envs.interop.messages import added, as_assistant, text_of
from graft.envs.interop.model_server import ModelServer, Question
from graft.tools.background import loop
from graft.types import Message, Turn

GLANCE = 0.05  # seconds between looks at whether the episode has ended


class VerifiersEnv(ExternalEnv):
    """Calls to the env's tools are written in the `style` of `graft.text.parse.tool_calls`.

    An observation after the first is the text of what came since the policy's answer; its messages
    are in `info["messages"]`, the tools on offer in `info["tools"]` of the reset, all rewards by
    name in the last info. Where a request does not go on from the last one, `info["observe_as"]` is
    "messages", and `info` has all messages and tools of it. An agent that is not to be trained needs a
    model of its own. It does not fork: the episode runs in other people's processes.
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

        An id gets verifiers' tool-less chat harness in a local process. `max_tasks` bounds how many
        tasks are loaded; the seed picks one of them. `timeout`: seconds the env may take between
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
        self.question: Question | None = None
        self.traces: dict[str, Any] = {}
        """The runs of the episode's agents, by the session that their requests name."""
        self.episode: Future[Any] | None = None
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._stop = asyncio.Event()
        self._service: Future[None] | None = None

    def begin(self, seed: int) -> tuple[list[Message], Mapping[str, Any]]:
        self._break_off()
        self._serve()
        task = self.tasks[self.rng.randrange(len(self.tasks))]
        self.episode = asyncio.run_coroutine_threadsafe(self._play(task), loop())
        question = self._await_question()
        if question is None:
            fault = error_of(self.episode.result())
            raise RuntimeError(f"the verifiers episode ended before it asked anything: {fault}")
        self.answer = getattr(task.data, "answer", None)
        return question.messages, {"task": task.data.idx, "tools": question.tools}

    def respond(self, action: str) -> Turn:
        assert self.question is not None and self.episode is not None  # reset came first
        asked, answer = self.question, as_assistant(action, self.style, self.question)
        asked.answer(answer)
        question = self._await_question()
        if question is None:
            return self._conclude(self.episode.result())
        fresh = added(asked, answer, question)
        texts = [text_of(message) for message in fresh or question.messages]
        if fresh is None:
            whole = {"messages": question.messages, "tools": question.tools}
            return Turn("\n".join(texts), info={**whole, "observe_as": "messages"})
        role = fresh[0]["role"]
        several = {"tool_results": texts} if role == "tool" else {}
        return Turn("\n".join(texts), info={"messages": fresh, "observe_as": role, **several})

    async def _play(self, task: Any) -> Any:
        self._is_idle.clear()
        self.traces = {}

        def begun(trace: Any) -> None:
            self.traces[trace.id] = trace

        try:
            return await self.env.run_episode(task, context(self.server.url), on_trace=begun)
        finally:
            self._is_idle.set()

    def _conclude(self, episode: Any) -> Turn:
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

    def _await_question(self) -> Question | None:
        """The next request of the episode; None if it has ended."""
        assert self.episode is not None
        ends = time.monotonic() + self.timeout
        while time.monotonic() < ends:
            try:
                self.question = self.server.questions.get(timeout=GLANCE)
                self._refuse_untrained(self.question)
                return self.question
            except queue.Empty:
                if self.episode.done():
                    self.question = None
                    return None
        self._break_off()
        raise TimeoutError(f"the verifiers env took more than {self.timeout:g} s for a turn")

    def _refuse_untrained(self, question: Question) -> None:
        """The policy must not stand in for an agent that is fixed: its words would be trained."""
        trace = self.traces.get(question.session)
        agent = getattr(trace, "agent", None)
        if agent is None or getattr(agent, "trainable", True):
            return
        self._break_off()
        raise ValueError(
            f"the verifiers agent {agent.name!r} is not to be trained, and asks the policy since it has no "
            f"model of its own; give it one in the environment's config: {agent.name}={{model: ..., client: "
            "{base_url: ...}}"
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

    def _break_off(self) -> None:
        """End an episode that nobody will play on."""
        if self.episode is not None and not self.episode.done():
            self.episode.cancel()
        if self.question is not None:
            self.question.refuse()
        # its last requests must not be taken for the first ones of the next episode
        self._is_idle.wait(self.timeout)
        while not self.server.questions.empty():
            self.server.questions.get().refuse()
        self.question = self.episode = None

    def close(self) -> None:
        self._break_off()
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
    """Says to verifiers: the model is at this address."""
    vf = library()
    client = vf.EvalClientConfig(base_url=url, api_key_var="GRAFT_NO_API_KEY")
    return vf.ModelContext(model="policy", client=client)


def load(taskset_id: str) -> Any:
    """The env that an installed taskset stands for, with everything on this machine."""
    library()
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils import loaders

    agent: dict[str, Any] = {"runtime": {"type": "subprocess"}}
    if loaders.default_harness_id(taskset_id) == "bash":  # it brings none of its own
        agent["harness"] = {"id": "null"}
    seats = agent_config_fields(loaders.env_config_type(taskset_id).model_validate({}))
    config = {"taskset": {"id": taskset_id}, **dict.fromkeys(seats, agent)}
    return loaders.load_environment(loaders.resolve_env_config(config))


def library() -> Any:
    try:
        import verifiers.v1
    except ImportError as error:
        raise ImportError(
            'verifiers is not installed: pip install "graft-rl[verifiers]"'
        ) from error
    return verifiers.v1

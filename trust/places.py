"""The places an oddity can come from: an environment, tool, reward, agent, posted reward or request.

`PLACES["reward"](math.nan)` collects two attempts, of which the reward of one is not a number.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import cache
from typing import Any

from graft.envs.base import BaseEnv
from graft.envs.tool_env import ToolEnv
from graft.gateway.address import GatewayAddress
from graft.gateway.attempts import AgentAttempts
from graft.gateway.programs import FunctionAgent
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.tools.function import FunctionTool
from graft.types import Episode, Sampling, Task, Turn
from tests.gateway.tiny import tiny_engine, tiny_tokenizer
from tests.rollout.test_rollout_tool_faults import BYTES, Scripted
from trust.oddities import Oddity, Raised, give

BAD, FINE = "<odd>BAD</odd>", "42"


class Question(BaseEnv):
    """Ends with its first answer; the odd attempt gets what `odd` makes."""

    env_id = "question"
    blocking = False

    place, oddity = "", None  # of the class: a fork does not copy them
    acted = ""
    """All actions of the attempt: the copy that only poses has none."""

    def reset(self, seed: int | None = None) -> Any:
        if self.place == "env reset" and seed == 1:
            return give(self.oddity)
        if self.place == "env prompt" and seed == 1:
            return give(self.oddity), {}
        if self.place == "env answer" and seed == 1:
            return "?", {"answer": give(self.oddity)}
        return super().reset(seed)

    def pose(self) -> str:
        self.answer = "42"
        return "6*7?"

    def step(self, action: str) -> Any:
        self.acted += action
        if "BAD" not in action:
            return Turn(reward=1.0, terminated=True)
        if self.place == "env step":
            return give(self.oddity)
        if self.place == "env reward":
            return Turn("", give(self.oddity), True)
        if self.place == "env observation":
            return Turn(give(self.oddity))
        if self.place == "env info":
            return Turn("", 1.0, True, info=give(self.oddity))
        if self.place == "env end":
            return Turn("", 1.0, give(self.oddity))
        return Turn(reward=1.0, terminated=True)

    def close(self) -> None:
        is_odd = {"env close": "BAD" in self.acted, "env close before a turn": not self.acted}
        if is_odd.get(self.place):
            give(self.oddity)


class BlockingQuestion(Question):
    blocking = True


def in_env(place: str, oddity: Any, kind: type[Question] = Question, **more: Any) -> list[Episode]:
    of_task = place in ("env reset", "env prompt", "env answer")
    odd_kind: Any = type("Odd", (kind,), {"place": place, "oddity": Oddity(oddity)})
    scripts = [[FINE], [FINE], [FINE]] if of_task else [[BAD, FINE, FINE, FINE], [FINE]]
    setup = RolloutSetup(
        engine=Scripted(scripts),  # pyright: ignore[reportArgumentType]
        chat=Chat(BYTES),
        make_env=lambda task: odd_kind(),
        sampling=Sampling(max_tokens=64),
        max_turns=3,
        max_context=5_000_000,
        deadline=30.0,
        **more,
    )
    tasks = [Task(f"t{n}", "question", seed=n) for n in range(2 if of_task else 1)]
    return collect(tasks, setup, independent(1 if of_task else 2))


_tools_own: list[
    Any
] = []  # not closed over: a tool's own variables are copied with its environment


def odd(text: str) -> Any:
    """Be odd."""
    return give(_tools_own[-1])


async def async_odd(text: str) -> Any:
    """Be odd."""
    return give(_tools_own[-1])


def in_tool(oddity: Any, function: Callable[[str], Any]) -> list[Episode]:
    _tools_own[:] = [oddity]

    def make_env(task: Task) -> ToolEnv:
        tool = FunctionTool(function, name="odd")
        return ToolEnv(Question(), [tool], format="arpo", counters=True)

    setup = RolloutSetup(
        engine=Scripted([[BAD, FINE], [FINE]]),  # pyright: ignore[reportArgumentType]
        chat=Chat(BYTES),
        make_env=make_env,
        sampling=Sampling(max_tokens=64),
        max_context=5_000_000,
        deadline=30.0,
    )
    return collect([Task("t", "question")], setup, independent(2))


def in_reward(oddity: Any, blocking: bool) -> list[Episode]:
    def reward(task: Task, trajectory: Any) -> Any:
        return give(oddity) if "BAD" in trajectory.text else 1.0

    reward.blocking = blocking  # pyright: ignore[reportFunctionMemberAccess]
    return in_env("", None, reward=reward)


@cache
def policy() -> tuple[Any, Any]:
    tokenizer = tiny_tokenizer()
    return tiny_engine(tokenizer), Chat(tokenizer)


def in_agent(agent: Callable[..., Any], **settings: Any) -> list[Episode]:
    engine, chat = policy()
    address = GatewayAddress()
    setup = RolloutSetup(
        engine,
        chat,
        lambda task: Question(),
        Sampling(max_tokens=4),
        max_context=2000,
        deadline=30.0,
        agent=AgentAttempts(FunctionAgent(agent), address, **settings),
    )
    try:
        return collect([Task("t", "question")], setup, independent(2))
    finally:
        address.close()


def async_agent(oddity: Any, is_child: bool = False) -> list[Episode]:
    async def odd() -> Any:
        await asyncio.sleep(0)
        return give(oddity)

    async def agent(task: Task, client: Any) -> Any:
        await client.chat("hello")
        if client.attempt.number:
            return 1.0
        return (await asyncio.gather(odd(), asyncio.sleep(0)))[0] if is_child else give(oddity)

    return in_agent(agent)


def blocking_agent(oddity: Any) -> list[Episode]:
    def agent(task: Task, client: Any) -> Any:
        client.chat("hello")
        return 1.0 if client._inner.attempt.number else give(oddity)

    return in_agent(agent)


def rewarding_agent(oddity: Any) -> list[Episode]:
    async def agent(task: Task, client: Any) -> float | None:
        await client.chat("hello")
        if not client.attempt.number:
            client.reward(give(oddity))
            client.reward(give(oddity))
            return None
        return 1.0

    return in_agent(agent)


def post(url: str, key: str, body: bytes) -> None:
    asked = urllib.request.Request(url, body, {"Authorization": f"Bearer {key}"})
    try:
        urllib.request.urlopen(asked, timeout=20).read()
    except urllib.error.HTTPError as error:
        error.read()


def raw_json(oddity: Any) -> bytes:
    """The oddity as JSON of a careless client; what JSON cannot hold, as a text."""
    try:
        return json.dumps(oddity).encode()
    except Exception:
        return json.dumps(type(oddity).__name__).encode() if isinstance(oddity, Raised) else b"{"


def posted(oddity: Any, what: str) -> list[Episode]:
    """A reward, or a whole request, of an agent that looks at no status."""

    def agent(task: Task, client: Any) -> float | None:
        client.chat("hello")
        if client._inner.attempt.number:
            return 1.0
        root = client.anthropic_base_url.rpartition("/s/")[0]
        if what == "reward":
            for name in ("value", "response_id"):
                body = b'{"value": 1, "%b": %b}' % (name.encode(), raw_json(oddity))
                post(f"{root}/graft/sessions/{client.session}/reward", client.api_key, body)
        else:
            for name, path in [("messages", "chat/completions"), ("tools", "messages")]:
                asked = b'{"model": "x", "messages": [{"role": "user", "content": "a"}], "%b": %b}'
                body = asked % (name.encode(), raw_json(oddity))
                post(f"{client.base_url}/{path}", client.api_key, body)
            post(f"{client.base_url}/responses", client.api_key, raw_json(oddity))
        return None if what == "reward" else 0.5

    return in_agent(agent)


def with_info(oddity: Any) -> list[Episode]:
    async def agent(task: Task, client: Any) -> Any:
        await client.chat("hello")
        if client.attempt.number:
            return 1.0
        odd = dict(oddity) if isinstance(oddity, dict) else {"a": give(oddity)}
        return {"reward": 1.0, **{str(name): one for name, one in odd.items()}}

    return in_agent(agent)


PLACES: dict[str, Callable[[Any], list[Episode]]] = {
    **{
        place: lambda oddity, place=place: in_env(place, oddity)
        for place in (
            "env reset", "env prompt", "env answer", "env step", "env reward", "env observation",
            "env info", "env end", "env close", "env close before a turn",
        )
    },
    "env step on a thread": lambda oddity: in_env("env step", oddity, BlockingQuestion),
    "tool": lambda oddity: in_tool(oddity, odd),
    "async tool": lambda oddity: in_tool(oddity, async_odd),
    "reward": lambda oddity: in_reward(oddity, False),
    "reward on a thread": lambda oddity: in_reward(oddity, True),
    "async agent": async_agent,
    "task of an async agent": lambda oddity: async_agent(oddity, is_child=True),
    "blocking agent": blocking_agent,
    "reward of an agent": rewarding_agent,
    "info of an agent": with_info,
    "posted reward": lambda oddity: posted(oddity, "reward"),
    "request": lambda oddity: posted(oddity, "request"),
}  # fmt: skip

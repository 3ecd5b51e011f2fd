"""Whatever one attempt raises or returns, the run goes on: exceptions, numbers, texts and JSON of every kind.

Each oddity comes from one place (an environment, a tool, a reward, an agent, a posted reward, a request) in
one attempt of two. It fails where the collection raises, where the other attempt is not done, where the
odd one is neither trained with a finite reward nor a failure with its reason, and where the log cannot be
written or read back.
"""

from __future__ import annotations

import asyncio
import builtins
import itertools
import json
import math
import random
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

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
from trust.bank import Row

SMALL, FULL = 300, 5_000
BAD, FINE = "<odd>BAD</odd>", "42"


class Raised:
    """An oddity that is raised, not returned."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __repr__(self) -> str:
        return f"raise {type(self.error).__name__}"


class RudeError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Rude:
    """Every way to look at it raises."""

    def __float__(self) -> float:
        raise ZeroDivisionError

    def __str__(self) -> str:
        raise RudeError

    __repr__ = __bool__ = __len__ = __iter__ = __str__  # type: ignore[assignment]

    @property
    def shape(self) -> Any:
        raise RudeError


class RudeMapping(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise OSError(key)

    def __iter__(self) -> Iterator[str]:
        raise OSError("no keys")

    def __len__(self) -> int:
        return 3


class ExitingFloat:
    def __float__(self) -> float:
        raise SystemExit(3)


def all_errors() -> Iterator[BaseException]:
    """One of every built-in kind, and some that no log likes."""
    for kind in vars(builtins).values():
        if isinstance(kind, type) and issubclass(kind, BaseException):
            if issubclass(kind, BaseExceptionGroup):
                yield kind("many", [ValueError("one")])
            elif issubclass(kind, UnicodeDecodeError):
                yield kind("utf-8", b"\xff", 0, 1, "odd")
            elif issubclass(kind, UnicodeEncodeError):
                yield kind("utf-8", "\ud800", 0, 1, "odd")
            elif issubclass(kind, UnicodeTranslateError):
                yield kind("\ud800", 0, 1, "odd")
            else:
                yield kind("odd")
    yield BaseExceptionGroup("many", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
    yield asyncio.CancelledError("nobody asked")
    yield asyncio.InvalidStateError()
    yield RudeError()
    yield ValueError("\ud800" * 3 + "\0")
    yield ValueError("x" * 3_000_000)


NUMBERS: list[Any] = [
    math.nan, math.inf, -math.inf, 1e308, -1e308, 1e13, 5e-324, 10**400, -(10**400), True, 0, -0.0,
    np.float32("nan"), np.float64(1e300), np.int64(3), np.bool_(True), np.ones(3), np.ones((1, 1)),
    Decimal("NaN"), Decimal("sNaN"), Decimal("1e400"), Decimal("0.5"), Fraction(1, 3), 1j,
]  # fmt: skip
TEXTS: list[Any] = [
    "", "\ud800", "a\udfffb", "\0" * 9, "x" * 3_000_000, "<|im_end|>" * 9, "𝔘", "a\r\n\u2028b", "nan",
]  # fmt: skip


def json_oddities() -> Iterator[Any]:
    deep: Any = []
    for _ in range(5_000):
        deep = [deep]
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    yield from (
        None,
        [],
        {},
        [[]],
        {"\ud800": 1},
        {"a": "\ud800"},
        {"reward": "\ud800"},
        deep,
        loop,
    )
    yield from (
        {1: 2},
        {None: 1},
        {(1, 2): 3},
        {"a": math.nan},
        {"a": b"\xff"},
        {"a": {1, 2}},
        b"\xff",
    )
    yield from (
        {"x" * 100_000: 1},
        {f"k{n}": n for n in range(20_000)},
        Rude(),
        RudeMapping(),
        object(),
    )
    yield from (
        ExitingFloat(),
        {"a": Rude()},
        {Rude: 1},
        iter([1]),
        lambda: 1,
        (x for x in [1]),
        int,
    )
    yield from ({"reward": math.nan}, {"reward": 1e13}, {"reward": None, "a": Rude()}, {"tool": 3})
    yield from ({"tools/x": "much"}, {"tool": 1, "tool_calls": "many"}, {"observe_as": Rude()})


def oddities() -> list[Any]:
    return [*map(Raised, all_errors()), *NUMBERS, *TEXTS, *json_oddities()]


class Oddity:
    """Holds one, so that a class attribute that is a function is not made a method."""

    def __init__(self, value: Any) -> None:
        self.value = value


def give(oddity: Any) -> Any:
    oddity = oddity.value if isinstance(oddity, Oddity) else oddity
    if isinstance(oddity, Raised):
        raise oddity.error
    return oddity


class Question(BaseEnv):
    """Ends with its first answer; the odd attempt gets what `odd` makes."""

    env_id = "question"
    blocking = False

    place, oddity = "", None  # of the class: a fork does not copy them

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
        if self.place == "env close" and self.turns:
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


def in_tool(oddity: Any) -> list[Episode]:
    _tools_own[:] = [oddity]

    def make_env(task: Task) -> ToolEnv:
        return ToolEnv(Question(), [FunctionTool(odd)], format="arpo", counters=True)

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
            "env info", "env end", "env close",
        )
    },
    "env step on a thread": lambda oddity: in_env("env step", oddity, BlockingQuestion),
    "tool": in_tool,
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


def fault_of(place: str, oddity: Any) -> str:
    """What an oddity did to the run; "": nothing but its own attempt."""
    try:
        episodes = PLACES[place](oddity)
    except BaseException as error:
        return f"the run ended: {type(error).__name__}: {str(error)[:200]!r}"
    leaves = [leaf for episode in episodes for leaf in episode.leaves]
    if len(leaves) != 2:
        return f"{len(leaves)} leaves"
    odd, fine = leaves if place not in ("env reset", "env prompt", "env answer") else leaves[::-1]
    if fine.status != "done" or fine.reward != 1.0:
        return f"the other attempt ended {fine.status} with {fine.reward}"
    if odd.status.is_trainable and not abs(odd.reward) <= 1e12:
        return f"trained with the reward {odd.reward}"
    lines = [episode.dumps() for episode in episodes]
    infos = [span.info for episode in episodes for span in episode.spans] + [odd.info]
    if not odd.status.is_trainable and not any(info.get("error") for info in infos):
        return f"{odd.status} without a reason"
    for line in lines:
        line.encode()
        if Episode.loads(line).dumps() != line:
            return "the log reads back as another episode"
    return ""


def run(count: int, seed: int) -> Iterator[Row]:
    pairs = [*itertools.product(PLACES, range(len(oddities())))]
    random.Random(seed).shuffle(pairs)
    tried = pairs[:count]
    for place in PLACES:
        mine = [number for where, number in tried if where == place]
        row = Row("one_attempt", place, len(mine))
        for number in mine:
            oddity = oddities()[number]
            if fault := fault_of(place, oddity):
                row.failures.append(f"{number} {type(oddity).__name__} {_shown(oddity)}: {fault}")
        yield row


def _shown(oddity: Any) -> str:
    try:
        return repr(oddity)[:60]
    except Exception:
        return "rude"

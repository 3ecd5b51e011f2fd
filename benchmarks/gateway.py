"""The gateway beside the engine: time per call, and many sessions at once against graft's own environments.

    make bench BENCH=gateway ARGS="512 4 32"                 # sessions, calls of each, tokens of an answer
    make bench BENCH=gateway ARGS="512 4 128 OWNER/NAME"     # a model instead of random weights
    make bench BENCH=gateway ARGS="512 4 128 0.6B 6"         # random weights of this shape; 6 rounds
    make bench BENCH=gateway ARGS="calls 512 4 128"          # HTTP alone: an engine that takes no time

One load, three ways. Each attempt takes the same number of turns; one token in N ends a turn, so that a turn
has N tokens on average; and 8 attempts share a task. There are three times as many attempts as sessions at
once, so that one long attempt at the end, or many requests at the beginning, do not decide; whoever is free
takes the next attempt. Environments have an engine of their own, which no server shares:

    environment    a turn is an environment's: no gateway
    function       a turn is a call of client.chat in a Python function: sessions, no HTTP
    http           a turn is POST /v1/chat/completions from another process, over connections that stay open

Reported: sampled tokens per second of each way, over the first; and for calls one after the other the time of
the processor that a call takes beside the engine, in the process of the engine. `calls` measures that time
with all sessions at once, twice: the second round shows what memory and open files grow by.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import graft
from benchmarks.record import Figure, record, take_flag
from benchmarks.shapes import SHAPES
from graft.engine.native.context import NativeContext
from graft.engine.native.engine import NativeEngine
from graft.envs.base import BaseEnv
from graft.gateway.address import GatewayAddress
from graft.gateway.attempts import AgentAttempts
from graft.gateway.external import ExternalAgents
from graft.gateway.gateway import Gateway
from graft.gateway.open_sessions import OpenSessions
from graft.gateway.programs import AgentProgram, FunctionAgent
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.rollout.event_loop import run
from graft.rollout.setup import RolloutSetup
from graft.types import Completion, Episode, Finish, Sampling, Task, Turn

SHAPE = {
    "width": 256,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "ff": 512,
    "max_positions": 4096,
}
SAMPLES = 8
WAVES = 3
"""Attempts for each of the sessions at once."""
OUTSIDE = (sys.executable, "-m", "benchmarks.gateway", "outside")
QUESTION = "Work on this task step by step, and write down what you find. " * 4
MORE = "Go on with the next step, please."


class Talk(BaseEnv):
    """`turns` turns of any text."""

    env_id = "talk"
    observe_as = "user"
    max_turns = None
    turns = 4

    def pose(self) -> str:
        self.left = self.turns
        return f"Task {self.rng.randrange(10**6)}. {QUESTION}"

    def respond(self, action: str) -> Turn:
        self.left -= 1
        return Turn(MORE, terminated=not self.left)


async def talk(task: Task, client: Any) -> float:
    messages = [*task.prompt]
    for _ in range(Talk.turns):
        messages.append(await client.chat(messages))
        messages.append({"role": "user", "content": MORE})
    return 0.0


class Connection:
    """One HTTP connection that stays open: what a fast client costs is not the gateway's."""

    def __init__(self, url: str) -> None:
        self.host, _, port = url.removeprefix("http://").rpartition(":")
        self.port = int(port)
        self.streams: Any = None

    async def post(self, path: str, key: str, body: Any) -> Any:
        if self.streams is None:
            self.streams = await asyncio.open_connection(self.host, self.port, limit=2**24)
        reader, writer = self.streams
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        writer.write(head.encode() + content)
        received = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(received.partition("content-length:")[2].partition("\r\n")[0])
        answer = json.loads(await reader.readexactly(length))
        assert received.startswith("http/1.1 200"), answer
        return answer

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()


async def outside(url: str, token: str, sessions: int, turns: int, waves: int) -> list[float]:
    """The other process: `sessions` agents at once, `waves` attempts for each; seconds of each call."""
    seconds: list[float] = []
    attempts = iter(range(sessions * waves))

    async def agent() -> None:
        connection = Connection(url)
        for _ in attempts:  # the next one of all agents
            await attempt(connection)
        connection.close()

    async def attempt(connection: Connection) -> None:
        opened = await connection.post("/graft/sessions", token, {})
        messages = [*opened["task"]["prompt"]] or [{"role": "user", "content": QUESTION}]
        for _ in range(turns):
            started = time.perf_counter()
            path = f"/s/{opened['id']}/v1/chat/completions"
            body = {"model": "policy", "messages": messages}
            answer = await connection.post(path, opened["key"], body)
            seconds.append(time.perf_counter() - started)
            messages += [answer["choices"][0]["message"], {"role": "user", "content": MORE}]
        end = f"/graft/sessions/{opened['id']}/end"
        await connection.post(end, opened["key"], {"reward": 0})

    await asyncio.gather(*(agent() for _ in range(sessions)))
    return seconds


def sampling_of(vocab_size: int, tokens: int) -> Sampling:
    """A turn ends at any of every `tokens`-th token of the vocabulary."""
    ends = tuple(range(0, vocab_size, tokens))
    return Sampling(max_tokens=40 * tokens, stop_tokens=ends)


def setup_of(policy: graft.Policy, tokens: int, kv_tokens: int) -> RolloutSetup:
    engine = NativeEngine(policy.model, tokenizer=policy.tokenizer, eos_ids=(), kv_tokens=kv_tokens)
    return RolloutSetup(
        engine,
        policy.chat,
        lambda task: Talk(),
        sampling_of(policy.model.shape.vocab_size, tokens),
        max_turns=Talk.turns,
        max_context=min(4096, policy.model.shape.max_positions),
    )


def sampled(episodes: list[Episode]) -> int:
    return sum(len(s) for e in episodes for s in e.spans if s.author == "policy")


def measure(setup: RolloutSetup, sessions: int, salt: int, waves: int = WAVES) -> tuple[float, int]:
    """Seconds of one load, and the tokens that were sampled."""
    at_once = max(sessions // SAMPLES, 1)
    tasks = [Task(f"talk:{n}", "talk", seed=n) for n in range(waves * at_once)]
    samples = min(SAMPLES, sessions)
    started = time.perf_counter()
    episodes = collect(tasks, replace(setup, salt=salt), independent(samples), concurrency=at_once)
    seconds = time.perf_counter() - started
    failed = [leaf.info for e in episodes for leaf in e.leaves if not leaf.status.is_trainable]
    tokens = sampled(episodes)
    assert not failed, failed[:1]
    turns = sum(leaf.metrics["turns"] for e in episodes for leaf in e.leaves)
    assert turns == len(tasks) * samples * Talk.turns, turns
    return seconds, tokens


def with_agents(setup: RolloutSetup, program: AgentProgram) -> RolloutSetup:
    agents = AgentAttempts(program, GatewayAddress(), concurrency=10**6)
    return replace(setup, agent=agents)


def over_http(
    setup: RolloutSetup, sessions: int, salt: int, waves: int = WAVES
) -> tuple[float, int, list[float]]:
    program = ExternalAgents()
    served = with_agents(setup, program)
    agents: Any = served.agent
    agents.address.app.source = program
    words = [agents.address.url, agents.address.token, *map(str, (sessions, Talk.turns, waves))]
    child = subprocess.Popen([*OUTSIDE, *words], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()  # it has imported everything, and claims now
    seconds, tokens = measure(served, sessions, salt, waves)
    calls = json.loads(child.stdout.readline())
    child.wait()
    agents.close()
    return seconds, tokens, calls


class EngineClock:
    """Time of the processor inside `context.sample` and outside of it, of calls one after the other."""

    def __init__(self) -> None:
        self.inside, sample = 0.0, NativeContext.sample
        self.started = time.process_time()

        async def timed(context: Any, *args: Any) -> Any:
            started = time.process_time()
            try:
                return await sample(context, *args)
            finally:
                self.inside += time.process_time() - started

        NativeContext.sample = timed

    def beside(self, calls: int) -> float:
        """Milliseconds of a call outside of the engine, since the last time; the clock starts again."""
        rest = time.process_time() - self.started - self.inside
        self.inside, self.started = 0.0, time.process_time()
        return 1000 * rest / calls


class InstantContext:
    """A context of InstantEngine."""

    mode = None

    def __init__(self, tokens: Sequence[int], answer: list[int]) -> None:
        self.tokens, self.answer = list(tokens), answer

    def append(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)

    def fork(self, key: int | None = None, at: int | None = None) -> InstantContext:
        return InstantContext(self.tokens[:at], self.answer)

    def close(self) -> None: ...

    async def sample(self, sampling: Sampling, grammar: Any = None) -> Completion:
        await asyncio.sleep(0)
        self.tokens.extend(self.answer)
        some = [-1.0] * len(self.answer)
        modes = [0] * len(self.answer)
        return Completion(self.answer, self.answer, some, some, modes, Finish.STOP, 0)


class InstantEngine:
    """Answers at once, always the same: what is left is the gateway's time."""

    version = 0

    def __init__(self, vocab_size: int, answer: list[int]) -> None:
        self.vocab_size, self.answer = vocab_size, answer

    def open(self, tokens: Sequence[int], *, key: int = 0) -> InstantContext:
        return InstantContext(tokens, self.answer)


async def calls(sessions: int, turns: int, tokens: int) -> None:
    """Time of the processor for a call over HTTP, in the process of the gateway."""
    policy = graft.load(shape=SHAPE, alphabet="bytes", chat_template="chatml")
    encoded = policy.tokenizer.encode("step by step; " * tokens)[: tokens - 1]
    engine: Any = InstantEngine(policy.tokenizer.vocab_size, [*encoded, policy.tokenizer.eos_id])
    gateway = Gateway(engine, policy.chat, sampling=Sampling(), max_context=10**6)
    address = GatewayAddress()
    address.app.source = source = OpenSessions(gateway)
    async with address.serving(gateway):
        for _ in range(2):
            words = [address.url, address.token, str(sessions), str(turns), "1"]
            child = await asyncio.create_subprocess_exec(
                *OUTSIDE, *words, stdout=subprocess.PIPE, limit=2**24
            )
            assert child.stdout is not None
            await child.stdout.readline()
            begun, used = time.perf_counter(), time.process_time()
            await child.stdout.readline()
            used, seconds = time.process_time() - used, time.perf_counter() - begun
            await child.wait()
            source.take()
            count, memory = sessions * turns, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            print(
                f"{sessions} sessions, {turns} calls each: {1000 * used / count:.2f} ms of processor a "
                f"call, {count / seconds:,.0f} calls/s, at most {memory // 1024} MiB, "
                f"{len([*Path('/dev/fd').iterdir()])} open files after it"
            )
    address.close()


def load_policy(model: str) -> graft.Policy:
    """A model, or random weights of a shape, which reads and writes bytes."""
    if model and model not in SHAPES:
        return graft.load(model)
    shape = SHAPE
    if model:
        sizes = ("width", "layers", "heads", "kv_heads", "head_dim", "ff")
        shape = {**SHAPE, **{name: getattr(SHAPES[model], name) for name in sizes}}
    return graft.load(shape=shape, alphabet="bytes", chat_template="chatml")


def main(
    sessions: int, turns: int, tokens: int, model: str, rounds: int = 3, *, keep: bool = False
) -> None:
    Talk.turns = turns
    policy = load_policy(model)
    each = len(policy.chat.prompt([{"role": "user", "content": QUESTION}])) + 128
    needed = sessions * turns * (tokens + 96) + sessions // SAMPLES * each
    alone, setup = (setup_of(policy, tokens, kv_tokens=needed + 65_536) for _ in range(2))
    inside = with_agents(setup, FunctionAgent(talk))
    for warm_up in (alone, setup):
        measure(warm_up, sessions, 0, waves=1)
    rates: dict[str, list[float]] = {"environment": [], "function": [], "http": []}
    for salt in range(1, rounds + 1):
        for name, load in (("environment", alone), ("function", inside)):
            seconds, count = measure(load, sessions, salt)
            rates[name].append(count / seconds)
        seconds, count, _ = over_http(setup, sessions, salt)
        rates["http"].append(count / seconds)
    base = statistics.median(rates["environment"])
    print(f"{sessions} sessions at once, {turns} calls each, {tokens} tokens an answer")
    for name, found in rates.items():
        middle = statistics.median(found)
        print(f"  {name:12} {middle:10,.0f} tokens/s   {middle / base:.2f} of the environments'")
    Talk.turns = 32
    few = sampling_of(policy.model.shape.vocab_size, 8)
    short = replace(setup, sampling=few, max_turns=32)
    talking = with_agents(short, FunctionAgent(talk))
    print("one session, 32 calls of 8 tokens, one after the other: beside the engine")
    clock = EngineClock()
    for name in ("environment", "function", "http"):
        for _ in range(2):  # the first one imports, renders and compiles what is kept
            if name == "http":
                over_http(short, 1, 9, waves=1)
            else:
                measure(short if name == "environment" else talking, 1, 9, waves=1)
            taken = clock.beside(32)
        print(f"  {name:12} {taken:6.2f} ms a call")
    alone.engine.close()
    setup.engine.close()
    if keep:
        what = f"{sessions} sessions, {turns} calls, {tokens} tokens an answer"
        record(
            Figure(
                f"gateway.{name}",
                f"{name}: {what}",
                statistics.median(found),
                "tok/s",
                tuple(found),
            )
            for name, found in rates.items()
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["outside"]:
        print("ready", flush=True)
        url, token, *numbers = sys.argv[2:]
        print(json.dumps(asyncio.run(outside(url, token, *map(int, numbers)))))
    elif sys.argv[1:2] == ["calls"]:
        run(lambda: calls(*(int(word) for word in sys.argv[2:5])))
    else:
        words, keep = take_flag(sys.argv[1:])
        numbers = [int(word) for word in words[:3]]
        rounds = int(words[4]) if words[4:] else 3
        main(*(numbers or [512, 4, 32]), model="".join(words[3:4]), rounds=rounds, keep=keep)

"""The load of agents: sessions of unequal length that sample, read a tool's result, and sample on.

64 tasks x 8 sessions of 1 to 6 turns: about 110 sampled tokens, then about 160 of a result (both
log-normal). The sessions of a task share its prompt. Tools answer at once; the draws depend on the seed only.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from math import log
from statistics import median
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.report import Row
from benchmarks.gpu.works import random_tokens
from benchmarks.shapes import SHAPES, random_decoder
from graft.engine.native.engine import NativeEngine
from graft.types import Sampling

TASKS, SESSIONS, MAX_TURNS = 64, 8, 6
PROMPT, ANSWER, RESULT = 512, 110, 160
SPREAD = 0.7
MUST, AIM = 32e3, 38e3
KV8_MUST, KV8_AIM = 34e3, 40e3
FIRST_MUST, FIRST_AIM = 1.3, 1.1


@dataclass(slots=True)
class AgentLoad:
    """What the sessions of each task will do: tokens to sample, then the result that follows."""

    prompts: list[list[int]]
    sessions: list[list[list[tuple[int, list[int]]]]]

    @classmethod
    def drawn(
        cls, seed: int, vocab_size: int, tasks: int, sessions: int, scale: float
    ) -> AgentLoad:
        """`scale` multiplies all lengths."""
        rng = random.Random(seed)

        def length(mean: float, most: int) -> int:
            return max(8, int(scale * min(most, rng.lognormvariate(log(mean), SPREAD))))

        def session() -> list[tuple[int, list[int]]]:
            return [
                (length(ANSWER, 512), random_tokens(rng, length(RESULT, 1024), vocab_size))
                for _ in range(rng.randint(1, MAX_TURNS))
            ]

        return cls(
            [random_tokens(rng, int(scale * PROMPT), vocab_size) for _ in range(tasks)],
            [[session() for _ in range(sessions)] for _ in range(tasks)],
        )

    @property
    def sampled(self) -> int:
        return sum(tokens for task in self.sessions for turns in task for tokens, _ in turns)

    async def play(self, engine: NativeEngine) -> None:
        jobs: list[Any] = []
        for prompt, sessions in zip(self.prompts, self.sessions, strict=True):
            root = engine.open(prompt)
            contexts = [root, *(root.fork() for _ in sessions[1:])]
            jobs += [_session(*pair) for pair in zip(contexts, sessions, strict=True)]
        await asyncio.gather(*jobs)


async def _session(context: Any, turns: list[tuple[int, list[int]]]) -> None:
    for number, (tokens, result) in enumerate(turns, 1):
        await context.sample(Sampling(max_tokens=tokens))  # the engine has no end token
        if number < len(turns):
            context.append(result)
    context.close()


def agents(bench: Bench, name: str, kv: str = "model") -> list[Row]:
    """Sampled tokens a second, and the first round of a new engine against the later ones."""
    shape = SHAPES[name]
    size = (2, 2, 0.05) if name == "tiny" else (TASKS, SESSIONS, 1.0)
    decoder = random_decoder(shape, bench.device, bench.dtype, kv=kv)
    engine = NativeEngine(decoder, kv_tokens=int(700_000 * size[2]))
    seconds: list[float] = []

    def once() -> float:
        load = AgentLoad.drawn(len(seconds), shape.vocab_size, *size)
        seconds.append(bench.time(lambda: asyncio.run(load.play(engine))))
        return load.sampled / seconds[-1]

    first = once()
    rates = bench.repeat(once)
    engine.close()
    times = [median(rates) / first]
    how = {"is_less_better": True, "rounds": times, "note": "the first round of an engine"}
    if kv == "fp8":
        goals = KV8_MUST, KV8_AIM
        return [Row(f"{name} agents, kv fp8", "tok/s", median(rates), *goals, rounds=rates)]
    return [
        Row(f"{name} agents", "tok/s", median(rates), MUST, AIM, rounds=rates),
        Row(f"{name} agents, first", "x as long", times[0], FIRST_MUST, FIRST_AIM, **how),
    ]

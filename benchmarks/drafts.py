"""Drafts on and off in turn: seconds of the same samples, and how many of their tokens differ (goal 0).

python -m benchmarks.drafts                                   # CPU: the quickstart's load, and repetition
python -m benchmarks.drafts --device cuda --model coder.gguf  # prompts of countdown, 1x1, 8x8 and 48x8
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from benchmarks.workloads import CHARACTERS
from benchmarks.workloads import prompt as expression
from graft.engine.native.engine import NativeEngine
from graft.envs.countdown import Countdown
from graft.models.decoder import Decoder
from graft.models.device import choose_device, choose_dtype, prefer_blas
from graft.models.io.gguf_read import open_tokenizer
from graft.models.io.load import load_model
from graft.models.order_probe import find_order
from graft.models.shape import ModelShape
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.types import Completion, Sampling

QUICKSTART = ModelShape(
    vocab_size=64, width=192, layers=3, heads=6, kv_heads=6, head_dim=32, ff=384, tied=False,
    rope_theta=100.0, max_positions=512,
)  # fmt: skip
"""The shape of recipes/quickstart.yaml, with more positions."""
THINK = " Think step by step, try several combinations and check each of them."


WAYS: dict[str, Literal["auto", "off"]] = {"off": "off", "on": "auto"}


class Load(NamedTuple):
    """Tasks and samples of a step, and how these are drawn."""

    name: str
    tasks: int
    samples: int
    sampling: Sampling


class Outcome(NamedTuple):
    """One round of one engine."""

    seconds: float
    completions: list[Completion]


def collect(engine: NativeEngine, prompts: Sequence[list[int]], load: Load, number: int) -> Outcome:
    """Sample every prompt as often as the load says; the keys depend on the round alone."""

    async def draw() -> list[Completion]:
        roots = [engine.open(tokens) for tokens in prompts]
        rows = [root for root in roots for _ in range(load.samples)]
        contexts = [root.fork(key=(number << 20) + row) for row, root in enumerate(rows)]
        done = await asyncio.gather(*(context.sample(load.sampling) for context in contexts))
        for context in (*contexts, *roots):
            context.close()
        return done

    started = time.perf_counter()
    completions = asyncio.run(draw())
    return Outcome(time.perf_counter() - started, completions)


def num_unequal(some: list[Completion], others: list[Completion]) -> int:
    """Tokens that differ, in themselves or in a bit of what is recorded of them."""
    total = 0
    for a, b in zip(some, others, strict=True):
        parts = zip(
            zip(a.tokens, a.logprobs, a.entropies, a.modes, strict=True),
            zip(b.tokens, b.logprobs, b.entropies, b.modes, strict=True),
            strict=False,
        )
        total += sum(x != y for x, y in parts) + abs(len(a.tokens) - len(b.tokens))
    return total


def measure(
    engines: dict[str, NativeEngine],
    prompts_of: Callable[[int], list[int]],
    load: Load,
    rounds: int,
) -> str:
    """The medians of some rounds after a first one that is not counted."""
    seconds: dict[str, list[float]] = {mode: [] for mode in engines}
    tokens = unequal = 0
    counts: dict[str, int] = {}
    for number in range(rounds + 1):
        prompts = [prompts_of(number * load.tasks + task) for task in range(load.tasks)]
        order = list(engines) if number % 2 else list(engines)[::-1]
        outcomes = {mode: collect(engines[mode], prompts, load, number) for mode in order}
        unequal += num_unequal(outcomes["off"].completions, outcomes["on"].completions)
        if number == 0:
            counts = engines["on"].draft_counts
            continue
        tokens += sum(len(done.tokens) for done in outcomes["on"].completions)
        for mode, outcome in outcomes.items():
            seconds[mode].append(outcome.seconds)
    new = {name: n - counts.get(name, 0) for name, n in engines["on"].draft_counts.items()}
    accepted = sum(n for name, n in new.items() if name.startswith("drafts_accepted"))
    proposed = sum(n for name, n in new.items() if name.startswith("drafts_proposed"))
    off, on = median(seconds["off"]), median(seconds["on"])
    ratio = median(a / b for a, b in zip(seconds["off"], seconds["on"], strict=True))
    return (
        f"{load.name:<14}{tokens / rounds:>9,.0f} tokens  off {off:6.2f} s  on {on:6.2f} s  "
        f"on/off {ratio:5.2f}x  drafted {proposed:,} right {accepted:,} "
        f"({accepted / max(tokens, 1):.0%} of all)  unequal {unequal}"
    )


def measure_cpu(rounds: int) -> None:
    tokenizer = FastTokenizer.characters(CHARACTERS)
    decoder = Decoder(replace(QUICKSTART, vocab_size=tokenizer.vocab_size)).initialise(0)
    prefer_blas(decoder.device, decoder.dtype)
    decoder.use_order(find_order(decoder))

    def prompts_of(number: int) -> list[int]:
        return tokenizer.encode(expression(random.Random(number), 12))

    loads = (
        Load("quickstart", 16, 8, Sampling(max_tokens=24)),
        Load("repetitive", 4, 4, Sampling(max_tokens=96, min_tokens=96, temperature=0.05)),
    )
    for load in loads:
        engines = {
            mode: NativeEngine(
                decoder, tokenizer=tokenizer, eos_ids=tokenizer.eos_ids, drafts=drafts
            )
            for mode, drafts in WAYS.items()
        }
        print(measure(engines, prompts_of, load, rounds), flush=True)


def measure_model(
    path: Path, device: str, rounds: int, max_tokens: int, names: Sequence[str]
) -> None:
    where = choose_device(device)
    dtype, _ = choose_dtype("auto", where)
    tokenizer = open_tokenizer(path) if path.suffix == ".gguf" else FastTokenizer.load(path)
    chat = Chat(tokenizer, None if tokenizer.chat_template else "chatml")
    decoder = load_model(str(path), dtype=dtype, device=where).requires_grad_(False)
    decoder.use_order(find_order(decoder))
    print("order:", str(decoder.order)[:80], flush=True)
    stops = (*tokenizer.eos_ids, *chat.end_ids)

    def prompts_of(number: int) -> list[int]:
        question, _ = Countdown().reset(seed=number)
        return chat.prompt([{"role": "user", "content": f"{question}{THINK}"}])

    for name in names:
        tasks, samples = map(int, name.split("x"))
        engines = {
            mode: NativeEngine(
                decoder, tokenizer=tokenizer, eos_ids=stops, drafts=drafts, kv_tokens=400_000
            )
            for mode, drafts in WAYS.items()
        }
        load = Load(name, tasks, samples, Sampling(max_tokens=max_tokens))
        print(measure(engines, prompts_of, load, rounds), flush=True)
        for engine in engines.values():
            engine.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", type=Path, help="a .gguf file or a folder; none: random weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--loads", nargs="+", default=["1x1", "8x8", "48x8"])
    asked = parser.parse_args(arguments)
    if asked.model is None:
        measure_cpu(asked.rounds)
    else:
        measure_model(asked.model, asked.device, asked.rounds, asked.max_tokens, asked.loads)


if __name__ == "__main__":
    main()

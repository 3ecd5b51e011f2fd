"""What actions cost per token: plain decoding, decoding in ExpA mode, and with calls on the way.

    python -m benchmarks.expa.cost                         # a small shape on a CPU
    python -m benchmarks.expa.cost --shape 135M --rows 512 # a GPU

Weights are random and lengths forced, since speed does not depend on their values. Four loads on the
same decoder, by turns, medians of the rounds:

    plain   no grammar: every token may be drawn, no action beyond the vocabulary
    mode    the calculator's grammar in language mode: masks, extra head rows, the automaton; no row
            enters the calculator, for a row that does would be late and alone at the end
    calls   a call after one token in `--every`: the calculator's modes, descriptions of several tokens
            written without a draw, an exit, an observation of three tokens, and on
    stops   what calls cost without a grammar: plain decoding that is stopped and answered as often

A written token counts as a token, drawn or not; observations do not.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.report import Row
from benchmarks.shapes import SHAPES, random_decoder
from graft.actions.grammar import Automaton
from graft.actions.space import ActionSpace
from graft.engine.native.engine import NativeEngine
from graft.models.decoder import Decoder
from graft.models.device_choice import choose_device, choose_dtype
from graft.models.extra_actions import extend
from graft.models.shape import ModelShape
from graft.types import Finish, Sampling

DIGITS, OPERATORS = 10, 4
ROUTE, EXIT = 0, DIGITS + OPERATORS + 1
EXTRA = EXIT + 1
OBSERVATION = [5, 6, 7]
CALL = 27
"""Tokens that a call of the load "calls" is written with, on average: two to enter, two to leave, and
digits and operators in between, each as likely as the exit."""


def calculator(vocab_size: int, every: int) -> tuple[ActionSpace, Automaton]:
    """A calculator that is entered after one token in `every` (0: never has to be).

    Modes: language, then one where the only way on is in, then the calculator's two: a digit is due,
    anything may follow. With random weights all tokens are about as likely, so a share of them,
    1 / `every`, stands for the wish to calculate.
    """
    language, must_route, digit_due, going = range(4)
    allowed = np.zeros((going + 1, vocab_size + EXTRA), dtype=bool)
    route, leave = vocab_size + ROUTE, vocab_size + EXIT
    digits = range(vocab_size + 1, vocab_size + 1 + DIGITS)
    operators = range(vocab_size + 1 + DIGITS, vocab_size + 1 + DIGITS + OPERATORS)
    allowed[language, :vocab_size] = True
    allowed[must_route, route] = True
    allowed[digit_due, list(digits)] = True
    allowed[going, [*digits, *operators, leave]] = True
    inside = [(digit_due, digit) for digit in digits] + [(going, digit) for digit in digits]
    transitions = {
        (must_route, route): digit_due,
        **dict.fromkeys(inside, going),
        **{(going, operator): digit_due for operator in operators},
        (going, leave): language,
        **{(language, token): must_route for token in range(vocab_size // every if every else 0)},
    }
    writes: dict[tuple[int, int], tuple[int, ...]] = {}
    for mode in range(going + 1):
        writes[mode, route] = (11, 12)  # " calculate" and a blank
        for number, digit in enumerate(digits):
            writes[mode, digit] = (20 + number,)
        for number, operator in enumerate(operators):
            writes[mode, operator] = (30 + number, 12)
        writes[mode, leave] = (34, 12)
    writes = {key: tokens for key, tokens in writes.items() if allowed[key]}
    grammar = Automaton(language, transitions, {}, writes, frozenset({(going, leave)}))
    space = ActionSpace(vocab_size, EXTRA, allowed)
    grammar.check(space)
    return space, grammar


class Player:
    """An engine over a decoder, with extra rows or without, and one of the loads."""

    def __init__(
        self, decoder: Decoder, every: int | None, rows: int, length: int, stops: int = 0
    ) -> None:
        self.rows, self.length, self.stops = rows, length, stops
        space, self.grammar = None, None
        if every is not None:
            space, self.grammar = calculator(decoder.shape.vocab_size, every)
        self.engine = NativeEngine(decoder, space=space, kv_tokens=rows * (length * 2 + 128))
        self.rng = random.Random(0)

    async def _one(self, prompt: list[int], key: int) -> int:
        context, written = self.engine.open(prompt, key=key), 0
        while written < self.length:
            left = self.length - written
            if self.stops:  # as soon as one token in `stops` would have made a call
                left = min(left, CALL + 1 + int(self.rng.expovariate(1 / self.stops)))
            sampling = Sampling(max_tokens=left, min_tokens=left)
            done = await context.sample(sampling, self.grammar)
            written += len(done.tokens)
            if done.finish is Finish.EXIT or self.stops:
                context.append(OBSERVATION)
        context.close()
        return written

    async def _all(self) -> int:
        prompts = [[self.rng.randrange(40, 250) for _ in range(32)] for _ in range(self.rows)]
        keys = [self.rng.getrandbits(60) for _ in prompts]
        return sum(await asyncio.gather(*(map(self._one, prompts, keys))))

    def play(self) -> float:
        """Written tokens per second."""
        started = time.perf_counter()
        written = asyncio.run(self._all())
        return written / (time.perf_counter() - started)


def measure(
    shape: ModelShape, device: torch.device, rows: int, length: int, every: int, rounds: int
) -> dict[str, list[float]]:
    """Written tokens per second of each load, round by round."""
    dtype, _ = choose_dtype("auto", device)
    torch.manual_seed(0)
    plain = random_decoder(shape, device, dtype)
    decoder = extend(plain, [0] * EXTRA).to(device=device, dtype=dtype)
    players = {
        "plain": Player(plain, None, rows, length),
        "mode": Player(decoder, 0, rows, length),
        "calls": Player(decoder, every, rows, length),
        "stops": Player(plain, None, rows, length, stops=every),
    }
    speeds: dict[str, list[float]] = {name: [] for name in players}
    for number in range(rounds + 1):
        for name, player in players.items():
            speed = player.play()
            if number:  # the first round compiles and captures
                speeds[name].append(speed)
    return speeds


def calls_row(bench: Bench, name: str) -> list[Row]:
    """Calls by actions against plain decoding that is stopped as often: a row of `benchmarks.gpu`."""
    rows, length = (8, 32) if name == "tiny" else (512, 128)
    speeds = measure(SHAPES[name], bench.device, rows, length, 24, bench.rounds)
    pairs = list(zip(speeds["calls"], speeds["stops"], strict=True))
    ratios = [calls / stops for calls, stops in pairs]
    note = f"{statistics.median(speeds['calls']):,.0f} tok/s"
    title = f"{name} calls by actions, {rows} rows"
    return [Row(title, "of stops", statistics.median(ratios), 0.95, 1.0, rounds=ratios, note=note)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--vocab", type=int, default=0, help="another vocabulary size")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--every", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    device = choose_device(options.device)
    shape = SHAPES[options.shape]
    if options.vocab:
        shape = replace(shape, vocab_size=options.vocab)
    speeds = measure(shape, device, options.rows, options.length, options.every, options.rounds)
    print(f"{options.shape}, {device}, {options.rows} rows of {options.length} tokens")
    print("| load | tokens/s | of plain, median of the rounds |\n|---|---|---|")
    for name, values in speeds.items():
        ratios = [mine / base for mine, base in zip(values, speeds["plain"], strict=True)]
        print(f"| {name} | {statistics.median(values):,.0f} | {statistics.median(ratios):.3f} |")


if __name__ == "__main__":
    main()

"""The gap between engine and learner, with and without one order of adding, and what the order costs.

    python -m benchmarks.exact [--shape 0.6B] [--loads static,agent] [--rounds 3]
    python -m benchmarks.exact --shape 8B --prompts 8 --micro 8192        # a larger model, fewer prompts
    python -m benchmarks.exact --kv fp8 --loads static,arpo    # keys and values in eight bits
    python -m benchmarks.exact --device cpu --shape tiny --quick          # to try the benchmark itself

static   answers to prompts, as in `benchmarks.gpu`
agent    turns of answer and tool result
arpo     the same, and forks of the context after a tool result
expa     answers in which actions beyond the vocabulary write tokens, under a grammar

Each load is sampled and then trained (log-probs and gradients, in micro-batches), first with the order of
`model.exact`, then without it; random weights, no end token. All samples are trained both ways, one after
the other, so that the learner's times are of one moment; gaps are those of the way that sampled. A round
whose time is not counted comes first. Prints a Markdown table: gaps over all trained tokens, medians of the
rates, both of sampled tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.report import Row
from benchmarks.gpu.works import random_tokens
from benchmarks.shapes import SHAPES, asked_kernels, random_decoder
from graft.actions.grammar import Automaton
from graft.actions.space import ActionSpace
from graft.algos.batch import Batch
from graft.engine.native.engine import NativeEngine
from graft.models.decoder import Decoder
from graft.models.device_choice import choose_device, choose_dtype
from graft.models.order_probe import find_order
from graft.models.product_probe import find_kernel_order
from graft.models.row_order import RowOrder
from graft.models.tree.forest import Forest
from graft.models.tree.packing import split_rows
from graft.rollout.batching import to_batch
from graft.types import Author, Episode, Leaf, Sampling, Span, Task, Trajectory

Orders = dict[str, RowOrder | None]
"""By mode, "on" and "off"."""

MAX_TRAINED = 20_000_000_000
"""Parameters; of a larger model only attention has gradients, so that they fit beside it."""

NUM_ACTIONS = 8
"""Of `expa`: each writes three tokens."""


@dataclass(frozen=True)
class Load:
    """What is sampled: the lengths are of tokens."""

    prompts: int
    samples: int
    prompt: int
    answer: int
    result: int = 0
    """Of a tool; 0: there is none."""
    turns: int = 1
    forks: bool = False
    actions: bool = False

    @property
    def kv_tokens(self) -> int:
        """Room for all of it at once: the turns before a fork are shared."""
        leaves = 2 ** (self.turns - 1) if self.forks else 1
        turns = 2 * leaves - 1 if self.forks else self.turns
        tokens = turns * (self.answer + self.result) + 128 * leaves
        return self.prompts * (self.prompt + self.samples * tokens)


LOADS = {
    "static": Load(64, 8, 256, 512),
    "agent": Load(64, 8, 256, 128, result=100, turns=4),
    "arpo": Load(64, 4, 256, 128, result=100, turns=3, forks=True),
    "expa": Load(64, 8, 256, 256, actions=True),
}
QUICK = {
    "static": Load(2, 2, 20, 8),
    "agent": Load(2, 2, 20, 6, result=7, turns=3),
    "arpo": Load(2, 2, 20, 6, result=7, turns=2, forks=True),
    "expa": Load(2, 2, 20, 12, actions=True),
}


class Player:
    """Episodes of a load, sampled by one engine."""

    def __init__(self, decoder: Decoder, load: Load) -> None:
        self.decoder, self.load, self.rng = decoder, load, random.Random(0)
        self.grammar, self.space, self.allowed = None, None, None
        vocab_size = decoder.shape.vocab_size
        if load.actions:
            actions = range(vocab_size, vocab_size + NUM_ACTIONS)
            self.grammar = Automaton(0, {}, writes={(0, a): (a % 7, a % 5, a % 3) for a in actions})
            table = np.ones((1, vocab_size + NUM_ACTIONS), dtype=bool)
            self.space = ActionSpace(vocab_size, NUM_ACTIONS, table)
            self.allowed = torch.zeros(1, decoder.shape.head_rows, dtype=torch.bool)
            self.allowed[:, : vocab_size + NUM_ACTIONS] = True
            self.allowed = self.allowed.to(decoder.device)
        how: dict[str, Any] = {"space": self.space, "kernels": asked_kernels(decoder)}
        self.engine = NativeEngine(decoder, kv_tokens=load.kv_tokens, **how)

    def play(self) -> list[Trajectory]:
        """The rows of new prompts."""
        episodes = [Episode(Task(str(n), "exact")) for n in range(self.load.prompts)]

        async def main() -> None:
            await asyncio.gather(*map(self._attempts, episodes))

        asyncio.run(main())
        return [row for episode in episodes for row in episode.trajectories()]

    async def _attempts(self, episode: Episode) -> None:
        prompt = random_tokens(self.rng, self.load.prompt, self.decoder.shape.vocab_size)
        tip = episode.append(Span(None, Author.TASK, prompt))
        root = self.engine.open(prompt)
        forks = [root.fork() for _ in range(self.load.samples)]
        root.close()
        await asyncio.gather(*(self._turn(episode, tip, fork, 1) for fork in forks))

    async def _turn(self, episode: Episode, tip: int, context: Any, turn: int) -> None:
        load = self.load
        done = await context.sample(Sampling(max_tokens=load.answer), self.grammar)
        parts = done.tokens, done.actions, done.logprobs, done.entropies, done.modes
        mask = [action >= 0 for action in done.actions]
        tip = episode.append(Span(tip, Author.POLICY, *parts, mask=mask))
        if turn == load.turns:
            episode.leaves.append(Leaf((tip,)))
            context.close()
            return
        result = random_tokens(self.rng, load.result, self.decoder.shape.vocab_size)
        context.append(result)
        tip = episode.append(Span(tip, Author.ENV, result))
        contexts = [context, context.fork()] if load.forks else [context]
        await asyncio.gather(*(self._turn(episode, tip, each, turn + 1) for each in contexts))


@dataclass
class Measured:
    """One load in one mode."""

    gaps: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    rollout: list[float] = field(default_factory=list[float])
    learner: list[float] = field(default_factory=list[float])

    def line(self, load: str, mode: str) -> str:
        gaps = torch.cat(self.gaps).double()
        numbers = f"{len(gaps):,} | {gaps.mean():.2e} | {gaps.max():.2e}"
        rates = f"{median(self.rollout):,.0f} | {median(self.learner):,.0f}"
        return f"| {load} | {mode} | {numbers} | {rates} |"


def learn(
    player: Player,
    rows: list[Trajectory],
    tokens_per_micro: int,
    found: list[tuple[torch.Tensor, Batch]],
) -> None:
    """Add the learner's log-probs of each micro-batch to `found`; gradients are computed."""
    for part in split_rows(rows, tokens_per_micro):
        micro = [rows[number] for number in part]
        batch = to_batch(micro)
        forest = Forest(micro, batch.mask, player.decoder.device)
        logp, _ = forest.logprobs(player.decoder, 1.0, player.allowed)
        logp.sum().backward()
        found.append((logp.detach(), batch))


def once(
    bench: Bench,
    player: Player,
    found: dict[str, Measured],
    orders: Orders,
    mode: str,
    is_timed: bool,
) -> None:
    """One round, sampled in this mode and learned in every one; its numbers are added to `found`."""
    rows: list[Trajectory] = []
    seconds = bench.time(lambda: rows.extend(player.play()))
    num_sampled = sum(
        len(span)
        for episode in {id(row.episode): row.episode for row in rows}.values()
        for span in episode.spans
        if span.author is Author.POLICY
    )
    if is_timed:
        found[mode].rollout.append(num_sampled / seconds)
    for each, order in orders.items():
        player.decoder.use_order(order)
        learned: list[tuple[torch.Tensor, Batch]] = []
        work = partial(learn, player, rows, bench.tokens_per_micro, learned)
        learning = bench.time(work)
        player.decoder.zero_grad(set_to_none=True)
        if is_timed:
            found[each].learner.append(num_sampled / learning)
        if each == mode:
            found[mode].gaps += [
                (logp.cpu() - batch.logprobs).abs()[batch.mask] for logp, batch in learned
            ]
    player.decoder.use_order(orders[mode])


def measure(
    bench: Bench,
    shape: str,
    load: Load,
    note: Callable[[str], None],
    modes: str = "on,off",
    kv: str = "model",
) -> dict[str, Measured]:
    """These modes, with the same weights."""
    extra = NUM_ACTIONS if load.actions else 0
    sizes = replace(SHAPES[shape], extra=extra)
    decoder = random_decoder(sizes, bench.device, bench.dtype, kv=kv)
    if decoder.shape.num_params > MAX_TRAINED:
        for name, parameter in decoder.named_parameters():
            parameter.requires_grad_(".attention." in name)
    order = find_order(decoder)
    note(find_kernel_order(decoder)[1] if bench.device.type == "cuda" else f"order: {order}")
    orders: Orders = {"on": order, "off": None} if order is not None else {"off": None}
    if kv == "fp8":  # which is refused without an order
        modes = "on"
    orders = {mode: its for mode, its in orders.items() if mode in modes} or orders
    found = {mode: Measured() for mode in orders}
    for mode, its in orders.items():  # engines hold graphs of one order
        decoder.use_order(its)
        player = Player(decoder, load)
        for number in range(bench.rounds + 1):
            once(bench, player, found, orders, mode, is_timed=number > 0)
        player.engine.close()
        del player
        bench.free()
    return found


def gap_rows(bench: Bench, shape: str) -> list[Row]:
    """The gap with the order, over all loads, and what the order costs: rows of `benchmarks.gpu`."""
    loads = QUICK if shape == "tiny" else LOADS
    found = {name: measure(bench, shape, load, print) for name, load in loads.items()}
    ordered = {name: modes["on"] for name, modes in found.items() if "on" in modes}
    if not ordered:
        return [Row(f"{shape} gap", "", None, note="no order of adding holds here")]
    gaps = torch.cat([gap for mode in ordered.values() for gap in mode.gaps]).double()
    note = f"{len(gaps):,} tokens; without the order "
    note += ", ".join(f"{name} {torch.cat(m['off'].gaps).mean():.1e}" for name, m in found.items())
    rows = [
        Row(f"{shape} gap, {name}", "", value, 0.0, 0.0, is_less_better=True, note=note)
        for name, value in (("mean", gaps.mean().item()), ("max", gaps.max().item()))
    ]
    for part in ("rollout", "learner"):
        rates = {
            name: [median(getattr(modes[mode], part)) for mode in ("on", "off")]
            for name, modes in found.items()
        }
        shares = [off / on - 1 for on, off in rates.values()]
        note = ", ".join(
            f"{name} {on:,.0f} of {off:,.0f} tok/s" for name, (on, off) in rates.items()
        )
        how = {"is_less_better": True, "rounds": shares, "note": note}
        rows.append(
            Row(f"{shape} cost of it, {part}", "more time", median(shares), 0.05, 0.0, **how)
        )
    return rows


def main(arguments: list[str] | None = None) -> dict[str, dict[str, Measured]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", default="0.6B", choices=SHAPES)
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro", type=int, default=16_384, help="tokens per micro-batch")
    parser.add_argument("--prompts", type=int, help="of a load, instead of its own number")
    parser.add_argument("--modes", default="on,off", help="on alone: many tokens in little time")
    parser.add_argument("--kv", default="model", choices=("model", "fp8"), help="as engine.kv")
    parser.add_argument("--quick", action="store_true", help="one round of small loads")
    args = parser.parse_args(arguments)
    device = choose_device(args.device)
    dtype = choose_dtype("auto", device)[0]
    bench = Bench(device, dtype, 1 if args.quick else args.rounds, 0.0, args.micro)
    lines = ["| load | exact | tokens | mean gap | max gap | rollout tok/s | learner tok/s |"]
    lines.append("|---|---|---|---|---|---|---|")
    found: dict[str, dict[str, Measured]] = {}
    for name in args.loads.split(","):
        if name not in LOADS:
            parser.error(f"unknown load {name!r}; known: {', '.join(LOADS)}")
        load = (QUICK if args.quick else LOADS)[name]
        load = replace(load, prompts=args.prompts or load.prompts)
        note = partial(print, f"{name}:")
        found[name] = measure(bench, args.shape, load, note, args.modes, args.kv)
        new = [measured.line(name, mode) for mode, measured in found[name].items()]
        lines += new
        print("\n".join(new), flush=True)
    print("\n" + "\n".join(lines))
    return found


if __name__ == "__main__":
    main()

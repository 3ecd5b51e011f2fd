"""With drafts and without the same tokens are drawn, with all bits of what is recorded of them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from engine_kit import (
    EXTRA,
    TOOLS,
    VOCAB,
    LetterTokenizer,
    prompt,
    sample_all,
    tiny_decoder,
    tools_space,
)

from graft.actions.grammar import Automaton
from graft.actions.space import ActionSpace
from graft.engine.native.context import NativeContext
from graft.engine.native.drafts.gain import RowTimes
from graft.engine.native.engine import NativeEngine
from graft.models.decoder import Decoder
from graft.models.order_probe import find_order
from graft.structure import Structure
from graft.text.tokenizer import FastTokenizer
from graft.types import Completion, Sampling

LOW: dict[str, Any] = {"temperature": 0.3}
"""Few tokens are likely, so that texts repeat themselves."""


@pytest.fixture(autouse=True)
def steps_of_a_steady_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured times decide what is drafted: on a busy machine it may be nothing."""
    monkeypatch.setattr(RowTimes, "add", lambda *_: None)


def ordered(**changes: Any) -> Decoder:
    decoder = tiny_decoder(**{"max_positions": 1024, **changes})
    order = find_order(decoder)
    if order is None:
        pytest.skip("no order of rows holds on this machine: nothing is drafted")
    decoder.use_order(order)
    return decoder


class Agents:
    """Attempts that sample, fork, read results and sample again, with draws that depend on nothing else."""

    def __init__(
        self, engine: NativeEngine, seed: int, sampling: dict[str, Any], grammar: Any
    ) -> None:
        self.engine, self.seed, self.sampling, self.grammar = engine, seed, sampling, grammar
        self.structures: tuple[Structure | None, ...] = (None,)
        self.done: dict[str, Completion] = {}

    def run(self, tasks: int) -> dict[str, Completion]:
        async def main() -> None:
            await asyncio.gather(*(self._task(str(number)) for number in range(tasks)))

        asyncio.run(main())
        return dict(sorted(self.done.items()))

    async def _task(self, name: str) -> None:
        rng = random.Random(f"{self.seed} {name}")
        root = self.engine.open(
            prompt(rng.randint(3, 40), len(name) + self.seed), key=hash(rng.random())
        )
        forks = [root.fork() for _ in range(rng.randint(1, 4))]
        await asyncio.gather(
            *(self._attempt(f"{name}.{i}", fork, 2) for i, fork in enumerate(forks))
        )
        root.close()

    async def _attempt(self, name: str, context: NativeContext, turns: int) -> None:
        rng = random.Random(f"{self.seed} {name}")
        how = {**self.sampling, "structure": rng.choice(self.structures)}
        how["max_tokens"] = rng.randint(max(how.get("min_tokens", 1), 5), 70)
        self.done[name] = done = await context.sample(Sampling(**how), self.grammar)
        if turns and rng.random() < 0.8:
            quoted = done.tokens[: rng.randint(0, 12)]
            context.append(prompt(rng.randint(1, 20), turns) + quoted)
            at = rng.randint(1, len(context.tokens))
            branches = [context, *(context.fork() for _ in range(rng.randint(0, 2)))]
            branches += [context.fork(at=at)] if self.grammar is None else []
            later = (self._attempt(f"{name}.{i}", b, turns - 1) for i, b in enumerate(branches))
            await asyncio.gather(*later)
        context.close()


def assert_same_bits(
    decoder: Decoder,
    seed: int,
    sampling: dict[str, Any],
    grammar: Any = None,
    structures: tuple[Structure | None, ...] = (None,),
    must_accept: bool = True,
    **options: Any,
) -> None:
    results: list[dict[str, Completion]] = []
    for drafts in ("off", "auto"):
        options = {"kv_tokens": 1 << 14, "page_size": 4, **options}
        engine = NativeEngine(decoder, seed=seed, drafts=drafts, **options)
        agents = Agents(engine, seed, sampling, grammar)
        agents.structures = structures
        results.append(agents.run(tasks=4))
        accepted = sum(n for name, n in engine.stats.items() if name.startswith("drafts_accepted"))
        assert (accepted > 0) is (drafts == "auto" and must_accept)
    assert results[0] == results[1]  # floats too: every bit


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_plain_agents_with_forks(seed: int) -> None:
    assert_same_bits(ordered(), seed, LOW)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 3},
        {**LOW, "top_p": 0.8, "min_p": 0.05},
        {**LOW, "repetition_penalty": 1.05},
        {**LOW, "min_tokens": 9, "stop_tokens": (3, 5, 11)},
        {**LOW, "stop": ("bc", "qqd", "mm")},
    ],
)
def test_every_way_of_sampling(sampling: dict[str, Any]) -> None:
    assert_same_bits(ordered(), 3, sampling, tokenizer=LetterTokenizer(), must_accept=True)


def test_a_pool_that_preempts() -> None:
    assert_same_bits(ordered(), 4, LOW, kv_tokens=240)


@pytest.mark.parametrize(
    "changes", [{"heads": 2, "kv_heads": 1}, {"windows": (8, 0)}, {"windows": (6, 6)}]
)
def test_other_attention(changes: dict[str, Any]) -> None:
    assert_same_bits(ordered(**changes), 5, LOW)


def test_large_pages_whose_tiles_siblings_share() -> None:
    decoder = ordered(max_positions=2048)
    results = []
    for drafts in ("off", "auto"):
        engine = NativeEngine(decoder, kv_tokens=1 << 14, page_size=16, drafts=drafts)
        root = engine.open(prompt(530))
        results.append(sample_all([root.fork() for _ in range(4)], Sampling(max_tokens=60, **LOW)))
    assert engine.stats["drafts_accepted/own"] + engine.stats["drafts_accepted/siblings"] > 0
    assert results[0] == results[1]


def test_modes_of_a_grammar() -> None:
    allowed = np.zeros((2, VOCAB), dtype=bool)
    allowed[0, :12] = allowed[1, 10:] = True
    grammar = Automaton(0, {(0, a): 1 for a in range(3)} | {(1, a): 0 for a in range(18, VOCAB)})
    assert_same_bits(ordered(), 6, LOW, grammar, space=ActionSpace(VOCAB, allowed=allowed))


def test_actions_beyond_the_vocabulary() -> None:
    decoder = ordered(extra=64)
    assert EXTRA <= 64
    assert_same_bits(decoder, 7, {"temperature": 0.6}, TOOLS, space=tools_space())


def test_structures_beside_plain_rows() -> None:
    pytest.importorskip("llguidance")
    tokenizer = FastTokenizer.characters('0123456789{}":, abcdefgh')
    decoder = ordered(vocab_size=tokenizer.vocab_size)
    digits = Structure.regex("[0-9]{3,40}")
    assert_same_bits(
        decoder, 8, LOW, structures=(None, digits), tokenizer=tokenizer, eos_ids=(tokenizer.eos_id,)
    )


def test_pauses_and_new_weights() -> None:
    """A paused sample goes on from its tokens; after `load` the attempts before are earlier ones."""
    results = []
    for drafts in ("off", "auto"):
        engine = NativeEngine(ordered(), kv_tokens=4096, page_size=4, drafts=drafts)

        async def pausing(engine: NativeEngine = engine) -> list[list[int]]:
            texts = []
            for version in (0, 1, 1):
                engine.load(None, version)
                contexts = [engine.open(prompt(9), key=k) for k in range(3)]
                samples = [
                    asyncio.ensure_future(c.sample(Sampling(max_tokens=60, **LOW)))
                    for c in contexts
                ]
                for _ in range(4):  # too few to end, were every draft the longest and right
                    await asyncio.sleep(0)
                engine.pause()
                parts = await asyncio.gather(*samples)
                rest = [
                    c.sample(Sampling(max_tokens=60 - len(part.tokens), **LOW))
                    for c, part in zip(contexts, parts, strict=True)
                ]
                await asyncio.gather(*rest)
                texts += [list(c.tokens) for c in contexts]
                for c in contexts:
                    c.close()
            return texts

        results.append(asyncio.run(pausing()))
    assert results[0] == results[1]
    assert engine.stats["drafts_accepted/earlier"] > 0

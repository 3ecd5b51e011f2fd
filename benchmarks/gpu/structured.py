"""Answers under a schema beside free ones: what they cost, and whether the learner has their bits.

One prompt in eight asks for JSON. The vocabulary is made here: all bytes, and random strings of printable
characters, so that masks are as wide as a real model's. Random weights write odd texts, which are harder to
follow than a trained model's.
"""

from __future__ import annotations

import asyncio
import random
import string
import time
from statistics import median
from typing import Any
from unittest.mock import patch

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.report import Row
from benchmarks.gpu.rollouts import pool_tokens
from benchmarks.gpu.works import Work
from benchmarks.shapes import SHAPES, random_decoder
from graft.engine.native import loop
from graft.engine.native.engine import NativeEngine
from graft.models.order_probe import find_order
from graft.models.tree.forest import Forest
from graft.rollout.batching import to_batch
from graft.structure import Structure
from graft.text.tokenizer import FastTokenizer
from graft.types import Author, Completion, Episode, Leaf, Sampling, Span, Task

SHARE = 8
"""One prompt of so many asks for JSON."""
COMPARED = 4
"""Prompts whose answers the learner scores."""
RECORD = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "kind": {"enum": ["a", "bb", "ccc"]},
        "score": {"type": "number"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "done": {"type": "boolean"},
    },
    "required": ["id", "kind", "score", "tags", "done"],
    "additionalProperties": False,
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def _lists(*items: dict[str, Any]) -> list[Structure]:
    return [Structure.json({"type": "array", "items": item, "minItems": 200}) for item in items]


STRUCTURES = {
    "under a schema": _lists({"type": "string"}, RECORD),
    "under a schema, strings of bounded length": _lists(PERSON),
}
"""Of strings whose length is bounded the matcher has another state for every length that is left."""


def structured(bench: Bench, name: str, work: Work) -> list[Row]:
    decoder = random_decoder(SHAPES[name], bench.device, bench.dtype)
    decoder.use_order(find_order(decoder))
    tokenizer = made_tokenizer(decoder.shape.vocab_size - 1)
    engine = NativeEngine(
        decoder, tokenizer=tokenizer, kv_tokens=pool_tokens(bench, decoder.shape, work)
    )
    prompts = work.random_prompts(random.Random(0), decoder.shape.vocab_size)
    try:
        return [
            row
            for title, structures in STRUCTURES.items()
            for row in _rows(
                bench,
                engine,
                prompts,
                work,
                f"{name} {work.title}, 1 of {SHARE} {title}",
                structures,
            )
        ]
    finally:
        engine.close()


def _rows(
    bench: Bench,
    engine: NativeEngine,
    prompts: list[list[int]],
    work: Work,
    title: str,
    structures: list[Structure],
) -> list[Row]:
    host: list[float] = []

    def play(structures: list[Structure]) -> tuple[float, list[Completion]]:
        done: list[Completion] = []
        seconds = bench.time(
            lambda: done.extend(asyncio.run(_sample(engine, prompts, work, structures)))
        )
        return sum(len(one.tokens) for one in done) / seconds, done

    for some in (structures, []):  # kernels and structures compiled, graphs captured
        play(some)
    free, held = [], []
    done: list[Completion] = []
    for _ in range(bench.rounds):
        free.append(play([])[0])
        with HostTimer(host):
            rate, done = play(structures)
        held.append(rate)
    ratios = [a / b for a, b in zip(held, free, strict=True)]
    unequal, total = _compare(engine.decoder, prompts, done, work)
    micros = [1e6 * seconds for seconds in host]
    return [
        Row(f"{title}: rate", "of free", median(ratios), 0.9, rounds=ratios),
        Row(f"{title}: host", "us a token", median(micros), 50, is_less_better=True, rounds=micros),
        Row(f"{title}: unequal log-probs", f"of {total}", unequal, 0, is_less_better=True),
    ]


class HostTimer:
    """Adds the seconds that a drawn token under a structure took on the host."""

    def __init__(self, into: list[float]) -> None:
        self.into, self.seconds, self.tokens = into, 0.0, 0

    def __enter__(self) -> None:
        find_rows, match = loop.find_rows, loop.EngineLoop._match

        def timed(work: Any, *args: Any) -> Any:
            started = time.perf_counter()
            try:
                return work(*args)
            finally:
                self.seconds += time.perf_counter() - started

        def counted(loop_: Any, draw: Any) -> Any:
            self.tokens += 1
            return timed(match, loop_, draw)

        self.patches = [
            patch.object(loop, "find_rows", lambda requests: timed(find_rows, requests)),
            patch.object(loop.EngineLoop, "_match", counted),
        ]
        for each in self.patches:
            each.start()

    def __exit__(self, *_: object) -> None:
        for each in self.patches:
            each.stop()
        self.into.append(self.seconds / max(self.tokens, 1))


async def _sample(
    engine: NativeEngine, prompts: list[list[int]], work: Work, structures: list[Structure]
) -> list[Completion]:
    samples = []
    for number, prompt in enumerate(prompts):
        root = engine.open(prompt)
        for sample in range(work.samples):
            is_held = structures and number % SHARE == 0
            structure = structures[sample % len(structures)] if is_held else None
            sampling = Sampling(max_tokens=work.response, structure=structure)
            samples.append((root.fork(), sampling))
        root.close()
    done = await asyncio.gather(*(context.sample(sampling) for context, sampling in samples))
    for context, _ in samples:
        context.close()
    return done


@torch.no_grad()
def _compare(
    decoder: Any, prompts: list[list[int]], done: list[Completion], work: Work
) -> tuple[int, int]:
    """Log-probs of the learner that differ, and all, of some answers under a schema."""
    episode = Episode(Task("0", "structured"))
    for number in range(0, min(COMPARED * SHARE, work.prompts), SHARE):
        root = episode.append(Span(None, Author.TASK, prompts[number]))
        for sample in range(work.samples):
            span = Span.sampled(root, done[number * work.samples + sample])
            episode.leaves.append(Leaf((episode.append(span),)))
    rows = [*episode.trajectories()]
    batch = to_batch(rows)
    logp, _ = Forest(rows, batch.mask, decoder.device).logprobs(decoder)
    return int((logp.cpu() != batch.logprobs)[batch.mask].sum()), batch.num_tokens


def made_tokenizer(size: int) -> FastTokenizer:
    """Byte-level, with `size` tokens before the end of the text."""
    rng = random.Random(0)
    vocab = dict(FastTokenizer.bytes()._backend.get_vocab(with_added_tokens=False))
    vocab = {text: number for text, number in vocab.items() if number < 256}
    letters = string.ascii_letters + string.digits + string.punctuation + "Ġ" * 8
    while len(vocab) < size:
        vocab.setdefault("".join(rng.choices(letters, k=rng.randint(2, 8))), len(vocab))
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return FastTokenizer(backend, {"eos_token": "<|endoftext|>"})

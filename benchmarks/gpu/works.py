"""What is to be done: groups of forced length, and the least a machine must move or multiply for it.

P prompts, G samples each; a work of 64 prompts x 8, prompt 256, response 512 is "64x8 256->512"
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from graft.engine.native.kv.pages import kv_bytes
from graft.models.shape import ModelShape
from graft.planning.step_time import read_parameters

SPARE = 128
"""Pool tokens per sample beyond its response: the copied last page of the prompt, and the page it
ends in."""


@dataclass(frozen=True, slots=True)
class Work:
    prompts: int
    samples: int
    prompt: int
    response: int

    @property
    def title(self) -> str:
        return f"{self.prompts}x{self.samples} {self.prompt}->{self.response}"

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def sampled(self) -> int:
        """Tokens drawn."""
        return self.sequences * self.response

    @property
    def unique(self) -> int:
        """Tokens of all trees, a shared prompt counted once: what one training step computes."""
        return self.prompts * self.prompt + self.sampled

    @property
    def kv_tokens(self) -> int:
        """A pool in which all sequences run at once."""
        return self.prompts * (self.prompt + SPARE) + self.sequences * (self.response + SPARE)

    def random_prompts(self, rng: random.Random, vocab_size: int) -> list[list[int]]:
        return [random_tokens(rng, self.prompt, vocab_size) for _ in range(self.prompts)]

    def decode_bytes(
        self, shape: ModelShape, dtype: torch.dtype, *, is_shared: bool, rounds_kv: bool = False
    ) -> float:
        """Bytes that all decode steps move at the least: weights, keys and values, logits.

        Logits count as bf16 written once and read once. `is_shared` reads a prompt once per group
        and step, else every sample reads its own.
        """
        ends = shape.head_rows * shape.width
        weights = (read_parameters(shape, self.sequences) + ends) * dtype.itemsize
        readers = self.prompts if is_shared else self.sequences
        private = self.sequences * (self.response - 1) / 2  # the mean over the steps
        kv = kv_bytes(shape, dtype, rounds_kv) * (readers * self.prompt + private)
        return self.response * (weights + kv + 4 * self.sequences * shape.vocab_size)

    def training_flops(self, shape: ModelShape) -> float:
        """Forward and backward of every unique token: six per weight, attention three times 4 L H d."""
        prompts = self.prompts * self.prompt * self.prompt / 2  # pairs of query and key
        responses = self.sampled * (self.prompt + self.response / 2)
        attention = 12 * shape.layers * shape.q_size * (prompts + responses)
        return 6 * shape.num_params * self.unique + attention


def random_tokens(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(length)]


ANCHOR = Work(64, 8, 256, 512)
LONG = Work(16, 16, 4096, 1024)
WIDE = Work(32, 16, 1024, 1024)
SMALL = Work(8, 8, 256, 512)
SINGLE = Work(1, 1, 256, 512)
TINY = Work(4, 2, 24, 8)

GOALS: dict[tuple[str, Work], tuple[float, float]] = {
    ("0.6B", ANCHOR): (80e3, 95e3),
    ("0.6B", LONG): (25e3, 40e3),
    ("0.6B", SMALL): (38e3, 45e3),
    ("0.6B", SINGLE): (1400, 2000),
    ("0.6B", WIDE): (40e3, 60e3),
    ("1.7B", ANCHOR): (50e3, 75e3),
    ("30B-A3B", ANCHOR): (20e3, 25e3),
    ("30B-A3B", LONG): (9e3, 11e3),
    ("30B-A3B", SMALL): (3.6e3, 4.2e3),
    ("30B-A3B", SINGLE): (300, 450),
}
"""Tokens a second: what rollouts must reach, what they aim at."""


KV8_GOALS: dict[tuple[str, Work], tuple[float, float]] = {("0.6B", ANCHOR): (90e3, 105e3)}
"""The same with keys and values in eight bits (`engine.kv: fp8`)."""


def works_of(name: str) -> list[Work]:
    """The rollouts of a shape, the most important first."""
    if name == "tiny":
        return [TINY, Work(1, 1, 24, 8)]
    if name in ("1.7B", "4B"):
        return [ANCHOR]
    return [ANCHOR, LONG, SMALL, SINGLE, WIDE]


def anchor_of(name: str) -> Work:
    return works_of(name)[0]

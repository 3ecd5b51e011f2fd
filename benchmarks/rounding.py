"""How far two bf16 forwards of one random network drift apart, and what would keep them together.

    python -m benchmarks.rounding [--layers 28]

A Qwen3-0.6B without its vocabulary, emulated in fp32 with every rounding to bf16 in its place, 192
tokens. Two runs differ only in the order in which products add up (their inputs halved or not), as
engine and learner do. Printed: the mean distance of the log-probs of drawn tokens from a run without
any rounding, and between the two. On a CPU, about a minute.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

WIDTH, FF, HEADS, KV_HEADS, SIZE, VOCABULARY, TOKENS = 1024, 3072, 16, 8, 128, 20_000, 192
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Rounding:
    """Where numbers become bf16: nowhere, everywhere, or everywhere but in the stream."""

    inside: bool = True
    stream: bool = True

    def within(self, x: Tensor) -> Tensor:
        return x.bfloat16().float() if self.inside else x

    def after_a_sum(self, x: Tensor) -> Tensor:
        return x.bfloat16().float() if self.stream else x


def matrix(rows: int, columns: int) -> Tensor:
    return (torch.randn(rows, columns) * columns**-0.5).bfloat16().float()


def product(x: Tensor, weight: Tensor, halved: bool) -> Tensor:
    if not halved:
        return x @ weight.T
    half = x.shape[1] // 2
    return x[:, :half] @ weight[:, :half].T + x[:, half:] @ weight[:, half:].T


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def turn(x: Tensor) -> Tensor:
    half = SIZE // 2
    angle = torch.arange(len(x))[:, None] * 1e6 ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, rounding: Rounding) -> Tensor:
    """Causal, with weights rounded as our kernels round them."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    score = torch.einsum("ihd,jhd->hij", q, k) * (SIZE**-0.5 * LOG2_E)
    score = score.masked_fill(~torch.ones(len(q), len(q)).tril().bool(), -torch.inf)
    weight = rounding.within(torch.exp2(score - score.amax(-1, keepdim=True).ceil()))
    return torch.einsum("hij,jhd->ihd", weight, v) / weight.sum(-1).T[:, :, None]


class Network:
    """Random weights, the same for every run."""

    def __init__(self, layers: int) -> None:
        qkv = (HEADS + 2 * KV_HEADS) * SIZE
        shapes = ((qkv, WIDTH), (WIDTH, HEADS * SIZE), (2 * FF, WIDTH), (WIDTH, FF))
        self.blocks = [[matrix(*shape) for shape in shapes] for _ in range(layers)]
        self.embedding = matrix(VOCABULARY, WIDTH)
        self.tokens = torch.randint(VOCABULARY, (TOKENS,))

    def logprobs(self, rounding: Rounding, halved: bool = False) -> Tensor:
        """[T, V]"""
        within = rounding.within
        x = self.embedding[self.tokens]
        for qkv, out, gate_up, down in self.blocks:
            heads = within(product(within(unit(x)), qkv, halved)).view(TOKENS, -1, SIZE)
            q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
            q, k = (within(turn(within(unit(part)))) for part in (q, k))
            seen = within(attend(q, k, v, rounding)).reshape(TOKENS, -1)
            x = rounding.after_a_sum(x + within(product(seen, out, halved)))
            gate, up = within(product(within(unit(x)), gate_up, halved)).chunk(2, -1)
            gated = within(within(F.silu(gate)) * up)
            x = rounding.after_a_sum(x + within(product(gated, down, halved)))
        return within(product(within(unit(x)), self.embedding, halved)).log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=28)
    torch.manual_seed(0)
    network = Network(parser.parse_args().layers)
    exact = network.logprobs(Rounding(inside=False, stream=False))
    drawn = torch.multinomial(exact.exp(), 1)

    def gap(one: Tensor, other: Tensor) -> float:
        return (one.gather(1, drawn) - other.gather(1, drawn)).abs().mean().item()

    print("| stream | from fp32 | between two orders of adding |\n|---|---|---|")
    for name, rounding in (("bf16", Rounding()), ("fp32", Rounding(stream=False))):
        plain, halved = network.logprobs(rounding), network.logprobs(rounding, halved=True)
        print(f"| {name} | {gap(plain, exact):.1e} | {gap(plain, halved):.1e} |")


if __name__ == "__main__":
    main()

"""A two-layer decoder, a byte tokenizer and the dense reference that the engine tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graft.engine.native.context import Context
from graft.engine.native.engine import NativeEngine
from graft.models.decoder import Decoder, causal
from graft.models.shape import Shape
from graft.types import Completion, Sampling

VOCAB = 23


def tiny_decoder(seed: int = 0, **changes: Any) -> Decoder:
    sizes: dict[str, Any] = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
    return Decoder(Shape(**{**sizes, "ff": 48, "vocab_size": VOCAB, **changes})).initialise(seed)


def tiny_engine(decoder: Decoder | None = None, **options: Any) -> NativeEngine:
    options = {"kv_tokens": 1024, "page_size": 4, **options}
    return NativeEngine(tiny_decoder() if decoder is None else decoder, **options)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + 3 * salt + i * i) % VOCAB for i in range(length)]


def sample_all(contexts: Sequence[Context], sampling: Sampling) -> list[Completion]:
    async def main() -> list[Completion]:
        return await asyncio.gather(*(context.sample(sampling) for context in contexts))

    return asyncio.run(main())


def sample_one(context: Context, sampling: Sampling, grammar: Any = None) -> Completion:
    async def main() -> Completion:
        return await context.sample(sampling, grammar)

    return asyncio.run(main())


@torch.no_grad()
def dense_logits(decoder: Decoder, tokens: list[int]) -> Tensor:
    """[T, V] of one plain causal forward."""
    hidden = decoder(torch.tensor(tokens), torch.arange(len(tokens)), causal)
    return hidden @ decoder.head_weight.T


def assert_is_what_the_model_says(
    decoder: Decoder,
    before: list[int],
    completion: Completion,
    temperature: float = 1.0,
    allowed: Tensor | None = None,
) -> None:
    """Log-probs and entropies of the completion equal those of a full forward."""
    logits = dense_logits(decoder, before + completion.tokens)[len(before) - 1 : -1] / temperature
    if allowed is not None:
        logits = logits.masked_fill(~allowed[completion.modes], -torch.inf)
    logp = logits.log_softmax(-1)
    want = logp.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
    entropy = torch.special.entr(logp.exp()).sum(-1)
    torch.testing.assert_close(torch.tensor(completion.logprobs), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(completion.entropies), entropy, atol=1e-5, rtol=0)


class ByteTokenizer:
    """One token per byte of UTF-8."""

    vocab_size: int = 256
    eos_id: int | None = None
    pad_id: int | None = None
    chat_template: str | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def save(self, folder: Any) -> None:
        raise NotImplementedError

"""A two-layer decoder, a byte tokenizer and the dense reference that the engine tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graft.actions.grammar import Automaton
from graft.actions.space import ActionSpace
from graft.engine.native.context import NativeContext
from graft.engine.native.engine import NativeEngine
from graft.models.decoder import Decoder, causal
from graft.models.shape import ModelShape
from graft.types import NO_ACTION, Completion, Finish, Sampling

VOCAB = 23


def tiny_decoder(seed: int = 0, **changes: Any) -> Decoder:
    sizes: dict[str, Any] = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
    return Decoder(ModelShape(**{**sizes, "ff": 48, "vocab_size": VOCAB, **changes})).initialise(
        seed
    )


def tiny_engine(decoder: Decoder | None = None, **options: Any) -> NativeEngine:
    options = {"kv_tokens": 1024, "page_size": 4, **options}
    return NativeEngine(tiny_decoder() if decoder is None else decoder, **options)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + 3 * salt + i * i) % VOCAB for i in range(length)]


def score_one(
    engine: NativeEngine,
    tokens: Sequence[int],
    at: Sequence[int],
    continuations: Sequence[Sequence[int]],
    mode: int = 0,
) -> list[list[list[float]]]:
    return engine.score([tokens], [at], continuations, mode)[0]


def sample_all(contexts: Sequence[NativeContext], sampling: Sampling) -> list[Completion]:
    async def main() -> list[Completion]:
        return await asyncio.gather(*(context.sample(sampling) for context in contexts))

    return asyncio.run(main())


def sample_one(context: NativeContext, sampling: Sampling, grammar: Any = None) -> Completion:
    async def main() -> Completion:
        return await context.sample(sampling, grammar)

    return asyncio.run(main())


def gather(
    contexts: Sequence[NativeContext], samplings: Sequence[Sampling], grammars: Sequence[Any] = ()
) -> list[Completion]:
    async def main() -> list[Completion]:
        by_context = grammars or [None] * len(contexts)
        requests = zip(contexts, samplings, by_context, strict=True)
        return await asyncio.gather(*(c.sample(s, grammar) for c, s, grammar in requests))

    return asyncio.run(main())


@torch.no_grad()
def dense_logits(decoder: Decoder, tokens: list[int]) -> Tensor:
    """[T, V] of one plain causal forward."""
    hidden = decoder(torch.tensor(tokens), torch.arange(len(tokens)), causal)
    logits = hidden @ decoder.head_weight.T
    return logits if decoder.head_bias is None else logits + decoder.head_bias


def dense_logp(
    decoder: Decoder,
    tokens: list[int],
    modes: list[int] | int = 0,
    allowed: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """[T, V] of what may follow each token; `modes` of those that follow, allowed [modes, actions]."""
    logits = dense_logits(decoder, tokens) / temperature
    if allowed is None:
        return logits[:, : decoder.shape.vocab_size].log_softmax(-1)
    logits = logits[:, : allowed.shape[1]]  # behind the actions there is padding
    return logits.masked_fill(~allowed[modes], -torch.inf).log_softmax(-1)


def gap(
    decoder: Decoder, before: list[int], completion: Completion, temperature: float = 1.0
) -> float:
    """Mean distance of its log-probs from those of a plain forward."""
    logp = dense_logp(decoder, before + completion.tokens, temperature=temperature)[
        len(before) - 1 : -1
    ]
    want = logp.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
    return float((torch.tensor(completion.logprobs) - want).abs().mean())


def assert_equals_the_model(
    decoder: Decoder,
    before: list[int],
    completion: Completion,
    temperature: float = 1.0,
    allowed: Tensor | None = None,
) -> None:
    """Log-probs and entropies of the completion equal those of a full forward.

    Inside a description nothing is chosen, and both are 0.
    """
    modes = [0] * len(before) + completion.modes
    logp = dense_logp(decoder, before + completion.tokens, [*modes[1:], 0], allowed, temperature)
    logp = logp[len(before) - 1 : -1]
    actions = torch.tensor(completion.actions)
    is_decision = actions != NO_ACTION
    want = logp.gather(-1, actions.clamp(min=0)[:, None])[:, 0].where(is_decision, 0.0)
    entropy = torch.special.entr(logp.exp()).sum(-1).where(is_decision, 0.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(completion.entropies), entropy, atol=1e-5, rtol=0)


# Actions beyond the vocabulary, two tools. What each decision writes, by mode:
#     0  any token; 23 -> 5 6 7, goes to 1; 24 -> 8, goes to 3
#     1  25 -> 9 10, goes to 2; 26 -> 11, goes to 2
#     2  25 -> 9 10; 26 -> 11 12 13; 27 -> 14 15, exits
#     3  25 -> 9 16, exits; 26 -> 11, exits
EXTRA = 5
TOOLS = Automaton(
    transitions={
        (0, 23): 1,
        (0, 24): 3,
        (1, 25): 2,
        (1, 26): 2,
        (2, 27): 0,
        (3, 25): 0,
        (3, 26): 0,
    },
    writes={
        (0, 23): (5, 6, 7),
        (0, 24): (8,),
        (1, 25): (9, 10),
        (1, 26): (11,),
        (2, 25): (9, 10),
        (2, 26): (11, 12, 13),
        (2, 27): (14, 15),
        (3, 25): (9, 16),
        (3, 26): (11,),
    },
    exits=frozenset({(2, 27), (3, 25), (3, 26)}),
)


def tools_space(num_tokens: int = 6) -> ActionSpace:
    """The modes of TOOLS, with `num_tokens` tokens allowed in mode 0: the fewer, the more calls."""
    allowed = np.zeros((4, VOCAB + EXTRA), dtype=bool)
    allowed[0, :num_tokens] = allowed[0, 23:25] = True
    allowed[1, 25:27] = allowed[2, 25:28] = allowed[3, 25:27] = True
    space = ActionSpace(VOCAB, EXTRA, allowed)
    TOOLS.check(space)
    return space


def assert_is_written_by(grammar: Automaton, completion: Completion, mode: int) -> None:
    """Tokens and modes are those that the grammar writes for the decisions; only the end may be cut."""
    tokens: list[int] = []
    actions: list[int] = []
    modes: list[int] = []
    for action in completion.actions:
        if action == NO_ACTION:
            continue
        written = grammar.written(mode, action)
        tokens += written
        actions += [action] + [NO_ACTION] * (len(written) - 1)
        modes += [mode] * len(written)
        is_exit = grammar.is_exit(mode, action)
        mode = grammar.step(mode, action)
        assert not is_exit or len(completion.tokens) <= len(tokens)
    size = len(completion.tokens)
    found = (completion.tokens, completion.actions, completion.modes)
    assert found == (tokens[:size], actions[:size], modes[:size])
    if completion.finish is not Finish.LENGTH:
        assert size == len(tokens)


class ByteTokenizer:
    """One token per byte of UTF-8."""

    vocab_size: int = 256
    eos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    chat_template: str | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def save(self, folder: Any) -> None:
        raise NotImplementedError


class LetterTokenizer(ByteTokenizer):
    """Token 0 is "a", and so on."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + i) for i in ids)

"""A tiny policy whose turns are written for it: the engine runs as it is, only its draws are decided.

A random policy calls no tool. Here rules give the text of the next turn, and the sampler takes its tokens
instead of drawing; log-probs, entropies, pages and stops are the engine's own. The text is cut into tokens as
no tokenizer would cut it, so that a turn that was rendered and encoded again shows.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from graft.engine.native.context import NativeContext
from graft.engine.native.cpu.runner import CpuRunner
from graft.engine.native.drafts.verification import DrawPlace
from graft.engine.native.engine import NativeEngine
from graft.engine.native.request import SampleRequest
from graft.engine.native.sampling import sampler
from graft.gateway.gateway import Gateway
from graft.models.decoder import Decoder
from graft.models.shape import ModelShape
from graft.models.tree.forest import Forest
from graft.models.tree.packing import response
from graft.rollout.batching import to_batch, trajectories_of
from graft.text.chat import Chat
from graft.text.template import TEMPLATES
from graft.text.tokenizer import FastTokenizer
from graft.types import NO_ACTION, Completion, Episode, Finish, Sampling

MAX_CONTEXT = 32768
START, END = "<|im_start|>", "<|im_end|>"

Rule = tuple[str, str, str | list[str]]
"""A text in the whole prompt, a pattern in what is new in it, and the turn that the policy then writes; of a
list, one after the other."""


@lru_cache(maxsize=1)
def merging_tokenizer() -> FastTokenizer:
    """Byte-level BPE with 700 merges, learnt from the programs of the tests, and chatml's control tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    texts = [path.read_text() for path in sorted(Path(__file__).parent.rglob("clients/*.py"))]
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=958,
            special_tokens=["<pad>", START, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    special = {"eos_token": END, "pad_token": "<pad>"}
    return FastTokenizer(backend, special, {"default": TEMPLATES["chatml"]})


class Sampled(NamedTuple):
    """What the engine was sent for one sample, and what it sampled."""

    prompt: list[int]
    completion: Completion


class WrittenPolicy:
    """An engine and a tokenizer; `rules` say what is written, `samples` is what the engine did."""

    def __init__(
        self, patch: pytest.MonkeyPatch, rules: Sequence[Rule], kv_tokens: int = 1 << 19
    ) -> None:
        self.tokenizer = merging_tokenizer()
        self.rules = list(rules)
        self.samples: list[Sampled] = []
        self._counts: Counter[str] = Counter()
        self._turns: dict[int, tuple[SampleRequest, str]] = {}
        shape = ModelShape(
            vocab_size=self.tokenizer.vocab_size,
            width=16,
            layers=2,
            heads=2,
            kv_heads=1,
            head_dim=8,
            ff=16,
            max_positions=MAX_CONTEXT,
        )
        self.engine = NativeEngine(
            Decoder(shape).initialise(3),
            tokenizer=self.tokenizer,
            kv_tokens=kv_tokens,
            drafts="off",  # what it draws is written, whatever came before
        )
        self._patch(patch)

    def gateway(self, **settings: Any) -> Gateway:
        how = {"sampling": Sampling(max_tokens=16384), "max_context": MAX_CONTEXT, **settings}
        return Gateway(self.engine, Chat(self.tokenizer), **how)

    def write(self, prompt: str) -> str:
        """The turn for a prompt, of the first rule that fits; of a call that is begun, the rest."""
        told, _, begun = prompt.rpartition(f"{START}assistant\n")
        _, found, news = told.rpartition(f"{START}assistant\n")
        if not found:
            news = told[max(told.find(f"{START}user"), 0) :]
        for shown, pattern, turn in self.rules:
            if shown in prompt and re.search(pattern, news + begun):
                self._counts[prompt] += 1
                turns = [turn] if isinstance(turn, str) else turn
                chosen = turns[min(self._counts[prompt], len(turns)) - 1]
                return chosen[chosen.find(begun) + len(begun) :] if begun in chosen else chosen
        raise AssertionError(f"no rule for what the policy reads: {news[-2000:]!r}")

    def encoded(self, turn: str) -> list[int]:
        """The tokens of a turn, every two characters on their own, and its end."""
        pairs = [turn[at : at + 2] for at in range(0, len(turn), 2)]
        ids = [token for pair in pairs for token in self.tokenizer.encode(pair)]
        return [*ids, *self.tokenizer.encode(END)]

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        """The number that the runner draws for a row is the token; `invert` takes it as it is."""

        def wanted(request: SampleRequest) -> int:
            tokens, start = request.sequence.tokens, request.start
            known, turn = self._turns.get(id(request), (None, ""))
            if known is not request:  # the turn may begin with a text that its structure writes
                turn = self.write(self.tokenizer.decode(tokens[:start]))
                structure = request.sampling.structure
                turn = in_one_form(turn) if structure and structure.is_part else turn
                self._turns[id(request)] = request, turn
            written, whole = tokens[start:], self.encoded(turn)
            if written != whole[: len(written)]:  # a structure has cut it in its way
                written, told = [], self.tokenizer.decode(written)
                assert turn.startswith(told), (turn, told)
                whole = self.encoded(turn.removeprefix(told))
            return whole[len(written)]

        def uniforms(runner: CpuRunner, places: list[DrawPlace]) -> torch.Tensor:
            return torch.from_numpy(np.array([wanted(p.request) for p in places], np.float32))

        def invert(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
            return uniform.long()

        draw = NativeContext.sample

        async def sample(context: NativeContext, *how: Any) -> Completion:
            prompt = list(context.tokens)
            completion = await draw(context, *how)
            self.samples.append(Sampled(prompt, completion))
            return completion

        patch.setattr(CpuRunner, "_uniforms", uniforms)
        patch.setattr(sampler, "invert", invert)
        patch.setattr(NativeContext, "sample", sample)


def in_one_form(turn: str) -> str:
    """The turn whose first call, of a strict tool, is written as structures have it."""
    start = turn.index("{")
    value, end = json.JSONDecoder().raw_decode(turn, start)
    arguments = json.dumps(value.get("arguments", value), sort_keys=True)
    if "arguments" not in value:  # its beginning is in the prompt
        return f" {arguments}{turn[end:]}"
    return f'\n{{"name": "{value["name"]}", "arguments": {arguments}}}{turn[end:]}'


def check_episodes(policy: WrittenPolicy, episodes: Sequence[Episode]) -> None:
    """The rows of the episodes are what the engine was sent and what it sampled, each sampled token is
    trained once, and the learner's log-probs are the engine's; of dropped samples nothing is trained."""
    rows = trajectories_of(episodes)
    batch = to_batch(rows)
    sent = [[*one.prompt, *one.completion.tokens] for one in policy.samples]
    assert {tuple(row.tokens) for row in rows} <= set(map(tuple, sent))
    kept = [tuple(t.tokens) for episode in episodes for t in episode.trajectories()]
    assert all(any(row[: len(one)] == tuple(one) for row in kept) for one in sent)
    whole = [one for one in policy.samples if one.completion.finish is not Finish.ABORT]
    sampled = Counter(
        hash((*one.prompt, *one.completion.tokens[: at + 1]))
        for one in whole
        for at, action in enumerate(one.completion.actions)
        if action != NO_ACTION  # else its structure allowed nothing else
    )
    trained: Counter[int] = Counter()
    for number, row in enumerate(rows):
        start = len(row.tokens) - sum(map(len, response(row)))
        for at in batch.mask[number].nonzero()[:, 0].tolist():
            trained[hash(tuple(row.tokens[: start + at + 1]))] += 1
    assert trained == sampled
    with torch.no_grad():
        logp, entropy = Forest(rows, batch.mask, torch.device("cpu")).logprobs(
            policy.engine.decoder
        )
    mask = batch.mask
    torch.testing.assert_close(logp[mask], batch.logprobs[mask], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy[mask], batch.entropies[mask], atol=1e-5, rtol=0)

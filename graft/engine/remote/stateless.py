"""Contexts of backends that keep no state between samples: the tokens are here, every request has all.

    context [5 6]  sample -> [7 8]  the backend reads 5 6, returns 7 8; the context is [5 6 7 8]
            append [9]              nothing is sent
            sample -> [4]           the backend reads 5 6 7 8 9; its prefix cache holds all but 9

Token ids go in and come out; nothing is encoded again. A backend may return more than was requested (it
does not see a stop string that began in the prompt): `PendingSample` ends a sample with the same token
as the native engine.

vLLM in this process (`vllm`) and servers (`servers_engine`) use these contexts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from graft.engine.checks import (
    check_fork,
    check_free,
    check_positions,
    check_prompt,
    check_structure,
    check_tokens,
)
from graft.engine.errors import EngineError
from graft.engine.stop_strings import StopStrings, TokenPieces
from graft.protocols import Grammar, Tokenizer
from graft.structure import Structure
from graft.types import Completion, Finish, Sampling


class PendingSample:
    """One sample in progress: its parameters, and the tokens so far."""

    def __init__(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        eos_ids: frozenset[int],
        pieces: TokenPieces,
        budget: int,
        version: int,
    ) -> None:
        self.sampling, self.budget, self.version = sampling, budget, version
        self.stop_tokens = eos_ids.union(sampling.stop_tokens)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.entropies: list[float] = []
        self._stops = StopStrings(sampling.stop, pieces) if sampling.stop else None
        self._searched = list(tokens[max(len(tokens) - sampling.num_begun, 0) :])

    def add(self, token: int, logprob: float, entropy: float) -> Finish | None:
        """Add a token; the reason if the sample ends with it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.entropies.append(entropy)
        if token in self.stop_tokens:
            return Finish.STOP
        if self._stops is not None:
            self._searched.append(token)
            may_stop = len(self.tokens) >= self.sampling.min_tokens
            if may_stop and self._stops.completed_by(self._searched, 0):
                return Finish.STOP
        return Finish.LENGTH if len(self.tokens) >= self.budget else None

    def completion(self, finish: Finish) -> Completion:
        return Completion(
            tokens=self.tokens,
            actions=list(self.tokens),
            logprobs=self.logprobs,
            entropies=self.entropies,
            modes=[0] * len(self.tokens),
            finish=finish,
            version=self.version,
        )


class StatelessBackend(Protocol):
    """What a `StatelessContext` needs of its engine; `where` names it in messages."""

    vocab_size: int
    where: str

    async def complete(self, context: Any, sampling: Sampling) -> Completion: ...


class StatelessContext:
    """Tokens, and the key of their draws: the same key draws the same tokens again."""

    def __init__(self, engine: StatelessBackend, tokens: Sequence[int], key: int) -> None:
        self.engine, self.key = engine, key
        self.tokens = check_prompt(tokens, engine.vocab_size)
        self.mode: int | None = None
        self.stop: Callable[[Finish], None] | None = None
        """Ends the running sample; set by engines that can."""
        self._forks = 0
        self._is_open, self._is_sampling = True, False

    def append(self, tokens: Sequence[int]) -> None:
        self._check_free("append to")
        self.tokens += check_tokens(tokens, self.engine.vocab_size)

    def fork(self, key: int | None = None, at: int | None = None) -> StatelessContext:
        """A context with the same tokens, or the first `at`, and draws of its own."""
        self._check_free("fork")
        if at is not None:
            check_fork(at, len(self.tokens))
        self._forks += 1
        return self._copy(self.tokens[:at], seed_of(self.key, self._forks) if key is None else key)

    async def sample(self, sampling: Sampling, grammar: Grammar | None = None) -> Completion:
        """Draw with the backend and add the tokens to the context; if it fails, nothing is added."""
        self._check_free("sample from")
        if grammar is not None:
            raise EngineError(
                f"{self.engine.where} cannot apply a grammar, so it has no actions; leave "
                "out actions.file, or use engine.name=native"
            )
        if sampling.structure is not None:
            check_structure(self.engine, sampling.structure)
        self._is_sampling = True
        try:
            completion = await self.engine.complete(self, sampling)
        finally:
            self._is_sampling, self.stop = False, None
        self.tokens += completion.tokens
        return completion

    def close(self) -> None:
        """A running sample ends as it is, finish "abort"."""
        if self._is_open:
            self._is_open = False
            if self.stop is not None:
                self.stop(Finish.ABORT)

    def _copy(self, tokens: list[int], key: int) -> StatelessContext:
        return StatelessContext(self.engine, tokens, key)

    def _check_free(self, action: str) -> None:
        check_free(action, is_open=self._is_open, is_sampling=self._is_sampling)


class StatelessEngine:
    """What vLLM in this process and pools of servers share: both start from a Hugging Face folder.

    A subclass samples (`complete`), scores, loads weights and pauses.
    """

    def __init__(
        self,
        name: str,
        model_folder: str | os.PathLike[str],
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        seed: int,
        deadline: float,
    ) -> None:
        self.where, self.folder = f"engine '{name}'", Path(model_folder)
        self.config = model_config(self.folder, self.where)
        self.vocab_size: int = self.config["vocab_size"]
        self.eos_ids, self.seed, self.deadline = frozenset(eos_ids), seed, deadline
        self.pieces = TokenPieces(tokenizer)
        self.num_opened = 0
        self.is_open = True

    def open(self, tokens: Sequence[int], key: int | None = None) -> StatelessContext:
        self.check_open()
        self.num_opened += 1
        return self._context(tokens, seed_of(0, self.num_opened) if key is None else key)

    def check_open(self) -> None:
        if not self.is_open:
            raise EngineError("the engine is closed")

    def check_structure(self, structure: Structure) -> None:
        """Refuse: the masks of a structured answer are not returned, and a learner needs them."""
        raise EngineError(
            f"{self.where} does not return the masks of a structured answer, and the learner would train "
            "another distribution; use engine.name=native, or ask for the format in the prompt"
        )

    def begin(
        self, context: StatelessContext, sampling: Sampling, version: int, window: float
    ) -> PendingSample:
        """A sample of the context, in a backend whose contexts have up to `window` tokens."""
        left = min(window, self.config.get("max_position_embeddings") or math.inf)
        return PendingSample(
            context.tokens,
            sampling,
            eos_ids=self.eos_ids,
            pieces=self.pieces,
            budget=int(min(sampling.max_tokens, left - len(context.tokens))),
            version=version,
        )

    def score(
        self,
        texts: Sequence[Sequence[int]],
        at: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        mode: int = 0,
        temperature: float = 1.0,
    ) -> list[list[list[list[float]]]]:
        """Score each text: log-probs [i][j][k] of action k of continuations[j] after text[: at[i]].

        At temperature 1 they are asked for as log-probs of a prompt; else with one request per token.
        """
        if mode:
            raise ValueError(f"cannot score in mode {mode}: this engine has only mode 0")
        check_positions(texts, at)
        wanted = [check_tokens(actions, self.vocab_size) for actions in continuations]
        if not all(wanted):
            raise ValueError("cannot score an empty continuation")
        cases = [
            (list(text[:position]), actions)
            for text, positions in zip(texts, at, strict=True)
            for position in positions
            for actions in wanted
        ]
        found = iter(self._scores(cases, temperature))
        return [[[next(found) for _ in wanted] for _ in positions] for positions in at]

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Take over new weights by Hugging Face name. Running samples end with "pause"."""
        if weights is None:
            raise EngineError(
                f"{self.where} has weights of its own and does not see those that were changed in "
                "place; give them to load(), or use engine.name=native"
            )
        self._load(weights, version)

    async def complete(self, context: Any, sampling: Sampling) -> Completion:
        raise NotImplementedError

    def _context(self, tokens: Sequence[int], key: int) -> StatelessContext:
        return StatelessContext(self, tokens, key)

    def _scores(
        self, cases: list[tuple[list[int], list[int]]], temperature: float
    ) -> list[list[float]]:
        """Log-probs of the second tokens of each case after the first."""
        raise NotImplementedError

    def _load(self, weights: Mapping[str, Any], version: int) -> None:
        raise NotImplementedError


def model_config(folder: Path, where: str) -> dict[str, Any]:
    """The model's config.json; EngineError where there is none."""
    try:
        content: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(
            f"{where} starts from a Hugging Face folder, but '{folder}' has no readable "
            f"config.json ({error})"
        ) from None
    return {**content, **content.get("text_config", {})}  # of a model that also reads images


def seed_of(*numbers: int) -> int:
    """A seed of 31 bits, the range that servers accept, as a hash of the numbers."""
    text = "/".join(map(str, numbers))
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big") >> 1

"""Contexts of backends that keep nothing between samples: the tokens are here, and go out whole.

    context [5 6]  sample -> [7 8]  the backend reads 5 6, says 7 8; the context is [5 6 7 8]
            append [9]              nobody is told
            sample -> [4]           the backend reads 5 6 7 8 9; its prefix cache knows all but 9

Token ids go in and come out; nothing is encoded again. A backend may say more than was asked (a stop
string that began in the prompt is no business of its own): `PendingSample` ends a sample with the very token
that the native engine ends it with.

vLLM in this process and the servers (`servers`) have these contexts in common.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from graft.actions.space import ActionSpace
from graft.engine.errors import EngineError
from graft.engine.stop_strings import StopStrings, TokenPieces
from graft.protocols import Grammar
from graft.types import Completion, Finish, Sampling


class PendingSample:
    """One sample on its way: what was asked, and what has been said so far."""

    def __init__(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        eos_ids: frozenset[int],
        pieces: TokenPieces,
        room: int,
        version: int,
    ) -> None:
        self.sampling, self.room, self.version = sampling, room, version
        self.stop_tokens = eos_ids.union(sampling.stop_tokens)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.entropies: list[float] = []
        self._stops = StopStrings(sampling.stop, pieces) if sampling.stop else None
        self._heard = list(tokens[max(len(tokens) - sampling.begun, 0) :])

    def add(self, token: int, logprob: float, entropy: float) -> Finish | None:
        """Add a token; how the sample ends, if it ends with it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.entropies.append(entropy)
        if token in self.stop_tokens:
            return Finish.STOP
        if self._stops is not None:
            self._heard.append(token)
            is_due = len(self.tokens) >= self.sampling.min_tokens
            if is_due and self._stops.completed_by(self._heard, 0):
                return Finish.STOP
        return Finish.LENGTH if len(self.tokens) >= self.room else None

    def end(self, finish: Finish) -> Completion:
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
    """The side of an engine that its contexts see."""

    vocab_size: int

    @property
    def where(self) -> str:
        """What stands in messages, such as "endpoint http://host:8000"."""
        ...

    async def say(self, context: Any, sampling: Sampling) -> Completion: ...


class StatelessContext:
    """A context of such a backend. `key` names its draws: the same key draws the same again."""

    def __init__(self, engine: StatelessBackend, tokens: Sequence[int], key: int) -> None:
        self.engine, self.key = engine, key
        self.tokens = check_tokens(tokens, engine.vocab_size)
        if not self.tokens:
            raise ValueError("cannot open a context without tokens: there is nothing to continue")
        self.mode: int | None = None
        self.stop: Callable[[Finish], None] | None = None
        """Ends the sample that is running; set by an engine that can."""
        self._forks = 0
        self._is_open, self._is_sampling = True, False

    def append(self, tokens: Sequence[int]) -> None:
        self._check_free("append to")
        self.tokens += check_tokens(tokens, self.engine.vocab_size)

    def fork(self, key: int | None = None, at: int | None = None) -> StatelessContext:
        """A context with the same tokens, or the first `at`, and draws of its own."""
        self._check_free("fork")
        length = len(self.tokens)
        if at is not None and not 1 <= at <= length:
            raise ValueError(f"cannot fork at token {at} of a context of {length}: need 1 or more")
        self._forks += 1
        return self._twin(self.tokens[:at], seed_of(self.key, self._forks) if key is None else key)

    async def sample(self, sampling: Sampling, grammar: Grammar | None = None) -> Completion:
        """What the backend says next, which is part of the context then; if it fails, nothing is."""
        self._check_free("sample from")
        if grammar is not None:
            raise EngineError(
                f"{self.engine.where} cannot apply a grammar, so it has no actions; leave "
                "actions.file out, or use the model itself (engine.name=native)"
            )
        self._is_sampling = True
        try:
            completion = await self.engine.say(self, sampling)
        finally:
            self._is_sampling, self.stop = False, None
        self.tokens += completion.tokens
        return completion

    def close(self) -> None:
        """A sample that is running ends with what it has, finish "abort"."""
        if self._is_open:
            self._is_open = False
            if self.stop is not None:
                self.stop(Finish.ABORT)

    def _twin(self, tokens: list[int], key: int) -> StatelessContext:
        return StatelessContext(self.engine, tokens, key)

    def _check_free(self, action: str) -> None:
        if not self._is_open:
            raise EngineError(f"cannot {action} a closed context")
        if self._is_sampling:
            raise EngineError(
                f"cannot {action} a context while it samples; await its sample first, or fork it "
                "before sampling"
            )


def check_tokens(tokens: Sequence[int], vocab_size: int) -> list[int]:
    ids = [int(token) for token in tokens]
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise ValueError(f"token {bad} is outside the model's vocabulary of {vocab_size}")
    return ids


def check_space(space: ActionSpace | None, name: str) -> None:
    """EngineError for a space that a backend cannot sample from: it knows tokens alone."""
    if space is None:
        return
    if space.extra or space.num_modes > 1:
        raise EngineError(
            f"engine '{name}' cannot apply a Grammar (ActionSpace has {space.extra} extra actions and "
            f"{space.num_modes} modes); use engine.name=native or drop the actions"
        )
    if space.allowed is not None and not space.allowed.all():
        raise EngineError(
            f"engine '{name}' samples from the whole vocabulary, and the ActionSpace forbids some of "
            "it; use engine.name=native or drop the actions"
        )


def check_score(
    texts: Sequence[Sequence[int]],
    at: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    mode: int,
    vocab_size: int,
) -> list[list[int]]:
    """The continuations as lists; ValueError for what such a backend cannot be asked."""
    if mode:
        raise ValueError(f"cannot score in mode {mode}: this engine has mode 0 alone")
    for text, places in zip(texts, at, strict=True):
        outside = [place for place in places if not 1 <= place <= len(text)]
        if outside:
            raise ValueError(f"cannot score after {outside[0]} tokens of {len(text)}")
    asked = [check_tokens(actions, vocab_size) for actions in continuations]
    if not all(asked):
        raise ValueError("cannot score an empty continuation")
    return asked


def model_config(folder: Path, name: str) -> dict[str, Any]:
    """What the model's config.json says; EngineError where there is none."""
    try:
        content: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(
            f"engine '{name}' starts from a Hugging Face folder, and '{folder}' has no config.json "
            f"that can be read ({error})"
        ) from None
    return {**content, **content.get("text_config", {})}  # where there are pictures too


def window_of(config: dict[str, Any]) -> int | float:
    return config.get("max_position_embeddings") or math.inf


def seed_of(*numbers: int) -> int:
    """31 bits, which is what servers take, of a key and what it is used for."""
    text = "/".join(map(str, numbers))
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big") >> 1

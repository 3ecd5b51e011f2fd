"""Checks of what callers pass to an engine, before it reaches a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graft.engine.errors import EngineError
from graft.structure import Structure


def check_tokens(tokens: Sequence[int], vocab_size: int) -> list[int]:
    """The tokens as a list of ints; an id outside the vocabulary would break the whole batch later."""
    ids = list(map(int, tokens))
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise ValueError(
            f"token {bad} is outside the model's vocabulary of {vocab_size}; is the tokenizer that of "
            "another model?"
        )
    return ids


def check_prompt(tokens: Sequence[int], vocab_size: int) -> list[int]:
    """The tokens of a new context."""
    ids = check_tokens(tokens, vocab_size)
    if not ids:
        raise ValueError("cannot open a context without tokens: there is nothing to continue")
    return ids


def check_structure(engine: object, structure: Structure) -> None:
    """EngineError if the engine cannot hold answers to this structure, or to any."""
    check: Callable[[Structure], None] | None = getattr(engine, "check_structure", None)
    if check is None:
        raise EngineError(
            f"{type(engine).__name__} cannot hold answers to a structure; use engine.name=native"
        )
    check(structure)


def check_free(action: str, *, is_open: bool, is_sampling: bool) -> None:
    """EngineError for an action on a context that is closed or in the middle of a sample."""
    if not is_open:
        raise EngineError(f"cannot {action} a closed context")
    if is_sampling:
        raise EngineError(
            f"cannot {action} a context while it samples; await its sample first, or fork it "
            "before sampling"
        )


def check_fork(at: int, length: int) -> None:
    if not 1 <= at <= length:
        raise ValueError(f"cannot fork at token {at} of a context of {length}: need 1 or more")


def check_positions(texts: Sequence[Sequence[int]], at: Sequence[Sequence[int]]) -> None:
    """Positions to score after: 1 to the length of the text."""
    for text, positions in zip(texts, at, strict=True):
        outside = [position for position in positions if not 1 <= position <= len(text)]
        if outside:
            raise ValueError(f"cannot score after {outside[0]} tokens of {len(text)}")

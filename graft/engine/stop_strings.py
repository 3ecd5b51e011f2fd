"""Stop strings on tokens: the completion ends with the token that completes one, which stays whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from graft.protocols import Tokenizer

_INCOMPLETE = "\ufffd"  # what a tokenizer decodes bytes to that are not a whole character (yet)


class TokenPieces:
    """The text of single tokens, decoded once each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # decoded twice in a row: some tokenizers drop the space before a text's first token
        self.characters = cache(lambda token: tokenizer.decode([token, token]))
        """All characters that a token can write."""


class StopStrings:
    """Finds the first of several strings in completions.

    stop ("</a>",) on the tokens "1", "</", "a", ">": only ">" can complete it, so the tail is decoded
    only then; "1</a>" holds the string, and the completion ends with all four tokens.
    """

    def __init__(self, stops: tuple[str, ...], pieces: TokenPieces) -> None:
        if not all(stops):
            raise ValueError(
                f"stop={stops!r} holds an empty string, which would end every completion"
            )
        self.stops, self.pieces = stops, pieces
        last = {stop[-1] for stop in stops}
        if not all(map(str.isascii, last)):  # a token may have some of its bytes
            last.add(_INCOMPLETE)
        self.can_complete = cache(
            lambda token: any(end in pieces.characters(token) for end in last)
        )
        """Whether a token may be the one that completes a stop string."""
        # a token writes at least one byte; 4 more, so that the first character of the tail is complete
        self.reach = max(len(stop.encode()) for stop in stops) + 4

    def completed_by(self, tokens: Sequence[int], start: int) -> bool:
        """Whether the last of `tokens` completes a stop string that lies wholly after `start`."""
        if not self.can_complete(tokens[-1]):
            return False
        tail = list(tokens[max(start, len(tokens) - self.reach) :])
        text = self.pieces.tokenizer.decode(tail)
        if not any(stop in text for stop in self.stops):
            return False
        # this token must have completed it, not an earlier one before `min_tokens`
        before = len(self.pieces.tokenizer.decode(tail[:-1]).rstrip(_INCOMPLETE))
        return any(text.rfind(stop) + len(stop) > before for stop in self.stops if stop in text)

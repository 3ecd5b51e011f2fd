"""Stop strings: found where they are completed, wherever the tokens are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engine_kit import ByteTokenizer, sample_one, tiny_decoder, tiny_engine
from hypothesis import given
from hypothesis import strategies as st

from graft.actions.grammar import Automaton
from graft.actions.space import ActionSpace
from graft.engine.stop_strings import StopStrings, TokenPieces
from graft.types import Finish, Sampling


class PieceTokenizer(ByteTokenizer):
    """Tokens of several characters; like SentencePiece it drops the first space of a text."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces
        self.decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += 1
        return "".join(self.pieces[i] for i in ids).removeprefix(" ")


def ends_at(stops: tuple[str, ...], tokenizer: Any, tokens: list[int], start: int = 0) -> int:
    """How many tokens are kept until a stop string ends the completion; all if none does."""
    watch = StopStrings(stops, TokenPieces(tokenizer))
    for length in range(start + 1, len(tokens) + 1):
        if watch.completed_by(tokens[:length], start):
            return length
    return len(tokens)


@pytest.mark.parametrize(
    "pieces, stops, want",
    [
        (["1", "</", "a", ">", "x"], ("</a>",), 4),
        (["1", "</a>x", "y"], ("</a>",), 2),  # completed in the middle of a token: kept whole
        (["a", "b", "c"], ("zzz", "bc"), 3),
        (["a", "b", "c"], ("abcd",), 3),
        (["so", " it", " is"], (" ",), 2),  # the space is only there behind another token
        (["x\n", "\n", "y"], ("\n\n",), 2),
        (["aa", "a", "b"], ("aaa",), 2),
    ],
)
def test_a_stop_string_ends_with_the_token_that_completes_it(
    pieces: list[str], stops: tuple[str, ...], want: int
) -> None:
    tokens = list(range(len(pieces)))
    assert ends_at(stops, PieceTokenizer(pieces), tokens) == want


def test_only_what_was_drawn_counts() -> None:
    tokenizer = PieceTokenizer(["</", "a>", "b", "</a>"])
    assert ends_at(("</a>",), tokenizer, [0, 1, 2, 2, 3], start=1) == 5


def test_characters_may_span_tokens() -> None:
    tokenizer = ByteTokenizer()
    text = "ja – né → 終わり。more"
    tokens = tokenizer.encode(text)
    for stop in ("–", "né", "→ 終", "り。", "。"):
        want = len(text[: text.index(stop) + len(stop)].encode())
        assert ends_at((stop,), tokenizer, tokens) == want


@given(st.text("ab→終", min_size=1, max_size=30), st.text("ab→終", min_size=1, max_size=4))
def test_bytes_end_exactly_where_the_text_does(text: str, stop: str) -> None:
    tokens = ByteTokenizer().encode(text)
    found = text.find(stop)
    want = len(text[: found + len(stop)].encode()) if found >= 0 else len(tokens)
    assert ends_at((stop,), ByteTokenizer(), tokens) == want


def test_the_tail_is_decoded_only_when_a_token_could_complete_a_string() -> None:
    tokenizer = PieceTokenizer(["a", "b", "c", ">"])
    ends_at(("</x>",), tokenizer, [0, 1, 2] * 20)
    assert tokenizer.decoded == 3  # each token once, for its characters


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty string"):
        StopStrings(("a", ""), TokenPieces(ByteTokenizer()))


def scripted(text: str, **options: Any):
    """An engine that can only write `text`, byte by byte, and the grammar that makes it so."""
    data = text.encode()
    allowed = np.zeros((len(data) + 1, 256), dtype=bool)
    allowed[np.arange(len(data)), list(data)] = True
    allowed[-1] = True
    space = ActionSpace(256, allowed=allowed)
    grammar = Automaton(default={mode: mode + 1 for mode in range(len(data))})
    decoder = tiny_decoder(vocab_size=256)
    engine = tiny_engine(decoder, tokenizer=ByteTokenizer(), space=space, **options)
    return engine.open([65]), grammar


def test_the_engine_stops_at_a_string_and_keeps_its_tokens() -> None:
    context, grammar = scripted("2+3</calc>5")
    sampling = Sampling(max_tokens=50, stop=("</calc>", "!"))
    completion = sample_one(context, sampling, grammar)
    assert bytes(completion.tokens) == b"2+3</calc>"
    assert completion.finish is Finish.STOP
    assert bytes(context.tokens) == b"A2+3</calc>"


def test_a_string_before_min_tokens_does_not_stop_then_or_later() -> None:
    context, grammar = scripted("a;bcd;e")
    sampling = Sampling(max_tokens=50, min_tokens=4, stop=(";",))
    completion = sample_one(context, sampling, grammar)
    assert bytes(completion.tokens) == b"a;bcd;"
    context, grammar = scripted("a;xbx;x!")
    sampling = Sampling(max_tokens=50, min_tokens=4, stop=(";x",))
    completion = sample_one(context, sampling, grammar)
    assert bytes(completion.tokens) == b"a;xbx;x"  # the lone x looks back at ";x", in vain


def test_stop_wins_over_length_on_the_last_token() -> None:
    context, grammar = scripted("ab;")
    completion = sample_one(context, Sampling(max_tokens=3, stop=(";",)), grammar)
    assert completion.finish is Finish.STOP
    context, grammar = scripted("ab;")
    completion = sample_one(context, Sampling(max_tokens=2, stop=(";",)), grammar)
    assert completion.finish is Finish.LENGTH


def test_pieces_of_characters_are_only_decoded_for_a_stop_that_may_end_in_one() -> None:
    # token 0 is a byte of some character; what decodes: its piece alone, then the tail each time
    for stops, decoded in ((("</a>",), 1), (("é",), 4)):
        tokenizer: Any = PieceTokenizer(["\ufffd"])
        watch = StopStrings(stops, TokenPieces(tokenizer))
        assert not any(watch.completed_by([0] * length, 0) for length in (1, 2, 3))
        assert tokenizer.decoded == decoded

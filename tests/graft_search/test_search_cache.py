"""The cache: stored answers stay, with concurrent writers and after kills."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from graft.cli import app
from graft.data.errors import DataError
from graft.tools.answer_cache import CacheBroken
from graft_search import Hit, SearchCache, export_json, import_json
from graft_search.exchange import CacheImport

LIMA = [Hit("7", "Lima", "The capital.", 5.25), Hit("8", "Peru", "", None)]


@pytest.fixture
def cache(tmp_path):
    made = SearchCache(tmp_path / "run" / "cache.db")
    yield made
    made.close()


def test_an_answer_belongs_to_its_source_query_and_topk(cache):
    cache.put("bm25:a", "capital of Peru", 3, LIMA)
    assert cache.get("bm25:a", " capital of Peru\n", 3) == LIMA  # blanks around it do not count
    assert cache.get("bm25:a", "Capital of Peru", 3) is None
    assert cache.get("bm25:a", "capital of Peru", 5) is None
    assert cache.get("bm25:b", "capital of Peru", 3) is None


def test_nothing_found_is_an_answer_too(cache):
    assert cache.put("s", "q", 3, []) == []
    assert cache.get("s", "q", 3) == []


def test_the_first_answer_counts(cache):
    assert cache.put("s", "q", 1, LIMA[:1]) == LIMA[:1]
    assert cache.put("s", "q", 1, LIMA[1:]) == LIMA[:1]
    assert len(cache) == 1


@settings(max_examples=50)
@given(
    st.text(alphabet=st.characters(), max_size=50), st.text(alphabet=st.characters(), max_size=50)
)
def test_any_text_is_stored_and_found_again(tmp_path_factory, query, text):
    cache = SearchCache(tmp_path_factory.getbasetemp() / "any.db")
    hits = [Hit("1", "t", text, 0.1 + 0.2)]
    assert cache.put("s" + repr(text), query, 1, hits) == hits
    assert cache.get("s" + repr(text), query, 1) == hits
    cache.close()


@pytest.mark.parametrize(
    "query", ["x" * 1_000_000, "a\x00b", "'; DROP TABLE answers; --", "\ud800"]
)
def test_hostile_queries_are_keys_like_any_other(cache, query):
    cache.put("s", query, 1, LIMA)
    assert cache.get("s", query, 1) == LIMA
    assert cache.get("s", "a", 1) is None  # not cut at the NUL


def test_threads_share_one_cache(cache):
    def work(name: int) -> None:
        for n in range(20):
            cache.put(f"s{name}", f"q{n}", 1, [Hit(str(n), "", "")])
            assert cache.get(f"s{name}", f"q{n}", 1) == [Hit(str(n), "", "")]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(cache) == 160


WRITER = """
import sys
from graft_search import Hit, SearchCache
path, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
cache = SearchCache(path)
for n in range(count):
    cache.put("w" + name, f"query {n}", 3, [Hit(str(n), name, "x" * 500, n / 7)])
    print(n, flush=True)
"""


def test_three_processes_write_at_once_and_what_the_killed_one_stored_is_there(tmp_path):
    path = str(tmp_path / "cache.db")
    endless = 1_000_000
    counts = [40, 40, endless]
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, path, str(name), str(count)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, count in enumerate(counts)
    ]
    killed = runs.pop()
    assert killed.stdout is not None
    for line in killed.stdout:
        if int(line) == 30:
            killed.send_signal(signal.SIGKILL)
            break
    printed = [30, *(int(line) for line in killed.stdout if line.endswith("\n"))]
    assert killed.wait(30) == -signal.SIGKILL
    killed.stdout.close()
    for run in runs:
        run.communicate(timeout=60)
        assert run.returncode == 0

    cache = SearchCache(path)
    for name in range(2):
        for n in range(40):
            assert cache.get(f"w{name}", f"query {n}", 3) == [
                Hit(str(n), str(name), "x" * 500, n / 7)
            ]
    for n in range(printed[-1] + 1):
        assert cache.get("w2", f"query {n}", 3) == [Hit(str(n), "2", "x" * 500, n / 7)]
    cache.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_opens_its_own_connection(cache):
    cache.put("s", "before", 1, LIMA)
    child = os.fork()
    if child == 0:
        try:
            cache.put("s", "child", 1, cache.get("s", "before", 1) or [])
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert cache.get("s", "child", 1) == LIMA
    cache.put("s", "after", 1, LIMA)


def test_a_read_only_cache_is_neither_made_nor_changed(tmp_path):
    with pytest.raises(ValueError, match="no search cache"):
        SearchCache(tmp_path / "none.db", read_only=True)
    assert not (tmp_path / "none.db").exists()
    path = tmp_path / "cache.db"
    writer = SearchCache(path)
    writer.put("s", "q", 1, LIMA)
    reader = SearchCache(path, read_only=True)  # while the writer is still at work
    assert reader.get("s", "q", 1) == LIMA
    writer.put("s", "r", 1, LIMA)
    assert reader.get("s", "r", 1) == LIMA
    with pytest.raises(CacheBroken, match="readonly"):
        reader.put("s", "t", 1, LIMA)
    reader.close()
    writer.close()


def test_a_file_that_is_no_cache_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text("not a database " * 100)
    with pytest.raises(
        ValueError, match=r"cannot use the search cache .*notes.txt: .*not a database"
    ):
        SearchCache(tmp_path / "notes.txt")
    (tmp_path / "search_cache.json").write_text('{"query": "answer"}' * 100)
    with pytest.raises(
        ValueError, match=r"graft data cache import .*search_cache\.json. converts it"
    ):
        SearchCache(tmp_path / "search_cache.json")


def test_arpos_cache_goes_in_and_out_unchanged(cache, tmp_path):
    arpo = {"capital of Peru": "Page 1: Lima.\nPage 2: Peru.", "空": "Page 1: –", "none": ""}
    path = tmp_path / "search_cache.json"
    path.write_text(json.dumps(arpo, ensure_ascii=False), encoding="utf-8")
    assert import_json(cache, path) == CacheImport(stored=3, repeated=0, replaced=0, bad=0)
    assert import_json(cache, path).replaced == 3
    assert len(cache) == 3
    assert export_json(cache, tmp_path / "out.json") == 3
    assert json.loads((tmp_path / "out.json").read_text("utf-8")) == arpo
    assert cache.sources() == []


def test_an_imported_answer_serves_every_source_and_topk(cache, tmp_path):
    path = tmp_path / "search_cache.json"
    path.write_text(json.dumps({"who is Ada": "Page 1: a mathematician"}))
    import_json(cache, path)
    assert cache.get("http:x", "who is Ada", 7) == "Page 1: a mathematician"
    assert cache.get("http:x", '"who is Ada"', 7) == "Page 1: a mathematician"
    cache.put("http:x", "who is Ada", 7, LIMA)  # but a source's own answer comes first
    assert cache.get("http:x", "who is Ada", 7) == LIMA


def test_lists_of_texts_and_of_objects_are_taken_over(cache, tmp_path):
    lists = {
        "a": ["one", "two"],
        "b": [{"title": "T", "snippet": "s"}, {"document": {"contents": "U\nv"}, "score": 1}],
        "c": [],
    }
    path = tmp_path / "search_cache.json"
    path.write_text(json.dumps(lists))
    assert import_json(cache, path).stored == 3
    assert cache.get("s", "a", 3) == "Page 1: one\nPage 2: two"
    assert cache.get("s", "b", 3) == "Page 1: T: s\nPage 2: U\nv"
    assert cache.get("s", "c", 3) == ""


def test_recorded_hits_are_exported_as_pages(cache, tmp_path):
    cache.put("s", "q", 2, LIMA)
    export_json(cache, tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == {
        "q": "Page 1: Lima: The capital.\nPage 2: Peru"
    }


def test_repeated_and_bad_entries_of_an_import_are_counted(cache, tmp_path):
    path = tmp_path / "search_cache.json"
    path.write_text(
        '{"q": "old", " q ": "new", "n": 7, "x": [{"x": 1}], "o": {"text": "t"}, "": "t", "z": "last"}'
    )
    done = import_json(cache, path)
    assert (done.stored, done.repeated, done.replaced, done.bad) == (2, 1, 0, 4)
    assert done.first_bad.endswith("'n': a result is a text or a list, not int")
    assert cache.get("s", "q", 3) == "new"
    assert (cache.get("s", "o", 3), len(cache)) == (None, 2)


def test_the_command_imports_and_exports_a_cache(tmp_path):
    path = tmp_path / "search_cache.json"
    path.write_text('{"q": "Page 1: a", "n": 7}')

    def graft(*arguments):
        return CliRunner().invoke(app, ["data", "cache", *map(str, arguments)])

    done = json.loads(graft("import", path, "--json").stdout)
    assert done | {"first_bad": ""} == {
        "cache": str(tmp_path / "search_cache.db"),
        "stored": 1,
        "repeated": 0,
        "replaced": 0,
        "bad": 1,
        "first_bad": "",
    }
    assert graft("export", done["cache"], "--to", tmp_path / "o.json").exit_code == 0
    assert json.loads((tmp_path / "o.json").read_text()) == {"q": "Page 1: a"}
    path.write_text('{"n": 7}')
    refused = graft("import", path, "--to", tmp_path / "b.db")
    assert (refused.exit_code, "1 bad" in refused.stdout) == (1, True)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[1]", "holds list"),
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
)
def test_a_json_file_of_another_shape_changes_nothing(cache, tmp_path: Path, text, match):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DataError, match=match):
        import_json(cache, tmp_path / "x.json")
    assert len(cache) == 0

"""The search tool as a policy and a recipe meet it."""

from __future__ import annotations

import copy
import pickle
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_helpers import Echo, serving, write_corpus

from graft.envs.tool_env import ToolEnv
from graft.protocols import Tool
from graft.registry import UnknownName, resolve
from graft.tools import TOOLS, is_error
from graft.tools.errors import ToolError
from graft_search import Hit, SearchCache, SearchTool
from graft_search.server import build_app


def test_documents_come_one_a_line_between_tags(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl", ["Lima\nCapital of Peru.", "Peru\nA country."])
    tool = SearchTool(corpus=corpus)
    assert isinstance(tool, Tool) and tool.blocking
    assert tool(" peru ") == (
        "<information>Doc 1(Title: Peru) A country.\nDoc 2(Title: Lima) Capital of Peru.\n"
        "</information>"
    )
    assert SearchTool(corpus=corpus, tag="", topk=1)("peru") == "Doc 1(Title: Peru) A country.\n"
    assert tool("zebra") == "<information>No documents found.</information>"
    pages = SearchTool(corpus=corpus, form="pages", topk=2)
    assert pages("peru") == "Page 1: Peru: A country.\nPage 2: Lima: Capital of Peru."
    assert pages("zebra") == "No search results found."
    with pytest.raises(ValueError, match="form='page'; known: documents, pages"):
        SearchTool(corpus=corpus, form="page")


def test_a_long_document_is_cut():
    tool = SearchTool(Echo(), topk=1, max_chars=5, tag="")
    assert tool("123456") == "Doc 1(Title: T0) 12345 [...]\n"
    assert tool("12345") == "Doc 1(Title: T0) 12345\n"
    assert SearchTool(Echo(), topk=1, max_chars=None, tag="")("x" * 4000).count("x") == 4000


def test_the_tool_is_in_the_table():
    assert resolve("search", TOOLS, "tool") is SearchTool


def test_a_bad_query_is_answered_with_an_error():
    tool = SearchTool(Echo())
    assert tool("  ") == "Error: empty query; write what to look for"
    assert tool("x" * 5000).startswith("Error: query of 5000 characters; at most 4000")
    assert dict(tool.counts) == {"calls": 2, "cached": 0, "failures": 2}


@pytest.mark.parametrize(
    "query", ["x" * 1_000_000, "\ud800 a", "a\x00b", "'; DROP TABLE x; --", "🦜"]
)
@pytest.mark.parametrize("mode", ["live", "record"])
def test_hostile_queries_get_a_text(tmp_path, query, mode):
    tool = SearchTool(corpus="small", cache=str(tmp_path / "c.db"), cache_mode=mode)
    first = tool(query)
    assert isinstance(first, str) and tool(query) == first
    tool.close()


@given(st.text(alphabet=st.characters(), max_size=100))
def test_any_query_is_answered(query):
    result = SearchTool(Echo(), topk=1)(query)
    assert is_error(result) == (not query.strip())


def test_a_dead_service_is_a_text_and_a_count():
    class Dead(Echo):
        def retrieve(self, queries, topk):
            raise ToolError("no route to host")

    tool = SearchTool(Dead())
    assert tool("q") == "Error: search failed: no route to host"
    assert dict(tool.counts) == {"calls": 1, "cached": 0, "failures": 1}


def test_a_cache_that_cannot_be_written_raises(tmp_path):
    tool = SearchTool(Echo(), cache=str(tmp_path / "c.db"))
    tool.cache.close()
    (tmp_path / "c.db").unlink()
    (tmp_path / "c.db").mkdir()
    with pytest.raises(ToolError, match=r"c.db: unable to open"):
        tool("q")


def test_a_broken_source_raises():
    class Broken(Echo):
        def retrieve(self, queries, topk):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        SearchTool(Broken())("q")


def test_what_was_recorded_is_replayed_with_corpus_and_index_gone(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl", ["Lima\nPeru's capital.", "Rome\nItaly's capital."])
    index, cache = tmp_path / "index", str(tmp_path / "cache.db")
    arguments = {"corpus": corpus, "index": str(index), "cache": cache}
    queries = ["peru", "capital", "zebra", "東京", "peru"]
    record = SearchTool(**arguments)
    seen = [record(query) for query in queries]
    assert dict(record.counts) == {"calls": 5, "cached": 1, "failures": 0}
    record.close()
    Path(corpus).unlink()
    shutil.rmtree(index)
    for same in (arguments, {"cache": cache}):
        replay = SearchTool(**same, cache_mode="replay")
        assert [replay(query) for query in queries] == seen
        assert replay("never recorded") == (
            "Error: search failed: no recorded answer to 'never recorded' in cache.db"
        )
        assert dict(replay.counts) == {"calls": 6, "cached": 5, "failures": 1}
        replay.close()


def test_the_answers_of_a_service_are_replayed_without_it(tmp_path):
    cache = str(tmp_path / "cache.db")
    with serving(build_app(Echo())) as url:
        record = SearchTool(url=url, cache=cache)
        seen = record("q")
        record.close()
    assert seen.startswith("<information>Doc 1(Title: T0) q\n")
    for arguments in ({"url": url}, {}):
        replay = SearchTool(**arguments, cache=cache, cache_mode="replay")
        assert replay("q") == seen
        replay.close()


def test_record_searches_once_and_live_always(tmp_path):
    cache = str(tmp_path / "cache.db")
    echo = Echo()
    tools = [SearchTool(echo, cache=cache) for _ in range(2)]
    assert len({tool("q") for tool in tools}) == 1
    assert len(echo.calls) == 1
    live = SearchTool(echo, cache=cache, cache_mode="live")
    live("q")
    live("r")
    assert len(echo.calls) == 3
    assert len(tools[0].cache) == 1
    for tool in tools:
        tool.close()


def test_failures_are_not_recorded(tmp_path):
    class Recovering(Echo):
        is_down = True

        def retrieve(self, queries, topk):
            if self.is_down:
                raise ToolError("down")
            return super().retrieve(queries, topk)

    source = Recovering()
    tool = SearchTool(source, cache=str(tmp_path / "c.db"))
    assert is_error(tool("q"))
    source.is_down = False
    assert not is_error(tool("q"))
    tool.close()


def test_a_replay_for_another_corpus_is_refused(tmp_path):
    cache = str(tmp_path / "cache.db")
    corpus = write_corpus(tmp_path / "c.jsonl", ["one"])
    record = SearchTool(corpus=corpus, cache=cache)
    record("one")
    record.close()
    with pytest.raises(
        ValueError, match=r"cannot be replayed for bm25:.*it holds answers of bm25:"
    ):
        SearchTool(corpus="small", cache=cache, cache_mode="replay")
    other = SearchTool(Echo(), cache=cache)
    other("one")
    other.close()
    with pytest.raises(ValueError, match=r"an unnamed source: it holds answers of bm25:.*, echo"):
        SearchTool(cache=cache, cache_mode="replay")


def test_a_replay_with_another_topk_is_refused_and_not_answered_with_errors(tmp_path):
    cache = str(tmp_path / "run.db")
    SearchTool(corpus="small", topk=2, cache=cache)("Warsaw")
    with pytest.raises(ValueError, match="recorded with topk=2, not 3; replay it with the same"):
        SearchTool(cache=cache, cache_mode="replay")
    replayed = SearchTool(cache=cache, cache_mode="replay", topk=2)
    assert replayed("Warsaw").startswith("<information>Doc 1(Title: Warsaw)")


def test_an_imported_answer_is_shown_as_it_is(tmp_path):
    store = SearchCache(tmp_path / "c.db")
    store.put_imported([("q", "Page 1: x"), ("none", "")])
    store.close()
    replay = SearchTool(cache=str(tmp_path / "c.db"), cache_mode="replay")
    assert replay("q") == "<information>Page 1: x</information>"
    assert replay("none") == "<information>No documents found.</information>"
    replay.close()


def test_the_address_may_come_from_the_environment(monkeypatch):
    with serving(build_app(Echo())) as url:
        monkeypatch.setenv("SEARCH_URL", url + "/retrieve")
        assert SearchTool(topk=1, tag="")("q") == "Doc 1(Title: T0) q\n"
        assert SearchTool(topk=1, tag="", wire="msgpack")("q") == "Doc 1(Title: T0) q\n"
        # a corpus that is named comes first
        assert SearchTool(corpus="small").fingerprint.startswith("bm25:")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "nothing to search in"),
        ({"corpus": "missing.jsonl"}, "no corpus file 'missing.jsonl'"),
        ({"corpus": "small", "url": "http://x"}, "both corpus= and url="),
        ({"corpus": "small", "topk": 0}, "topk=0"),
        ({"corpus": "small", "max_chars": 0}, "max_chars=0"),
        ({"corpus": "small", "concurrency": 0}, "concurrency=0"),
        ({"corpus": "small", "cache_mode": "record"}, "cache_mode=record needs cache="),
        ({"corpus": "small", "cache_mode": "reply"}, "known: live, record, replay"),
        ({"corpus": "small", "topk": "3"}, "topk='3' is not a whole number"),
        ({"corpus": "small", "top_k": 3}, "'top_k'; did you mean 'topk'. known: corpus"),
        ({"corpus": "small", "colour": 3}, "no argument 'colour'; known: corpus"),
        ({"source": 3}, "source=3: must be a name, or an object"),
        ({"source": "bm25"}, "needs corpus="),
        ({"source": "http", "corpus": "small"}, "corpus= is for bm25 and dense"),
        ({"source": Echo(), "corpus": "small"}, "a source object is complete"),
        ({"cache": "missing.db", "cache_mode": "replay"}, "no search cache 'missing.db'"),
    ],
)
def test_a_tool_that_cannot_work_is_refused_when_it_is_made(arguments, match):
    with pytest.raises(ValueError, match=match):
        SearchTool(**arguments)


def test_the_error_about_an_unknown_source_lists_the_known_ones():
    with pytest.raises(UnknownName, match="known: bing, bm25, brightdata, dense, google_cse, http"):
        SearchTool("bm52", corpus="small")


def test_a_copy_is_the_same_tool_and_a_pickle_opens_it_again(tmp_path):
    tool = SearchTool(corpus="small", topk=1, cache=str(tmp_path / "c.db"))
    assert copy.deepcopy(tool) is tool
    again = pickle.loads(pickle.dumps(tool))
    assert again("capital of Peru") == tool("capital of Peru")
    assert again.source is tool.source  # one index for the process
    again.close()
    tool.close()


def test_a_policy_searches_in_the_middle_of_its_text(tmp_path):
    from graft.envs import make  # the whole table: only here

    env = ToolEnv(make("arithmetic"), [SearchTool(corpus="small", topk=1)])
    env.reset(seed=0)
    turn = env.step("I must look. <search>capital of Peru founded by Pizarro</search>")
    assert "Doc 1(Title: Lima)" in turn.observation and "Hit" not in turn.observation
    assert turn.info["tool"] == "search" and turn.info["tool_ok"] is True
    assert not turn.is_over
    assert env.fork().tools["search"] is env.tools["search"]
    turn = env.step("<search></search>")
    assert turn.info["tool_ok"] is False and "Error: empty query" in turn.observation


def test_a_hit_reads_by_name():
    assert Hit("1", "t", "x").score is None

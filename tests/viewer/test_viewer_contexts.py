"""Contexts of an agent's attempt: their order and reasons, and the page that shows them side by side."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from graft.viewer import walks
from graft.viewer.contexts import PARALLEL, contexts
from graft.viewer.runs import open_runs
from tests.gateway.tiny import TASK, asks, said, tiny_gateway, tiny_tokenizer
from tests.viewer.conftest import viewing, watched_page
from tests.viewer.folders import episode, leaf, span, until, write_run


def about(reason: str, role: str = "main", agent: str = "", after: str = "", *answers: str) -> Any:
    told = {"reason": reason, "role": role, "agent": agent, "after": after}
    return {**told, "answers": list(answers)}


def by_hand() -> dict[str, Any]:
    """A main agent of two answers; after the first a sub-agent, which has one of its own; a compaction.

    0 task ┬ 1 policy a1 ─ 2 env ┬ 3 policy a2
           │                     └ 4 policy a5, at the same time
           ├ 5 policy b1, 6 policy c1, 7 policy d1: other roots, which share the task
           └ 8 policy, dropped
    """
    spans = [
        span(None, "task", "do "),
        span(0, "policy", "one", info={"answer": "a1"}),
        span(1, "env", "go on"),
        span(2, "policy", "two", info={"answer": "a2"}),
        span(2, "policy", "too", info={"answer": "a5"}),
        span(0, "policy", "sub", info={"answer": "b1"}),
        span(0, "policy", "subsub", info={"answer": "c1"}),
        span(0, "policy", "<b>short</b>", info={"answer": "d1"}),
        span(0, "policy", "lo", info={"finish": "abort"}, mask=[False] * 2),
    ]
    main = about("first", "main", "", "", "a1", "a2", "a5")
    told = [
        main,
        about("compaction", "main", "", "a2", "d1"),
        main,
        about("sub-agent", "sub-agent", "dig", "b1", "c1"),
        about("sub-agent", "sub-agent", "dig", "a1", "b1"),
        main,
    ]
    made = leaf(3, 1.0, metrics={"agent/retries": 2.0, "agent/dropped": 1.0, "contexts": 4.0})
    made |= {"tips": [8, 7, 3, 6, 5, 4], "info": {"contexts": told, "exit_code": 0}}
    return episode("t", spans, [made, leaf(1)])


def test_contexts_stand_behind_the_answer_that_they_followed():
    made = by_hand()
    found = contexts(made["leaves"][0], made["spans"])
    kept = [(c["context"], c["title"], c["reason"], c["under"], c["after"]) for c in found]
    assert kept == [
        (2, "main", "first", None, None),  # the first that was answered stands for the context
        (0, "main (2)", "parallel", 2, None),
        (4, "sub-agent dig", "sub-agent", 2, 1),
        (3, "sub-agent dig (2)", "sub-agent", 4, 5),
        (5, "main (3)", "parallel", 2, None),
        (1, "main (4)", "compaction", 2, 3),
    ]


def test_an_attempt_of_no_agent_has_no_contexts_and_a_strange_file_is_read():
    made = by_hand()
    assert contexts(made["leaves"][1], made["spans"]) == []
    for strange in (None, [], {}, [1], "first", [about("first")] * 5, [about("first")] * 2 + [3]):
        one = {"tips": [1, 3, 99], "info": {"contexts": strange}}
        assert contexts(one, made["spans"]) == []
    weird = {**about("x"), "change": {"place": 3, "before": "b" * 900}}
    (found,) = contexts({"tips": [1], "info": {"contexts": [weird]}}, made["spans"])
    assert found["change"] == {"place": "3", "before": "b" * 400, "after": ""}
    circle = [about("x", "<b>", "q" * 900, after="a1"), about("y", after="a2"), {}]
    found = contexts({"tips": [3, 1, 99], "info": {"contexts": circle}}, made["spans"])
    assert sorted(one["context"] for one in found) == [0, 1, 2]
    assert max(len(one["title"]) for one in found) <= 64


def test_the_tree_has_contexts_apart_from_info(tmp_path):
    run = open_runs([str(write_run(tmp_path / "r", {1: [by_hand()]}))])[0]
    first, second = walks.tree(run, "1", 0)["leaves"]
    assert len(first["contexts"]) == 6 and first["info"] == {"exit_code": 0}
    assert second["contexts"] == []


def recorded() -> dict[str, Any]:
    """The calls of a session: a retry, a sub-agent, a rewritten history, a dropped connection."""
    gateway = tiny_gateway()
    session = gateway.open(TASK)
    other = {"role": "system", "content": "You search."}

    async def talk() -> None:
        (a,) = await session.answer(asks("2+3?"))
        await session.answer(asks("2+3?"))
        await session.answer(asks(other, "find 5", agent="search"))
        await session.answer(asks("2+3?", {**said(a), "content": "6"}, "sure?"))
        call = asyncio.ensure_future(session.answer(asks("2+3?", said(a), "again?")))
        while not session._under_way.total():
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    with ThreadPoolExecutor(1) as thread:  # Playwright has an event loop on this one
        thread.submit(asyncio.run, talk()).result()
    session.end()
    return json.loads(session.forest.episode().dumps())


def test_what_a_session_records_is_shown():
    made = recorded()
    found = contexts(made["leaves"][0], made["spans"])
    kept = [(c["title"], c["reason"], c["under"] is None, c["is_dropped"]) for c in found]
    assert kept == [
        ("main", "first", True, True),
        ("sub-agent search", "sub-agent", False, False),
        ("main (2)", "rewritten history", False, False),
    ]


def write_session(folder: Path) -> Path:
    run = write_run(folder, {1: [recorded(), by_hand()]})
    tiny_tokenizer().save(run / "checkpoints" / "rl-000001")
    return run


@pytest.mark.slow
def test_contexts_are_columns_and_lead_to_each_other(page, go, tmp_path):
    with viewing(write_session(tmp_path / "r")) as url:
        go(page, url, "#/episode?run=0&step=1&line=1")
        columns = page.locator(".column")
        columns.first.wait_for()
        assert columns.locator("h3").all_text_contents() == [
            *("main", "main (2)", "sub-agent dig", "sub-agent dig (2)", "main (3)", "main (4)")
        ]
        assert "chosen" in columns.first.get_attribute("class")
        line = page.locator('select[name="leaf"] option').first.text_content()
        assert line == "#0: reward 1, done, 4 contexts, 2 retries, 1 dropped connection"
        words = page.locator('.column[data-context="0"] .note').first.inner_text()
        assert PARALLEL in words and "dropped the connection" in words
        main = page.locator('.column[data-context="2"]')
        below = main.locator('.span[data-span="3"] + .follower')
        assert below.inner_text() == "↳ main (4) (compaction)"
        below.click()
        chosen = page.locator('.column.chosen[data-context="1"]')
        chosen.locator('.span[data-span="7"] .t').first.wait_for()
        assert "<b>short</b>" in chosen.locator('.span[data-span="7"] .tokens').inner_text()
        assert page.locator('select[name="context"]').input_value() == "1"
        assert page.locator('.tree .node.on[data-span="7"]').count() == 1
        chosen.locator(".origin").click()
        page.locator('.column.chosen[data-context="2"] .span.chosen[data-span="3"]').wait_for()
        sub = page.locator('.column[data-context="4"] .span.chosen')
        assert sub.get_attribute("data-span") == "5"  # a column begins with what no other shows
        page.locator('select[name="colour"]').select_option("author")
        page.locator('select[name="leaf"]').select_option("1")  # made by no agent: as ever
        page.locator(".transcript .t").first.wait_for()
        assert page.locator(".column").count() == 0 and page.locator(".transcript").count() == 1
        page.evaluate("location.hash = '#/episode?run=0&step=1&line=0'")
        page.locator(".column[data-context] .t").first.wait_for()
        assert page.locator(".column").count() == 3
        change = page.locator('.column[aria-label="main (2)"] .change').inner_text()
        assert change.startswith("message 2, before: assistant: ")
        assert change.endswith("\nafter: assistant: 6")
        sub = page.locator('.column[aria-label="sub-agent search"] .transcript')
        until(lambda: "You search." in sub.inner_text())


@pytest.mark.slow
def test_a_saved_page_has_the_columns_too(chromium, tmp_path):
    from tests.viewer.test_viewer_saved import app

    run, out = write_session(tmp_path / "r"), tmp_path / "page.html"
    CliRunner().invoke(app, [str(run), "--out", str(out)], catch_exceptions=False)
    with watched_page(chromium, lambda url: url.startswith("file:")) as page:
        page.goto(out.as_uri() + "#/episode?run=0&step=1&line=1")
        page.locator('.column[data-context="2"] .t').first.wait_for()
        assert page.locator(".column").count() == 6

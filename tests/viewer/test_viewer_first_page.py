"""The first page of `graft view` and `graft report`: its words and numbers, and how it looks in a browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graft.runs import RunRecord
from graft.viewer.answers import Answers
from graft.viewer.headline import headline
from graft.viewer.runs import open_runs
from graft.viewer.saved import save_page
from graft.viewer.summary import summary
from tests.runs.test_record import make_run, save, step
from tests.viewer.conftest import watched_page
from tests.viewer.folders import episode, leaf, span, until, write_step

WIDTHS = (360, 768, 1280, 1800)
LONG = "Let me think about this step by step, and then call the tool that was described above. " * 9
PATH = "/data/projects/language-models/checkpoints/Qwen3-0.6B-instruct-continued/rl-000400"
CONFIG = f"""
run: {{name: made, seed: 0, eval_tasks: 100}}
model: {{path: {PATH}}}
task: {{env: calculator, args: {{split: train, operands: [2, 3], deep: {{"{"k" * 60}": 1}}}}}}
rollout: {{tasks: 16, samples: 8, max_context: 131072}}
train: {{steps: 4, lr: 0.000002}}
algo: {{name: grpo}}
"""


def equal_attempts(task: str, answer: str, reward: float) -> dict[str, Any]:
    """Eight attempts that say the same, and one that does not."""
    spans = [span(None, "task", f"{task}: {LONG}")]
    leaves: list[dict[str, Any]] = []
    for said in [answer] * 8 + ["another way"]:
        spans.append(span(0, "policy", f"[{said}]", info={"tool_calls": 1}))
        spans.append(span(len(spans) - 1, "env", "result;"))
        spans.append(span(len(spans) - 1, "policy", f"{said} {LONG}"))
        leaves.append(leaf(len(spans) - 1, reward if said == answer else 0.25))
    return episode(task, spans, leaves)


def made_run(folder: Path, config: str = CONFIG, **summary: Any) -> RunRecord:
    record = make_run(
        folder,
        *(step(n, reward=n / 4, step_time=3.0, **{"eval/sampled": n / 5}) for n in range(1, 5)),
        config=config,
        summary={
            "before": {"sampled": 0.3, "greedy": 0.35},
            "after": {"sampled": 0.8, "greedy": 0.9},
            "standard_error": {"tasks": 100, "before": 0.046, "after": 0.04},
            "seconds_per_phase": {"sft": 62.0, "rl": 3675.0},
            "parameters": 1115520,
            "checkpoint": "x/rl-000004",
            "machine": {"device": "NVIDIA H200", "threads": 16},
            **summary,
        },
    )
    (folder / "episodes").mkdir()
    write_step(folder, 1, [equal_attempts("a", "wrong", 0.0), equal_attempts("b", "bad", 0.0)])
    write_step(folder, 4, [equal_attempts("c", "good", 0.5), equal_attempts("b", "right", 1.0)])
    alarm = {"phase": "rl", "step": 4, "metric": "frac_reward_zero_std", "level": "alarm"}
    lines = [json.dumps({**alarm, "text": f"{n} {LONG}"}) + "\n" for n in range(6)]
    (folder / "alarms.jsonl").write_text("".join(lines))
    return record


# its words and numbers


def test_the_headline_names_the_change_the_error_the_time_and_the_machine(tmp_path):
    record = made_run(tmp_path / "a")
    record.refresh()
    found = headline(record)
    assert found["words"] == "The held-out score rose from 0.300 to 0.800."
    assert found["score"]["errors"] == [0.046, 0.04] and "100 tasks" in found["score"]["of"]
    assert found["facts"] == [
        ["Trained", "4 steps", "16 × 8 attempts each"],
        ["Time", "1 h 2 min", "warm-up 1:02, reinforce 1:01:15"],
        ["Parameters", "1.1 million", "from rl-000400"],
        ["Machine", "NVIDIA H200", "16 threads"],
    ]


@pytest.mark.parametrize(
    ("summary", "words"),
    [
        ({"after": {"sampled": 0.35}}, "went from 0.300 to 0.350: too little to tell from chance"),
        ({"after": {"sampled": 0.1}}, "fell from 0.300 to 0.100"),
        ({"after": {"sampled": 0.3}}, "stayed at 0.300"),
        ({"after": {"sampled": 0.31}, "standard_error": "?"}, "rose from 0.300 to 0.310"),
        ({"after": {}}, "was 0.300 before training"),
        ({"before": {}, "after": {}}, "reward went from 0.25 to 1 in training"),
    ],
)
def test_a_change_within_the_error_is_not_called_one(tmp_path, summary, words):
    record = made_run(tmp_path / "a", **summary)
    record.refresh()
    assert words in headline(record)["words"]


def test_scores_of_equal_tasks_have_no_interval(tmp_path):
    """All tasks right: the scatter is 0, which says nothing about the tasks that were not tried."""
    record = made_run(tmp_path / "a", standard_error={"tasks": 20, "before": 0.0, "after": None})
    assert headline(record)["score"]["errors"] == [None, None]


def test_the_error_of_a_run_that_goes_on_is_that_of_its_checkpoint(tmp_path):
    record = make_run(tmp_path / "a", step(2, reward=0.5), train=8)
    save(record, "rl-000000", before={"sampled": 0.25}, standard_error={"before": 0.1, "tasks": 9})
    assert headline(record)["score"]["errors"] == [0.1, None]


def test_leaked_tasks_are_not_called_held_out(tmp_path):
    found = headline(made_run(tmp_path / "a", leakage={"note": "7 of 100 <b>tasks", "sets": {}}))
    assert found["leakage"] == "7 of 100 <b>tasks" and found["words"].startswith("The score rose")


def test_no_table_of_a_run_with_leaked_tasks_calls_its_scores_held_out(tmp_path):
    leaks = {"leakage": {"note": "7 of 100 held-out tasks", "sets": {}}, "sft": {"loss": 0.5}}
    leaking = made_run(tmp_path / "a", **leaks)
    clean = made_run(tmp_path / "b", sft={"loss": 0.5})
    for record, seeds, scores in (
        (leaking, (), "Scores, not held out"),
        (clean, (clean, leaking), "Scores over 2 seeds, not held out"),
    ):
        found = summary(record, seeds)
        assert found["tables"][0]["title"] == scores
        assert found["tables"][0]["columns"][0] == "score" and found["leakage"]
    titles = [table["title"] for table in summary(leaking)["tables"]]
    assert "Rows after the warm-up, not held out" in titles
    assert not any(title.startswith("Held-out") for title in titles)
    assert summary(clean)["tables"][0]["title"] == "Held-out scores"


@pytest.mark.parametrize("leakage", [{}, {"note": "", "sets": {"math": {"leaked": 0}}}, [7], None])
def test_scores_without_leaked_tasks_are_held_out(tmp_path, leakage):
    found = headline(made_run(tmp_path / "a", leakage=leakage))
    assert found["leakage"] == "" and found["words"].startswith("The held-out score rose")


def test_the_first_page_has_a_good_attempt_and_the_same_task_before(tmp_path):
    made_run(tmp_path / "a")
    answers = Answers(open_runs([str(tmp_path / "a")]))
    found = answers.summary({"run": "0"})["attempts"]
    assert [(one["step"], one["line"], one["is_best"]) for one in found] == [
        ("4", 1, True),
        ("1", 1, False),
    ]
    write_step(
        tmp_path / "a", 1, [equal_attempts("x", "bad", 0.5), equal_attempts("y", "bad", 0.0)]
    )
    answers = Answers(open_runs([str(tmp_path / "a")]))
    [_, before] = answers.summary({"run": "0"})["attempts"]
    assert before["line"] == 1 and "another task" in before["title"]


# in a real browser

BROKEN_WORDS = r"""() => {
    const broken = [];
    const boxes = ["h1", "h2", "th", "td", "dt", "dd", "summary"].map((tag) => `main ${tag}`).join();
    for (const box of document.querySelectorAll(boxes)) {
        const walk = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
        while (walk.nextNode()) {
            const node = walk.currentNode;
            for (const found of node.data.matchAll(/\S+/g)) {
                if (found[0].length > 24) continue;
                const range = document.createRange();
                range.setStart(node, found.index);
                range.setEnd(node, found.index + found[0].length);
                const tops = new Set([...range.getClientRects()].map((one) => Math.round(one.top)));
                if (tops.size > 1) broken.push(found[0]);
            }
        }
    }
    return broken;
}"""
"""Words of tables and headings whose letters are in several lines."""

OVERFLOWS = """() => {
    const boxes = "html, main, main section, main article, .tiles > div, .attempt, .said bdi, details";
    return [...document.querySelectorAll(boxes)]
        .filter((one) => one.clientWidth && one.scrollWidth > one.clientWidth + 1)
        .map((one) => one.outerHTML.slice(0, 80));
}"""

CONTRASTS = r"""() => {
    const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
    const shade = ([r, g, b]) => {
        const light = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        const [R, G, B] = [r, g, b].map((c) => light(c / 255));
        return 0.2126 * R + 0.7152 * G + 0.0722 * B;
    };
    const ground = (box) => {
        for (; box; box = box.parentElement) {
            const found = numbers(getComputedStyle(box).backgroundColor);
            if (found.length < 4 || found[3] === 1) return found;
        }
        return [255, 255, 255];
    };
    const poor = [];
    for (const box of document.querySelectorAll("body *")) {
        const hasText = [...box.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
        if (!hasText || !box.checkVisibility()) continue;
        const style = getComputedStyle(box);
        const ink = numbers(box.closest("svg") ? style.fill : style.color);
        const [a, b] = [ink, ground(box)].map(shade);
        const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (contrast < 4.5) poor.push([box.tagName, box.textContent.slice(0, 30), contrast]);
    }
    return poor;
}"""
"""Texts that are hard to read on what is behind them."""

UNFOLD = "document.querySelectorAll('main details').forEach((one) => (one.open = true))"

SPILLED = """() => [...document.querySelectorAll(".tree .node, .tree .leaf")].filter((node) => {
    const place = (kind) => node.querySelector(kind).getBoundingClientRect();
    const [box, words] = [place("rect"), place("text:not(.call)")];
    return words.right > box.right + 0.5 || words.left < box.left;
}).length"""
"""Texts of a tree that are wider than their boxes."""


@pytest.fixture
def report(chromium: Any, tmp_path: Path) -> Iterator[Any]:
    """The saved page of one run that has held-out tasks in its training data."""
    made_run(tmp_path / "made", leakage={"note": "7 of 100 held-out tasks are rows"})
    save_page(open_runs([str(tmp_path / "made")]), tmp_path / "report.html")
    with watched_page(chromium, lambda url: url.startswith("file:")) as page:
        page.goto((tmp_path / "report.html").as_uri())
        page.locator(".attempt").nth(1).wait_for()
        yield page


def test_no_word_is_broken_and_nothing_overflows_at_any_width(report):
    for scheme in ("light", "dark"):
        report.emulate_media(color_scheme=scheme)
        for is_open in (False, True):
            if is_open:
                report.evaluate(UNFOLD)
            for width in WIDTHS:
                report.set_viewport_size({"width": width, "height": 900})
                where = (scheme, width, is_open)
                assert (report.evaluate(BROKEN_WORDS), where) == ([], where)
                assert (report.evaluate(OVERFLOWS), where) == ([], where)
                assert report.evaluate(SPILLED) == 0, where
        assert report.evaluate(CONTRASTS) == [], scheme


def test_the_report_has_headline_curve_attempts_alarms_and_settings_in_this_order(report):
    parts = report.locator("article [data-part]")
    assert parts.evaluate_all("all => all.map((one) => one.dataset.part)") == [
        "head", "chart", "attempts", "alarms", "experts", "tables",
    ]  # fmt: skip
    assert report.locator("h1").inner_text().split() == ["made", "done"]
    assert report.locator(".lead").inner_text() == "The score rose from 0.300 to 0.800."
    assert "7 of 100 held-out tasks are rows" in report.locator(".leakage").inner_text()
    tiles = report.locator(".tiles > div").all_inner_texts()
    assert tiles[0].split() == ["Score,", "before", "0.300", "±", "0.090"]
    canvas = report.locator(".chart canvas")
    until(lambda: canvas.get_attribute("data-points") == "4")
    assert "before 0.300, after 0.800" in canvas.get_attribute("aria-label")
    assert report.locator(".attempt h2").all_inner_texts() == [
        "After training",
        "At the start, the same task",
    ]
    earned = report.locator(".attempt .earned").all_inner_texts()
    assert earned == ["reward 1", "reward 0"]
    assert report.locator('[data-part="alarms"] > ul > li').count() == 4
    assert "train.lr" in report.locator(".tables").inner_text()
    folded = report.locator(".folds details:not([open]) summary").all_inner_texts()
    assert "All settings" in folded
    for table in report.locator("main table").all():
        assert (
            table.locator("thead th[scope=col]").count() and table.locator("th[scope=row]").count()
        )


def test_equal_attempts_are_one_row_until_they_are_unfolded(report):
    tree = report.locator(".attempt .treebox").first
    words = [text.split(" ", 1)[1] for text in tree.locator(".leaf text").all_text_contents()]
    assert words == ["1 ×8", "0.25"] and tree.locator(".node").count() == 1 + 2 * 3
    assert tree.locator(".fork text").text_content() == "2 ways"
    tree.get_by_text("unfold 7 equal attempts").click()
    assert tree.locator(".leaf").count() == 9 and tree.locator(".node").count() == 1 + 9 * 3
    assert report.evaluate(SPILLED) == 0


@pytest.mark.slow
def test_runs_that_differ_in_many_settings_show_their_chart_first(chromium, tmp_path):
    many = ", ".join(f"key{n}: {n}" for n in range(30))
    made_run(tmp_path / "a")
    made_run(tmp_path / "b", CONFIG.replace("split: train", f"split: train, {many}"))
    save_page(open_runs([str(tmp_path / "a"), str(tmp_path / "b")]), tmp_path / "report.html")
    with watched_page(chromium, lambda url: url.startswith("file:")) as page:
        page.goto((tmp_path / "report.html").as_uri())
        for view in ("#/summary", "#/curves"):
            page.evaluate("view => { location.hash = view }", view)
            canvas = page.locator(".chart canvas").first
            until(lambda shown=canvas: shown.get_attribute("data-points") == "8")
            box = canvas.bounding_box()
            assert box["y"] + box["height"] < 500, view
            assert "30 settings differ" in page.inner_text("main") or view == "#/summary"
        page.evaluate("location.hash = '#/summary'")
        page.locator(".tables").wait_for()
        rows = page.locator('table[aria-label="Settings that differ"] tbody tr')
        assert rows.count() == 8
        assert page.get_by_text("22 more settings that differ").is_visible()
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            assert (page.evaluate(BROKEN_WORDS), page.evaluate(OVERFLOWS)) == ([], [])
        page.locator("article summary").first.click()
        page.locator(".attempt").nth(1).wait_for()

"""The page in a real browser, on runs that the quickstart made and on some made by hand."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graft.train.run_dir.token_log import learned_path, read_learned
from graft.types import Episode
from tests.viewer.conftest import viewing
from tests.viewer.folders import episode, leaf, span, until, write_run, write_step


def numbers(folder: Path, phase: str = "rl") -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.split("\n") if line]
    return [row for row in rows if row["phase"] == phase]


def episodes(folder: Path, step: int) -> list[Episode]:
    path = folder / "episodes" / f"step_{step:06d}.jsonl"
    return [Episode.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def painted(page, metric: str, colour: tuple[int, int, int]) -> int:
    """Pixels of a chart that are nearly of this colour."""
    return page.evaluate(
        """([metric, colour]) => {
            const canvas = document.querySelector(`.chart[data-metric="${metric}"] canvas`);
            const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            let many = 0;
            for (let i = 0; i < pixels.length; i += 4) {
                const off = colour.map((c, k) => Math.abs(pixels[i + k] - c));
                if (pixels[i + 3] > 200 && Math.max(...off) < 12) many++;
            }
            return many;
        }""",
        [metric, colour],
    )


BLUE, ORANGE = (42, 120, 214), (224, 96, 43)


@pytest.mark.slow
def test_curves_of_both_runs_are_drawn_and_a_run_can_be_hidden(page, go, both, runs):
    go(page, both)
    canvas = page.locator('.chart[data-metric="entropy"] canvas')
    canvas.wait_for()
    many = sum(len(numbers(run)) for run in runs)
    until(lambda: canvas.get_attribute("data-points") == str(many))
    assert painted(page, "entropy", BLUE) > 30 and painted(page, "entropy", ORANGE) > 30
    page.locator('.run[data-run="0"]').click()
    until(lambda: canvas.get_attribute("data-points") == str(len(numbers(runs[1]))))
    assert painted(page, "entropy", BLUE) == 0 and painted(page, "entropy", ORANGE) > 30


def test_a_chart_shows_its_values_and_downloads_them(page, go, both, runs, tmp_path):
    go(page, both)
    chart = page.locator('.chart[data-metric="entropy"]')
    chart.locator("canvas").wait_for()
    until(lambda: chart.locator("canvas").get_attribute("data-points"))

    def point() -> bool:  # charts above it may still be growing
        box = chart.locator("canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] - 16, box["y"] + 80)
        return page.locator("#tip").inner_text().startswith("step 3")

    until(point)
    tip = page.locator("#tip").inner_text()
    for run in runs:
        value = float(re.search(rf"{run.name}\s+([\d.]+)", tip)[1])
        assert value == pytest.approx(numbers(run)[-1]["entropy"], rel=1e-5)
    with page.expect_download() as loading:
        chart.get_by_text("CSV").click()
    lines = Path(loading.value.path()).read_text(encoding="utf-8").splitlines()
    assert lines[0] == "run,phase,step,seconds,entropy" and len(lines) == 1 + 6
    assert float(lines[1].split(",")[4]) == numbers(runs[0])[0]["entropy"]
    with page.expect_download() as loading:
        chart.get_by_text("PNG").click()
    assert Path(loading.value.path()).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_axes_smoothing_log_scale_and_the_choice_of_metrics(page, go, both):
    go(page, both)
    chart = page.locator('.chart[data-metric="entropy"] canvas')
    chart.wait_for()
    before = painted(page, "entropy", BLUE)
    page.locator('input[type="range"]').fill("0.9")
    until(lambda: painted(page, "entropy", BLUE) != before)
    for axis in ("seconds", "wall", "step"):
        page.locator('select[name="axis"]').select_option(axis)
        assert painted(page, "entropy", BLUE) > 10
    page.locator('input[name="log"]').check()
    assert painted(page, "entropy", BLUE) > 10
    page.locator(".picker summary").click()
    page.locator('.picker input[value="learning_rate"]').check()
    page.locator('.chart[data-metric="learning_rate"] canvas').wait_for()
    page.locator('select[name="phase"]').select_option("sft")
    page.locator('.chart[data-metric="loss"] canvas').wait_for()
    assert page.locator('.chart[data-metric="reward"]').count() == 0


@pytest.mark.slow
def test_a_metric_explains_itself(page, go, both):
    go(page, both)
    name = page.locator('.chart[data-metric="reward"] .name')
    name.wait_for()
    assert "Mean reward" in name.get_attribute("title")
    page.locator('.chart[data-metric="reward"] .help').click()
    assert "Mean reward" in page.locator('.chart[data-metric="reward"] .explained').inner_text()


@pytest.mark.slow
def test_settings_that_differ_are_named_while_both_runs_are_shown(page, go, both):
    go(page, both)
    summary = page.locator(".settings summary")
    summary.wait_for()
    # all other settings are equal; names and folders do not count
    assert summary.inner_text() == "1 setting differs: sft.steps 2 | 6"
    summary.click()
    rows = page.locator(".settings tr").all()
    shown = [" ".join(row.inner_text().split()) for row in rows]
    assert shown == ["setting short long", "sft.steps 2 6"]
    page.locator('.run[data-run="0"]').click()
    until(lambda: not page.locator(".settings").is_visible())


@pytest.mark.slow
def test_a_click_on_a_curve_opens_the_tasks_of_that_step(page, go, both):
    go(page, both)
    page.locator('.run[data-run="0"]').click()  # one curve, so that there is no doubt whose it is
    canvas = page.locator('.chart[data-metric="entropy"] canvas')
    until(lambda: canvas.get_attribute("data-points") == "3")
    box = canvas.bounding_box()
    canvas.click(
        position={"x": 54 + (box["width"] - 68) * 0.55, "y": 80}
    )  # near the second of three
    page.locator(".list .row").first.wait_for()
    assert page.locator('select[name="run"]').input_value() == "1"
    assert page.locator('select[name="step"]').input_value() == "2"
    assert page.locator('[data-sort="reward"]').inner_text() == "reward ↑"  # the worst come first


@pytest.mark.slow
def test_arrow_keys_go_from_step_to_step_and_enter_opens_one(page, go, both):
    go(page, both)
    canvas = page.locator('.chart[data-metric="entropy"] canvas')
    until(lambda: int(canvas.get_attribute("data-points") or 0))
    canvas.focus()
    for wanted in ("step 1", "step 2"):
        canvas.press("ArrowRight")
        assert page.locator("#tip .heading").inner_text() == wanted
    canvas.press("Enter")
    until(lambda: page.locator('select[name="step"]').count())
    assert page.locator('select[name="step"]').input_value() == "2"


@pytest.mark.slow
def test_a_tree_is_opened_and_a_branch_is_read(page, go, both, runs):
    go(page, both, "#/steps?run=0&step=2")
    page.locator(".list .row").nth(1).click()
    page.locator(".tree .node").first.wait_for()
    wanted = episodes(runs[0], 2)[1]
    assert page.locator(".tree .node").count() == len(wanted.spans)
    assert page.locator(".tree .leaf").count() == len(wanted.leaves)
    tip = wanted.leaves[2].tips[0]
    page.locator(f'.tree .node[data-span="{tip}"]').click()
    page.locator(f'.span.chosen[data-span="{tip}"]').wait_for()
    shown = page.locator(f'.span[data-span="{tip}"] .tokens').inner_text()
    assert wanted.spans[tip].text in shown
    assert page.locator('select[name="leaf"]').input_value() == "2"


@pytest.mark.slow
def test_a_token_shows_the_recorded_numbers(page, go, both, runs):
    go(page, both, "#/episode?run=1&step=3&line=0&leaf=1")
    wanted = episodes(runs[1], 3)[0]
    path = wanted.walk(wanted.leaves[1].tips[0])
    first = next(i for i in path if wanted.spans[i].author == "policy")
    place = sum(len(wanted.spans[i]) for i in path[: path.index(first)])
    page.locator(f'.t[data-i="{place}"]').hover()
    tip = page.locator("#tip").inner_text()
    written = wanted.spans[first]
    assert f"{written.logprobs[0]:.6f}" in tip and f"{written.entropies[0]:.6f}" in tip
    assert f"token\n{written.tokens[0]}" in re.sub(r"\s+", "\n", tip)
    learned = read_learned(learned_path(runs[1], 3))[0, 1, 0]
    behind = place - len(wanted.spans[0])
    assert f"{learned.advantages[behind]:.6f}" in tip
    assert f"{math.exp(learned.logprobs[behind] - written.logprobs[0]):.4f}" in tip


@pytest.mark.slow
def test_colours_follow_the_numbers_and_what_was_not_recorded_is_greyed(page, go, tmp_path):
    spans = [
        span(None, "task", "2+3="),
        span(0, "policy", "ab", mask=[True, False], logprobs=[-0.25, -4.0], entropies=[0.1, 2.0],
             actions=[97, 258], modes=[0, 3], version=7),
    ]  # fmt: skip
    made = episode("t", spans, [leaf(1, 1.0)])
    folder = write_run(tmp_path / "r", {1: [made], 2: [made]})
    (folder / "learned").mkdir()
    np.savez(
        folder / "learned" / "step_000001.npz",
        rows=np.array([[0, 0, 0]], np.int32),
        lengths=np.array([2], np.int32),
        advantages=np.array([1.5, 1.5], np.float32),
        logprobs=np.array([-0.125, math.nan], np.float32),
    )
    with viewing(folder) as url:
        go(page, url, "#/episode?run=0&step=1&line=0")
        first, second = (page.locator(f'.t[data-i="{i}"]') for i in (4, 5))
        second.wait_for()

        def alpha(token) -> float:
            colour = token.evaluate("e => e.style.backgroundColor")
            found = re.findall(r"[\d.]+", colour)
            return float(found[3]) if len(found) == 4 else 0.0

        assert alpha(first) < alpha(second)  # log-prob: the unlikely one is stronger
        page.locator('select[name="colour"]').select_option("entropy")
        assert alpha(first) < alpha(second)
        page.locator('select[name="colour"]').select_option("advantage")
        assert alpha(first) == pytest.approx(0.75) and alpha(second) == 0.0  # masked
        page.locator('select[name="colour"]').select_option("ratio")
        assert alpha(first) == pytest.approx(0.75 * 0.125 / 0.3, abs=2e-3)
        first.hover()
        tip = page.locator("#tip").inner_text()
        assert f"{math.exp(0.125):.6f}" in tip and "1.500000" in tip
        assert "unmasked" in second.get_attribute("class")
        assert page.locator(".action").inner_text() == "compare"
        assert page.locator(".mode").inner_text() == "m3"
        page.evaluate("location.hash = '#/episode?run=0&step=2&line=0'")
        option = page.locator('select[name="colour"] option[value="ratio"]')
        until(lambda: option.get_attribute("disabled") is not None)
        assert "learned/" in option.get_attribute("title")


@pytest.mark.slow
def test_a_fork_shows_the_entropy_that_caused_it_and_twins_their_partner(page, go, tmp_path):
    spans = [
        span(None, "task", "q"),
        span(0, "policy", "search", info={"tool_calls": 1}),
        span(1, "env", "result"),
        span(2, "policy", "hm", info={"entropy_change": 0.2125, "forks": 1}),
        span(2, "policy", "so"),
        span(0, "policy", "forced", info={"forced": "swap"}),
    ]
    made = episode("t", spans, [leaf(3, 1.0), leaf(4, -1.0, "timeout"), leaf(5, 0.0, twin=0)])
    with viewing(write_run(tmp_path / "r", {1: [made]})) as url:
        go(page, url, "#/episode?run=0&step=1&line=0")
        assert page.locator('.fork[data-span="2"] text').text_content() == "ΔH +0.21"
        assert page.locator('.fork[data-span="0"] text').text_content() == "twin: swap"
        leaves = page.locator(".leaf text").all_text_contents()
        assert leaves == ["#0 1", "#1 -1 timeout", "#2 0 ⇄0"]
        assert page.locator(".tree .call").count() == 1
        # keys: from the root to its first child, to that one's result, and read there
        page.locator('.node[data-span="0"]').focus()
        for key in ("ArrowRight", "ArrowRight", "Enter"):
            page.keyboard.press(key)
        page.locator('.span.chosen[data-span="2"]').wait_for()


@pytest.mark.slow
def test_rows_are_sorted_filtered_and_searched(page, go, both, runs):
    go(page, both, "#/steps?run=0&step=1")
    page.locator(".list .row").first.wait_for()
    page.locator('[data-sort="length"]').click()
    lengths = [
        sum(len(s) for s in e.spans if s.author == "policy") / len(e.leaves)
        for e in episodes(runs[0], 1)
    ]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    until(lambda: lines_in_order(page) == order)
    wanted = episodes(runs[0], 1)[2]
    page.locator('input[name="words"]').fill(wanted.task.id)
    until(lambda: lines_in_order(page) == [2])
    page.locator('input[name="words"]').fill(wanted.task.prompt[-1]["content"])
    page.locator('select[name="scope"]').select_option("all")
    page.locator(".hit").first.click()
    page.locator(".span.chosen").wait_for()
    assert wanted.task.id in page.locator(".pane h2").inner_text()


def lines_in_order(page) -> list[int]:
    """The line numbers that the table shows, from the top."""
    return page.evaluate(
        """() => [...document.querySelectorAll(".list .row:not([hidden])")]
            .map((row) => [Number(row.dataset.index), row.querySelector(".line").textContent])
            .sort((a, b) => a[0] - b[0])
            .filter(([, line]) => line !== "")
            .map(([, line]) => Number(line))"""
    )


@pytest.mark.slow
def test_the_same_task_of_two_runs_is_read_side_by_side(page, go, both, runs):
    assert episodes(runs[0], 2)[0].task.id == episodes(runs[1], 2)[0].task.id
    go(page, both, "#/episode?run=0&step=2&line=0")
    page.locator('select[name="with"]').select_option("1:2:0")
    page.locator(".pane").nth(1).wait_for()
    panes = [page.locator(".pane").nth(i) for i in range(2)]
    assert [pane.get_attribute("data-run") for pane in panes] == ["0", "1"]
    for pane, run in zip(panes, runs, strict=True):
        pane.locator(".t").first.wait_for()
        assert pane.locator(".node").count() == len(episodes(run, 2)[0].spans)


@pytest.mark.slow
def test_a_run_that_goes_on_is_followed(page, go, runs, tmp_path):
    folder = tmp_path / "live"
    shutil.copytree(runs[0], folder)
    with viewing(folder) as url:
        go(page, url)
        canvas = page.locator('.chart[data-metric="entropy"] canvas')
        until(lambda: canvas.get_attribute("data-points") == "3")
        row = {**numbers(folder)[-1], "step": 4, "entropy": 1.25}
        text = json.dumps(row) + "\n"
        with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(text[:40])
            file.flush()
            page.wait_for_timeout(1500)  # half a line is no step
            assert canvas.get_attribute("data-points") == "3"
            file.write(text[40:])
        until(lambda: canvas.get_attribute("data-points") == "4")
        assert "rl 4" in page.locator(".run").inner_text()
        alarm = {"phase": "rl", "step": 4, "metric": "entropy", "level": "alarm", "text": "<b>low"}
        (folder / "alarms.jsonl").write_text(json.dumps(alarm) + "\n", encoding="utf-8")
        until(lambda: page.locator(".alarms summary").inner_text() == "1 alarm")
        assert "entropy: <b>low" in page.locator(".alarms li").text_content()
        until(lambda: painted(page, "entropy", (208, 43, 43)) > 10)
        assert page.locator(".alarms a").count() == 0  # step 4 has no episodes yet
        # a chart that is not among the usual ones comes with its first alarm
        assert page.locator('.chart[data-metric="learning_rate"]').count() == 0
        with (folder / "alarms.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**alarm, "metric": "learning_rate"}) + "\n")
        page.locator('.chart[data-metric="learning_rate"] canvas').wait_for()
        # the table follows the newest step
        page.evaluate("location.hash = '#/steps'")
        until(lambda: page.locator('select[name="step"]').input_value() == "3")
        shutil.copy(
            folder / "episodes" / "step_000003.jsonl", folder / "episodes" / "step_000004.jsonl"
        )
        until(lambda: page.locator('select[name="step"]').input_value() == "4")
        page.evaluate("location.hash = '#/curves'")
        page.locator(".alarms summary").click()
        page.locator(".alarms a").first.click()
        until(lambda: page.locator('select[name="step"]').count())
        assert page.locator('select[name="step"]').input_value() == "4"


HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31mred\x1b[0m\x07"
    "\u202egnp.exe\u202c שלום עליכם مرحبا </span></body> ]]> & \u2028 {{7*7}}"
)


def test_a_hostile_transcript_is_shown_as_text(page, go, tmp_path):
    line = "x" * 2**20  # one line of a megabyte
    spans = [
        span(None, "task", HOSTILE),
        span(
            0, "policy", HOSTILE, info={"<script>": "<script>alert(3)</script>", "error": HOSTILE}
        ),
        span(1, "env", line),
        span(2, "policy", "end"),
    ]
    made = episode(HOSTILE, spans, [leaf(3, 1.0)])
    made["task"]["answer"] = "<script>alert(4)</script>"
    metrics = [{"phase": "rl", "step": 1, "<img src=x onerror=alert(5)>": 1.0, "reward": 0.0}]
    folder = write_run(tmp_path / "<b>run", {1: [made]}, metrics)
    alarm = {"phase": "rl", "step": 1, "metric": "reward", "level": "warn", "text": HOSTILE}
    (folder / "alarms.jsonl").write_text(json.dumps(alarm) + "\n", encoding="utf-8")
    with viewing(folder) as url:
        go(page, url)
        page.locator(".picker summary").click()
        page.get_by_text("<img src=x onerror=alert(5)>").click()
        page.keyboard.press("Escape")
        page.locator(".alarms summary").click()
        go(page, url, "#/steps?run=0&step=1")
        page.locator(".list .row").first.wait_for()
        row = page.locator(".list .row .task").inner_text()
        assert "<script>alert(1)</script>" in row and "␛[31m" in row
        page.locator(".list .row").first.click()
        page.locator('.span[data-span="2"] .t').first.wait_for()
        shown = page.locator('.span[data-span="1"] .tokens').inner_text()
        assert "<script>alert(1)</script><img src=x onerror=alert(2)>␛[31mred␛[0m␇" in shown
        hidden = shown.replace("·", "")  # bytes that are half a letter
        assert "⟨U+202E⟩gnp.exe⟨U+202C⟩" in hidden and "⟨U+2028⟩" in hidden

        assert "שלום" in hidden and "مرحبا" in hidden
        assert (
            page.locator("main script, main img, main b, main iframe").count()
            <= page.locator(".span header b").count()
        )
        # the megabyte is there page by page, and the page stays quick
        assert page.locator(".transcript").get_attribute("data-total") == str(
            2**20 + 2 * len(HOSTILE.encode()) + 3
        )
        assert page.locator(".t").count() <= 20_000
        page.locator('.node[data-span="3"]').click()
        page.locator('.span.chosen[data-span="3"]').wait_for()
        assert page.locator('.span[data-span="3"] .tokens').inner_text() == "end"
        page.locator('.node[data-span="1"]').hover()
        assert "<script>alert(3)</script>" in page.locator("#tip").inner_text()
        page.evaluate("location.hash = '#/steps?run=0&step=1'")
        page.locator('select[name="scope"]').select_option("step")
        page.locator('input[name="words"]').fill("ONERROR=alert")
        page.keyboard.press("Enter")
        page.locator(".hit mark").first.wait_for()
        assert page.locator(".hit mark").first.inner_text() == "onerror=alert"
        # wide text stays inside the window
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_a_span_without_a_tokenizer_is_read_as_its_text(page, go, tmp_path):
    made = episode("t", [span(None, "task", "q"), span(0, "policy", "y" * 30_000)], [leaf(1)])
    with viewing(write_run(tmp_path / "r", {1: [made]}, bytes_tokenizer=False)) as url:
        go(page, url, "#/episode?run=0&step=1&line=0")
        plain = page.locator('.span[data-span="1"] .plain')
        plain.get_by_text("10000 characters more").click()
        until(lambda: plain.inner_text() == "y" * 30_000)
        assert page.locator(".t").nth(1).inner_text().strip() == str(ord("y"))
        assert "no checkpoint yet" in page.locator(".walk .note").inner_text()


@pytest.mark.slow
def test_a_line_that_is_no_episode_is_shown_and_the_page_goes_on(page, go, tmp_path):
    folder = write_run(tmp_path / "r")
    path = write_step(folder, 1, [episode("t", [span(None, "task", "q")], [])])
    path.write_text("{broken\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    with viewing(folder) as url:
        go(page, url, "#/steps?run=0&step=1")
        until(lambda: "not an episode" in page.locator(".list .row .status").first.inner_text())
        page.locator(".list .row").nth(1).click()
        page.get_by_text("no attempt was finished").wait_for()


@pytest.mark.slow
def test_the_page_fits_a_phone_and_both_colour_schemes(chromium, both):
    for scheme, is_light in (("light", True), ("dark", False)):
        context = chromium.new_context(
            viewport={"width": 390, "height": 780}, color_scheme=scheme, has_touch=True
        )
        page = context.new_page()
        page.goto(both)
        page.locator(".chart canvas").first.wait_for()
        for view in ("#/curves", "#/steps?run=0&step=1", "#/episode?run=0&step=1&line=0"):
            page.evaluate("view => { location.hash = view }", view)
            page.locator(".chart, .list .row, .t").first.wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
        page_colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", page_colour)[:3])) > 380) is is_light
        context.close()

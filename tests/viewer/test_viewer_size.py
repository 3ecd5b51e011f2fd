"""20,000 episodes of 5,000 tokens in one step: the table scrolls, and an episode opens."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import pytest

from tests.viewer.conftest import viewing
from tests.viewer.folders import episode, leaf, span, until, write_run

EPISODES, TOKENS, SAID = 20_000, 5_000, 1_000

SCROLL = """async () => {
    const box = document.querySelector(".list");
    const times = [];
    let last = performance.now();
    for (let i = 0; i < 150; i++) {
        box.scrollTop += i % 10 === 9 ? 20000 : 700;  // by the wheel, and by the bar
        await new Promise(requestAnimationFrame);
        const now = performance.now();
        times.push(now - last);
        last = now;
    }
    return times;
}"""


@pytest.fixture
def large(tmp_path: Path):
    """A file of 20,000 lines, each the same 5,000 tokens with a task and a reward of its own."""
    result = "r" * (TOKENS - SAID - 4)  # a long search result, as agents read them
    spans = [span(None, "task", "2+3="), span(0, "env", result), span(1, "policy", "p" * SAID)]
    line = json.dumps(episode("@task", spans, [leaf(2, 0.125)])) + "\n"
    before, _, rest = line.partition("@task")
    middle, _, after = rest.partition("0.125")
    folder = write_run(tmp_path / "large", {})
    path = folder / "episodes" / "step_000001.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for i in range(EPISODES):
            file.write(f"{before}task-{i}{middle}{i / EPISODES}{after}")
    yield folder
    path.unlink()  # most of a gigabyte: pytest keeps the folders of three runs


@pytest.mark.slow
def test_twenty_thousand_episodes_of_five_thousand_tokens_stay_smooth(page, go, large):
    with viewing(large) as url:
        begun = time.monotonic()
        go(page, url, "#/steps?run=0&step=1")
        page.locator(".list .row .line").first.wait_for()
        first = time.monotonic() - begun
        assert first < 10, f"the first rows came after {first:.1f} s"
        note = page.locator("main > .note")
        until(lambda: note.inner_text() == "20000 of 20000 tasks", seconds=60)
        times = page.evaluate(SCROLL)
        median = statistics.median(times)
        print(f"first rows {first:.2f} s, whole index {time.monotonic() - begun:.1f} s, ", end="")
        print(f"frames: median {median:.1f} ms, longest {max(times):.0f} ms")
        assert median < 100
        assert page.locator(".list .row").count() < 60  # only what is in view exists
        # the largest reward is on top, and the last row is the last
        page.locator('[data-sort="reward"]').click()
        until(lambda: page.locator('.list .row[data-index="0"] .line').inner_text() == "19999")
        page.locator(".list").focus()
        page.keyboard.press("End")
        last = page.locator('.list .row[data-index="19999"] .line')
        until(lambda: last.count() and last.inner_text() == "0")
        begun = time.monotonic()
        last.click()
        page.locator(".t").first.wait_for()
        assert time.monotonic() - begun < 5
        text = page.locator(".transcript")
        assert text.get_attribute("data-total") == str(TOKENS)

        def everything() -> bool:
            text.evaluate("e => { e.scrollTop = e.scrollHeight }")
            return page.locator(".t").count() == TOKENS

        until(everything)

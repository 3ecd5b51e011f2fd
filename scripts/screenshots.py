"""The pictures of docs/viewing.md, taken anew: `graft view` in a headless Chromium.

    python scripts/screenshots.py runs/calm runs/hot --forked runs/arpo

The first run learns, the second falls ill and has raised an alarm about its reward; in the third attempts
fork. docs/viewing.md has the commands that make them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SIZE = {"width": 1280, "height": 800}
TALL = 1330
"""Pixels of a first page, down to its attempts."""
LARGEST = 200_000
"""Bytes of one picture."""
STRONGEST = """() => {
    const alpha = (e) => Number((e.style.backgroundColor.match(/[\\d.]+/g) ?? [])[3] ?? 0);
    const all = [...document.querySelectorAll(".span.policy .t")];
    return all.reduce((a, b) => (alpha(b) > alpha(a) ? b : a)).dataset.i;
}"""
"""The place of the policy's token with the strongest colour."""


@contextmanager
def viewing(*runs: Path) -> Iterator[str]:
    """`graft view` in a process of its own; gives its address."""
    command = [sys.executable, "-m", "graft", "view", *map(str, runs), "--no-browser", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise SystemExit("graft view did not start; its message is above")
            yield json.loads(line)["url"]
        finally:
            process.terminate()


@contextmanager
def browsing() -> Iterator[Callable[[], Any]]:
    """Gives fresh pages of the size of a picture, in light colours."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        raise SystemExit("no Chromium on this machine; scripts/browser.sh installs one")
    with sync_playwright() as playwright:
        # pages of our own on 127.0.0.1; Chromium's sandbox refuses to start for root
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield lambda: browser.new_page(viewport=SIZE, color_scheme="light")
        browser.close()


class Camera:
    """Takes pictures of one page into one folder."""

    def __init__(self, page: Any, url: str, out: Path) -> None:
        self.page, self.out = page, out
        page.goto(url)

    def go(self, view: str, awaited: str) -> None:
        self.page.wait_for_selector(".run")
        self.page.evaluate("view => { location.hash = view }", view)
        self.page.wait_for_selector(awaited)

    def take(self, name: str, height: int = SIZE["height"]) -> None:
        path = self.out / f"viewing-{name}.png"
        self.page.wait_for_timeout(300)
        self.page.screenshot(
            path=path, clip={"x": 0, "y": 0, "width": SIZE["width"], "height": height}
        )
        size = path.stat().st_size
        print(f"{path}  {size:,} bytes")
        if size > LARGEST:
            raise SystemExit(f"{path} is larger than {LARGEST:,} bytes; show less")

    def bottom(self, of: str) -> int:
        """Where the last of these ends, and a margin."""
        box = self.page.locator(of).last.bounding_box()
        return min(int(box["y"] + box["height"]) + 12, SIZE["height"])


def pictures_of_an_alarm(camera: Camera, step: int) -> None:
    """From the curves down to one token: run 0 learns, run 1 raised an alarm in this step."""
    page = camera.page
    camera.go("#/curves", '.chart[data-metric="entropy"] canvas[data-points]')
    page.wait_for_timeout(1000)  # the points come after the canvas
    point(page, "reward", step)
    camera.take("curves")
    page.mouse.move(0, 0)

    page.locator(".picker summary").click()
    page.locator(".picker").get_by_text("none", exact=True).click()
    for metric in ("reward", "entropy", "learning_rate"):
        page.locator(f'.picker input[value="{metric}"]').check()
    page.locator(".picker summary").click()
    page.locator('.chart[data-metric="entropy"] .help').click()
    page.wait_for_selector('.chart[data-metric="learning_rate"] canvas[data-points]')
    camera.take("explained", camera.bottom('.chart[data-metric="entropy"]'))

    camera.go(
        f"#/steps?run=1&step={step}&sort=reward&order=rising", ".list .row.active, .list .row"
    )
    camera.take("step", camera.bottom(".list .row"))
    page.locator(".list .row").first.click()
    page.wait_for_selector(".transcript .t")
    page.locator('select[name="colour"]').select_option("entropy")
    page.locator(f'.span.policy .t[data-i="{page.evaluate(STRONGEST)}"]').hover()
    camera.take("episode")
    page.mouse.move(0, 0)
    page.locator('select[name="with"]').select_option(index=1)
    beside = page.locator(".pane").nth(1)
    beside.locator(".transcript .t").first.wait_for()
    attempts = beside.locator('select[name="leaf"]')
    good = attempts.locator("option").filter(has_text="reward 1").first
    attempts.select_option(good.get_attribute("value"))
    camera.take("compare")


def point(page: Any, metric: str, step: int) -> None:
    """At a chart's place of a step, low enough that the tip does not hide the curves."""
    canvas = page.locator(f'.chart[data-metric="{metric}"] canvas')
    box = canvas.bounding_box()
    for x in range(int(box["width"])):
        page.mouse.move(box["x"] + x, box["y"] + box["height"] - 4)
        heading = page.locator("#tip .heading")
        if heading.count() and heading.inner_text() == f"step {step}":
            return


def picture_of_a_fork(camera: Camera) -> None:
    """The last step's task with the widest spread of rewards: some branches succeed and some do not."""
    camera.go("#/steps?run=0&sort=spread&order=falling", ".list .row")
    camera.page.locator(".list .row").first.click()
    camera.page.wait_for_selector(".tree .fork.entropy")
    camera.page.locator(".tree .leaf.good").first.click()
    camera.page.wait_for_selector(".transcript .t")
    camera.page.mouse.move(0, 0)
    camera.take("tree")


def picture_of_a_report(page: Any, run: Path, out: Path) -> None:
    command = [sys.executable, "-m", "graft", "report", str(run), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    camera = Camera(page, Path(report["report"]).resolve().as_uri(), out)
    page.set_viewport_size({**SIZE, "height": TALL})
    page.locator(".attempt").nth(1).wait_for()
    camera.take("report", TALL)


def reward_alarm(run: Path) -> int:
    """The step in which a run raised the alarm that its reward falls."""
    lines = (run / "alarms.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [alarm["step"] for alarm in map(json.loads, lines) if alarm["metric"] == "reward"]
    if not steps:
        raise SystemExit(f"{run} raised no alarm about its reward: it is not sick enough to show")
    return steps[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("learns", type=Path)
    parser.add_argument("sick", type=Path)
    parser.add_argument("--forked", type=Path, help="a run with the branch arpo or aepo")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    given = parser.parse_args()
    step = reward_alarm(given.sick)
    with browsing() as new_page:
        with viewing(given.learns, given.sick) as url:
            pictures_of_an_alarm(Camera(new_page(), url, given.out), step)
        picture_of_a_report(new_page(), given.learns, given.out)
        if given.forked:
            with viewing(given.forked) as url:
                picture_of_a_fork(Camera(new_page(), url, given.out))


if __name__ == "__main__":
    main()

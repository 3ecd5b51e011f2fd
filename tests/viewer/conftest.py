"""Run folders, a server that shows them, and a browser that opens its page."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

COMMAND = "import typer; from graft.commands.view import view; typer.run(view)"
SETTINGS = (
    "model.shape.width=32",
    "model.shape.layers=1",
    "model.shape.heads=2",
    "model.shape.kv_heads=2",
    "model.shape.ff=32",
    "sft.batch=8",
    "rollout.tasks=4",
    "rollout.samples=4",
    "train.steps=3",
    "train.warmup=1",
    "run.eval_tasks=4",
    "run.trackers=[]",
)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two short quickstart runs on the same tasks, one with a longer warm-up."""
    from tests.training import train_recipe

    folder = tmp_path_factory.mktemp("runs")
    for name, steps in (("short", 2), ("long", 6)):
        named = (f"run.dir={folder}", f"run.name={name}", f"sft.steps={steps}")
        train_recipe("quickstart", *SETTINGS, *named)
    return folder / "short", folder / "long"


@contextmanager
def viewing(*folders: Path) -> Iterator[str]:
    """`graft view` in a process of its own; gives the address it printed."""
    named = [str(folder) for folder in folders]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *named, "--no-browser", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], 60)
        assert ready, "graft view printed nothing for a minute"
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        try:
            process.wait(10)
        finally:
            process.kill()
            process.stdout.close()


@pytest.fixture(scope="session")
def both(runs: tuple[Path, Path]) -> Iterator[str]:
    """The address of a page with the two quickstart runs."""
    with viewing(*runs) as url:
        yield url


# not for the session: while Playwright is open the thread has a running event loop, which other tests start
@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def watched_page(chromium: Any, is_allowed: Callable[[str], bool]) -> Iterator[Any]:
    """A page of 1280 x 800 that raises no error and requests only addresses that are allowed."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    context.set_default_timeout(60_000)  # of a loaded machine
    page = context.new_page()
    requested: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    page.on("dialog", lambda dialog: errors.append(f"dialog: {dialog.message}"))
    yield page
    context.close()
    outside = [url for url in requested if urlsplit(url).scheme not in ("blob", "data")]
    assert requested and [url for url in outside if not is_allowed(url)] == []
    gone = "ERR_CONNECTION_REFUSED"  # a server that a test has ended
    assert [error for error in errors if gone not in error] == []


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """A page that may only speak to 127.0.0.1."""
    with watched_page(chromium, lambda url: urlsplit(url).hostname == "127.0.0.1") as page:
        yield page


@pytest.fixture
def go() -> Callable[[Any, str, str], None]:
    """Open a view: go(page, url, "#/steps?run=0")."""

    def open_view(page: Any, url: str, view: str = "#/curves") -> None:
        page.goto(url)  # the token becomes a cookie
        page.wait_for_selector(".run")
        page.evaluate("view => { location.hash = view }", view)

    return open_view

"""The pages of the wiki game: what a source of pages offers, and a file of them as one.

A page is plain data, so that a game can be saved with it:

    {"title": "Moon", "summary": "The Moon is ...", "links": ["Earth", "Gravity", "Tide"]}
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from graft.data.errors import DataError
from graft.data.rows import read_rows

Page = dict[str, Any]

BUNDLED = Path(__file__).parents[1] / "data" / "wiki.jsonl"
MAX_DRAWS = 50
"""Pages drawn until one fits."""


class WikiError(RuntimeError):
    """A wiki server cannot be reached, or does not answer as its protocol says."""


class LocalWiki:
    """Pages from a jsonl (or json, parquet) file with the columns title, summary, links."""

    def __init__(self, path: str | Path = BUNDLED) -> None:
        self.pages = read_pages(str(path))
        self.with_links = [title for title, page in self.pages.items() if page["links"]]

    def page(self, title: str) -> Page | None:
        return self.pages.get(title)

    def draw(self, rng: random.Random) -> Page:
        """A page with links."""
        return self.pages[rng.choice(self.with_links)]

    def distances(self, start: str, max_clicks: int) -> dict[str, str | None]:
        """Every page within `max_clicks` of `start`, with the page before it on a shortest path."""
        before: dict[str, str | None] = {start: None}
        edge = [start]
        for _ in range(max_clicks):
            further: list[str] = []
            for title in edge:
                for link in self.pages[title]["links"]:
                    if link not in before:
                        before[link] = title
                        further.append(link)
            if not further:
                break
            edge = further
        return before

    def path(self, start: str, target: str, max_clicks: int) -> list[str] | None:
        """A shortest path, both ends included; None if it takes more than `max_clicks`."""
        before = self.distances(start, max_clicks)
        return trail(before, target) if target in before else None


def trail(before: Mapping[str, str | None], title: str) -> list[str]:
    """The path that ends at `title`: {"A": None, "B": "A"}, "B" -> ["A", "B"]."""
    path = [title]
    while (previous := before[path[-1]]) is not None:
        path.append(previous)
    return path[::-1]


@cache
def read_pages(path: str) -> dict[str, Page]:
    """Title -> page, read once and shared by all games, which do not change it."""
    pages: dict[str, Page] = {}
    for number, row in enumerate(read_rows(path), 1):
        if not isinstance(row, dict) or not {"title", "summary", "links"} <= row.keys():
            raise DataError(f"{path}, row {number}: needs the columns title, summary and links")
        pages[row["title"]] = {name: row[name] for name in ("title", "summary", "links")}
    for title, page in pages.items():
        if unknown := [link for link in page["links"] if link not in pages]:
            raise DataError(f"{path}: page {title!r} links to {unknown[0]!r}, which has no row")
    if sum(bool(page["links"]) for page in pages.values()) < 2:
        raise DataError(f"{path}: a game needs at least two pages with links")
    return pages

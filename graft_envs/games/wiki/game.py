"""The wiki game: from one page to another by clicking links."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from graft.registry import resolve
from graft.types import Turn
from graft_envs.games.base import Game, echo, last_box
from graft_envs.games.wiki.pages import MAX_DRAWS, LocalWiki, Page, WikiError, trail
from graft_envs.games.wiki.servers import Kiwix, MediaWiki, ServedWiki

BACKENDS = {"local": LocalWiki, "mw": MediaWiki, "kiwix": Kiwix}
BACK = "<PREV_PAGE>"
SUCCESS, STEP, INVALID, FAILURE = 1.0, -0.05, -0.2, 0.0
MAX_HINT = 60  # characters of a wrong title that are looked for among the links
VARIANTS = {
    "noregrets": "You cannot go back. A page without links ends the game.",
    "eidetic": "Any link you have seen so far may be followed. A page without links ends the game.",
    "oneback": f"\\boxed{{{BACK}}} goes back to the page before, but never twice in a row. A page "
    "without links sends you back and costs one more turn.",
    "freenav": f"\\boxed{{{BACK}}} goes back to the page before. A page without links sends you "
    "back and costs one more turn.",
}
UNITS: dict[str, Callable[[str, int], str]] = {
    "characters": lambda text, length: text[:length],
    "words": lambda text, length: " ".join(text.split()[:length]),
    "sentences": lambda text, length: " ".join(re.split(r"(?<=[.!?])\s+", text)[:length]),
}


class WikiGame(Game):
    """1.0 for the target page; every other click -0.05, a title that is no link -0.2.

    A text without a boxed title: -0.2, and the game goes on. The last turn pays 0 unless it reaches
    the target; a page without links 0 where it ends the game, -0.10 where it sends the player back.

    Pages come from `backend`: "local" (a bundled encyclopaedia of 124 pages, or the file `wiki`),
    "mw" (a MediaWiki) or "kiwix" (a Kiwix server), the last two with `trawler_kwargs`. A local
    target can always be reached in time; `answer` is a shortest path to it, ends included.
    """

    pattern = re.compile(r"\\boxed\{([^{}]{1,300})\}")
    shared = ("wiki",)
    saved = (*Game.saved, "current", "target", "history", "seen", "has_gone_back")
    format_error = INVALID

    def __init__(
        self,
        *,
        max_turns: int = 30,
        backend: str = "local",
        variant: str = "noregrets",
        page_summary_length: tuple[int, str] | Sequence[Any] = (100, "characters"),
        wiki: str | Path | None = None,
        trawler_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if max_turns is None:  # other games draw a number for None
            raise ValueError("max_turns=None: must be a number, 1 or more")
        super().__init__(max_turns)
        if variant not in VARIANTS:
            raise ValueError(f"variant={variant!r}: must be one of {', '.join(VARIANTS)}")
        match page_summary_length:
            case [int(length), str(unit)] if unit in UNITS and length >= 1:
                self.length, self.unit = length, unit
            case _:
                raise ValueError(
                    f"{page_summary_length=}: must be (number, unit) with a number of 1 or more and one "
                    f"of the units {', '.join(UNITS)}"
                )
        if wiki is not None and backend != "local":
            raise ValueError(f"wiki={str(wiki)!r} is a file for backend='local', not {backend!r}")
        if trawler_kwargs and backend == "local":
            raise ValueError("trawler_kwargs are for backends mw and kiwix; a local file is wiki=")
        settings = dict(trawler_kwargs or {}) if wiki is None else {"path": wiki}
        self.wiki: LocalWiki | ServedWiki = resolve(backend, BACKENDS, "wiki backend")(**settings)
        self.blocking = not isinstance(self.wiki, LocalWiki)
        self.variant = variant
        self.current: Page = {"title": "", "summary": "", "links": []}
        self.target = self.current
        self.history: list[str] = []  # titles from the start to the page before the current one
        self.seen: list[str] = []  # links of all visited pages, where the variant allows them
        self.has_gone_back = False

    def draw_instance(self) -> None:
        start = self.wiki.draw(self.rng)
        if isinstance(self.wiki, LocalWiki):
            self.answer = self.reachable_path(self.wiki, start)
            self.target = self.wiki.pages[self.answer[-1]]
        else:
            self.target = self.other_page(start)
            self.answer = [start["title"], self.target["title"]]
        self.history, self.seen, self.has_gone_back = [], [], False
        self.arrive(start)

    def other_page(self, start: Page) -> Page:
        for _ in range(MAX_DRAWS):
            page = self.wiki.draw(self.rng)
            if page["title"] != start["title"]:
                return page
        raise WikiError(f"{MAX_DRAWS} draws all gave the page {start['title']!r}; a game needs two")

    def reachable_path(self, wiki: LocalWiki, start: Page) -> list[str]:
        before = wiki.distances(start["title"], self.max_turns or 1)
        able = [t for t in before if t != start["title"] and wiki.pages[t]["links"]]
        if not able:
            raise ValueError(
                f"page {start['title']!r}: no page with links is within {self.max_turns} clicks; "
                "the wiki needs more links"
            )
        return trail(before, self.rng.choice(sorted(able)))

    def arrive(self, page: Page) -> None:
        self.current = page
        if self.variant == "eidetic":
            new = set(page["links"]).difference(self.seen)
            self.seen += [link for link in page["links"] if link in new]

    def links(self) -> list[str]:
        return self.seen if self.variant == "eidetic" else self.current["links"]

    def summary(self, page: Page) -> str:
        short = UNITS[self.unit](page["summary"], self.length)
        return short if short == page["summary"] else f"{short}..."

    def rules(self) -> str:
        return (
            f"Get from the wiki page {self.current['title']!r} to the page "
            f"{self.target['title']!r} by following links. {VARIANTS[self.variant]}\n"
            f"You have {self.max_turns} turns. Write the exact title of a link as \\boxed{{title}}, "
            f"for example {self.boxed(self.links()[0])}. What happened so far is shown to you.\n"
            f"About the target: {self.summary(self.target)}"
        )

    def board(self) -> str:
        links = "\n".join([f"- {self.boxed(link)}" for link in self.links()])
        return (
            f"You are on the page {self.current['title']!r}; the target is "
            f"{self.target['title']!r}.\n{self.summary(self.current)}\nLinks:\n{links}\n"
            "Your next page:"
        )

    def boxed(self, title: str) -> str:
        return f"\\boxed{{{title}}}"

    def step(self, action: str) -> Turn:
        # overridden: here a format error does not end the game, and a dead end costs two turns
        if self.is_over:
            raise RuntimeError(f"env {self.env_id!r}: no game is running; call reset() first")
        self.turns += 1
        found = last_box(self.pattern, action)
        title = found[1].strip() if found else ""
        if not title:
            why = "no page title in the required form was found."
            return self.go_on(why, self.format_error, limit_ends=False)
        if title == BACK:
            return self.go_back()
        return self.go_to(title)

    def go_to(self, title: str) -> Turn:
        if title not in self.links():
            return self.go_on(self.no_such_link(title), INVALID)
        page = self.wiki.page(title)
        if page is None:
            return self.go_on(f"The page {title!r} does not exist.", INVALID)
        if page["title"] == self.target["title"]:
            self.current, self.is_over = page, True
            return Turn(
                f"Turn {self.turns}: {page['title']}. The target is reached.", SUCCESS, True
            )
        if page["links"]:
            self.history.append(self.current["title"])
            self.has_gone_back = False
            self.arrive(page)
            return self.go_on(f"{page['title']}.", STEP)
        if self.variant in ("noregrets", "eidetic"):
            self.current, self.is_over = page, True
            text = f"Turn {self.turns}: {page['title']} has no links; the game is over."
            return Turn(text, FAILURE, True)
        self.turns += 1
        self.has_gone_back = True
        why = f"{page['title']} has no links: back to {self.current['title']!r}, for one more turn."
        return self.go_on(why, 2 * STEP, limit_ends=False)

    def go_back(self) -> Turn:
        if self.variant in ("noregrets", "eidetic"):
            return self.go_on("Going back is not allowed.", INVALID, limit_ends=False)
        if not self.history:
            return self.go_on("There is no page to go back to.", INVALID, limit_ends=False)
        if self.variant == "oneback" and self.has_gone_back:
            why = "Going back twice in a row is not allowed."
            return self.go_on(why, INVALID, limit_ends=False)
        page = self.wiki.page(self.history[-1])
        if page is None:
            return self.go_on(f"The page {self.history[-1]!r} is gone.", INVALID, limit_ends=False)
        self.history.pop()
        self.has_gone_back = True
        self.arrive(page)
        return self.go_on(f"Back to {page['title']!r}.", STEP, limit_ends=False)

    def no_such_link(self, title: str) -> str:
        part = title.lower()
        near = None
        if len(part) <= MAX_HINT:
            near = next((link for link in self.links() if part in link.lower()), None)
        meant = f" Did you mean {self.boxed(near)}?" if near else ""
        return f"{echo(title)!r} is not among the links.{meant}"

    def go_on(self, feedback: str, reward: float, *, limit_ends: bool = True) -> Turn:
        """The Turn of a move that does not reach the target.

        If it was the last one, a click (`limit_ends`) pays nothing and terminates the game; anything
        else keeps its reward and is only truncated.
        """
        text = f"Turn {self.turns}: {feedback}"
        if self.turns >= (self.max_turns or 1):
            self.is_over = True
            text = f"{text}\nAll {self.max_turns} turns are used up; the game is over."
            return Turn(text, FAILURE if limit_ends else reward, limit_ends, True)
        board = self.board()
        return Turn(f"{text}\n{board}", reward, False, False, {"suffix": board})

    def teacher_moves(self, rng: random.Random) -> Iterator[str]:
        """A shortest path over the links of a local wiki; those of a served one are not known in advance."""
        if not isinstance(self.wiki, LocalWiki):
            raise NotImplementedError(
                "WikiGame: no teacher for a served wiki, it would have to fetch page after page "
                "until it finds the target; with backend='local' there is one"
            )
        title, turns_left = self.current["title"], (self.max_turns or 1) - self.turns
        path = self.wiki.path(title, self.target["title"], turns_left)
        if path is None:
            raise NotImplementedError(
                f"WikiGame: no path leads from {title!r} to {self.target['title']!r} in the "
                f"{turns_left} turns that are left; call demonstrate() at the start of a game"
            )
        return iter(path[1:])

    def sample_random_action(self) -> str:
        return self.boxed(self.action_rng().choice(self.links() or [BACK]))

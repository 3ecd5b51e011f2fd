"""Wiki pages from a server: a MediaWiki (Wikipedia's software), or a Kiwix server."""

from __future__ import annotations

import json
import random
import time
import urllib.parse
from collections.abc import Mapping
from html.parser import HTMLParser
from string import ascii_lowercase
from typing import Any

from graft.http import HttpClient, HttpFault
from graft_envs.games.wiki.pages import MAX_DRAWS, Page, WikiError

MAX_REDIRECTS = 5
AGENT = "graft wiki game (a reinforcement-learning environment)"


class ServedWiki:
    """What the two servers have in common: retries, a cache, drawing a page.

    A random page of a server's own choice would differ every time. So a few letters are drawn, and
    then one of the titles that begin with them: a seed gives the same game again, as long as the wiki
    does not change.
    """

    def __init__(
        self,
        url: str,
        *,
        query_delay_ms: int = 25,
        max_query_attempts: int = 5,
        query_use_cache: bool = True,
        timeout_s: float = 10.0,
    ) -> None:
        if max_query_attempts < 1:
            raise ValueError(f"max_query_attempts={max_query_attempts}: must be 1 or more")
        self.url = url.rstrip("/")
        self.delay = query_delay_ms / 1000
        self.client = HttpClient(
            timeout=timeout_s,
            retries=max_query_attempts - 1,
            headers={"User-Agent": AGENT},
            first_pause=2 * self.delay,
        )
        self.known: dict[str, Page | None] | None = {} if query_use_cache else None

    def page(self, title: str) -> Page | None:
        """The page of that title, or the one it redirects to; None if there is none."""
        if self.known is None:
            return self.fetch(title)
        if title not in self.known:
            self.known[title] = self.fetch(title)
        return self.known[title]

    def draw(self, rng: random.Random) -> Page:
        for _ in range(MAX_DRAWS):
            start = "".join(rng.choice(ascii_lowercase) for _ in range(2))
            titles = self.titles_from(start)
            page = self.page(rng.choice(titles)) if titles else None
            if page is not None and page["links"] and "disambiguation" not in page["title"].lower():
                return page
        raise WikiError(f"{self.url}: no page with links in {MAX_DRAWS} draws; is it a full wiki?")

    def fetch(self, title: str) -> Page | None:
        raise NotImplementedError

    def titles_from(self, start: str) -> list[str]:
        raise NotImplementedError

    def get(self, path: str, query: Mapping[str, str | int] | None = None) -> str | None:
        """The text of the response, None for "not found"; retries after other faults."""
        address = self.url + path + (f"?{urllib.parse.urlencode(query)}" if query else "")
        time.sleep(self.delay)  # servers limit rates
        try:
            return self.client.request(address, None, lambda body: body.decode("utf-8", "replace"))
        except HttpFault as fault:
            if fault.code == 404:
                return None
            raise WikiError(
                f"{address} {fault} (tried {fault.attempts} times); is the server running, and is "
                "its address right? Without a server: backend='local'"
            ) from fault


class MediaWiki(ServedWiki):
    """A MediaWiki API; `url` is the address of api.php."""

    def __init__(self, url: str = "https://en.wikipedia.org/w/api.php", **settings: Any) -> None:
        super().__init__(url, **settings)

    def ask(self, **query: str | int) -> dict[str, Any]:
        text = self.get("", {"action": "query", "format": "json", "formatversion": 2, **query})
        try:
            answer = json.loads(text or "")
        except ValueError as error:
            raise WikiError(f"{self.url}: not a MediaWiki API (no JSON in the answer)") from error
        if not isinstance(answer, dict) or "error" in answer:
            raise WikiError(f"{self.url}: the API refused: {str(answer)[:200]}")
        return answer

    def fetch(self, title: str) -> Page | None:
        what = {
            "prop": "extracts|links|pageprops",
            "titles": title,
            "redirects": 1,
            "exintro": 1,
            "explaintext": 1,
            "ppprop": "disambiguation",
            "plnamespace": 0,
            "pllimit": "max",
        }
        answer = self.ask(**what)
        found: dict[str, Any] = (answer.get("query", {}).get("pages") or [{"missing": True}])[0]
        if found.get("missing") or "disambiguation" in found.get("pageprops", {}):
            return None  # a disambiguation page links to unrelated pages
        links = [link["title"] for link in found.get("links", [])]
        while "plcontinue" in answer.get("continue", {}):  # links come in portions
            answer = self.ask(**what, **answer["continue"])
            links += [link["title"] for link in answer["query"]["pages"][0].get("links", [])]
        return {"title": found["title"], "summary": found.get("extract", ""), "links": links}

    def titles_from(self, start: str) -> list[str]:
        answer = self.ask(
            list="allpages", apfrom=start.capitalize(), aplimit=20, apnamespace=0,
            apfilterredir="nonredirects",
        )  # fmt: skip
        return [page["title"] for page in answer.get("query", {}).get("allpages", [])]


class Kiwix(ServedWiki):
    """A Kiwix server (kiwix-serve) with a Wikipedia ZIM file; `zimfile` is its name there."""

    def __init__(
        self,
        url: str = "http://localhost:8080",
        *,
        zimfile: str = "wikipedia_en_simple_all_nopic_2025-09",
        **settings: Any,
    ) -> None:
        super().__init__(url, **settings)
        self.zimfile = zimfile

    def fetch(self, title: str) -> Page | None:
        for _ in range(MAX_REDIRECTS):
            path = urllib.parse.quote(title.replace(" ", "_"))
            text = self.get(f"/raw/{self.zimfile}/content/{path}")
            if text is None:
                return None
            article = Article()
            article.feed(text)
            if article.moved_to is None:
                if "may refer to:" in article.summary:  # a disambiguation page
                    return None
                name = article.title or title
                links = [link for link in article.links if link != name]
                return {"title": name, "summary": article.summary, "links": links}
            title = article.moved_to
        return None

    def titles_from(self, start: str) -> list[str]:
        text = self.get("/suggest", {"content": self.zimfile, "term": start, "count": 20})
        try:
            hints = json.loads(text or "[]")
        except ValueError as error:
            raise WikiError(f"{self.url}: not a Kiwix server (no JSON in /suggest)") from error
        return [title_of(hint["path"]) for hint in hints if hint.get("kind") == "path"]


class Article(HTMLParser):
    """Title, text of the paragraphs and inner links of a page's HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.title, self.summary = "", ""
        self.links: list[str] = []
        self.moved_to: str | None = None
        self.inside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "meta" and (given.get("http-equiv") or "").lower() == "refresh":
            self.moved_to = title_of((given.get("content") or "").partition("=")[2])
        elif tag == "a" and (link := title_of(given.get("href") or "")) and link not in self.links:
            self.links.append(link)
        elif tag in ("h1", "p"):
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.inside:
            self.inside.remove(tag)

    def handle_data(self, data: str) -> None:
        if "h1" in self.inside:
            self.title = (self.title + data).strip()
        elif "p" in self.inside:
            self.summary = " ".join(f"{self.summary}{data}".split()) + " " * data[-1:].isspace()


def title_of(link: str) -> str:
    """ "../Solar_System#Planets" -> "Solar System"; "" for links out of the wiki."""
    address = urllib.parse.urlsplit(link)
    if address.scheme or address.netloc:
        return ""
    path = address.path.replace("../", "").removeprefix("./").removeprefix("A/")
    return urllib.parse.unquote(path).replace("_", " ").strip()

"""The readable text of an HTML page.

<title>Lima</title><h1>Lima</h1><p>Capital of <b>Peru</b>.<ul><li>coast</ul><script>x</script>
Lima

Lima
Capital of Peru.
- coast
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

HIDDEN = {"script", "style", "noscript", "template", "svg", "head", "iframe", "canvas", "select"}
"""Elements whose content is not shown; the title is read separately."""
BLOCKS = {
    *("address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "figcaption"),
    *("figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main"),
    *("nav", "ol", "p", "pre", "section", "table", "tbody", "thead", "tr", "ul"),
}
CELLS = {"td", "th"}
_META = re.compile(rb"""<meta[^>]+charset\s*=\s*["']?\s*([A-Za-z0-9_.:-]+)""", re.IGNORECASE)


def html_text(markup: str) -> str:
    """Title, blank line, text: one line per block element, cells of a table separated by " | "."""
    parser = _Reader()
    parser.feed(markup)
    parser.close()
    lines = (" ".join(line.split()) for line in "".join(parser.pieces).split("\n"))
    text = "\n".join(line.removeprefix("| ") for line in lines if line not in ("", "-", "|"))
    title = " ".join("".join(parser.title).split())
    return f"{title}\n\n{text}" if title and text else title or text


def decoded(body: bytes, charset: str | None) -> str:
    """Bytes of a page as text, by the charset of the answer, of the page's own mark, or UTF-8."""
    named = _META.search(body[:4096])
    for name in (charset, named and named[1].decode("ascii")):
        try:
            return body.decode(name, "replace") if name else body.decode("utf-8")
        except (LookupError, UnicodeDecodeError):
            continue
    return body.decode("utf-8", "replace")


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.title: list[str] = []
        self.hidden: list[str] = []  # open elements that hide their content, outermost first
        self.is_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title" and "svg" not in self.hidden:
            self.is_title = True
        elif tag == "body":  # closes a head that was never closed
            self.hidden.clear()
        elif tag in HIDDEN:
            self.hidden.append(tag)
        elif not self.hidden and tag in BLOCKS:
            self.pieces.append("\n- " if tag == "li" else "\n")
        elif not self.hidden and tag in CELLS:
            self.pieces.append(" | ")

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self.is_title = False
        elif tag in self.hidden:
            del self.hidden[self.hidden.index(tag) :]
        elif not self.hidden and tag in BLOCKS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if self.is_title:
            self.title.append(data)
        elif not self.hidden:
            # line breaks in the markup are blanks
            self.pieces.append(data.replace("\n", " ").replace("\r", " "))

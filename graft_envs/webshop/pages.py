"""The pages of the shop as lists of parts, and three ways to write them.

html       <button>Buy Now</button>
text       Back to Search [SEP] Price: $24.99 [SEP] Buy Now
text_rich  [button] Buy Now [button_]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import NamedTuple

from graft_envs.webshop.shop import Product

PER_PAGE = 10
SEARCH, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
DETAILS = ("Description", "Features", "Reviews")
MAX_QUERY = 200  # characters of a query that the results page repeats


class PagePart(NamedTuple):
    kind: str
    """ "text" is not clickable; "button", "product" and "option" are."""
    text: str
    name: str = ""
    """Of an option: its name, such as "color"."""
    is_on: bool = False
    """An option that is chosen, a product that was visited."""


Page = list[PagePart]


def text(*lines: str) -> Page:
    return [PagePart("text", line) for line in lines]


def button(*labels: str) -> Page:
    return [PagePart("button", label) for label in labels]


def search_page() -> Page:
    return text("WebShop", "Search for products.")


def results_page(
    hits: Sequence[Product], query: str, number: int, visited: Collection[str]
) -> Page:
    """Ten hits; `number` counts pages from 1."""
    shown = hits[(number - 1) * PER_PAGE : number * PER_PAGE]
    page = button(SEARCH)
    page += text(f"Search: {query[:MAX_QUERY]}", f"Page {number} (total results: {len(hits)})")
    if number > 1:
        page += button(PREVIOUS)
    if number * PER_PAGE < len(hits):
        page += button(NEXT)
    for product in shown:
        page.append(PagePart("product", product.asin, is_on=product.asin in visited))
        page += text(product.title, f"${product.price:.2f}")
    return page


def item_page(product: Product, chosen: Mapping[str, str], *, show_attributes: bool) -> Page:
    page = button(SEARCH, PREVIOUS)
    for name, values in product.options.items():
        page += text(name)
        page += [PagePart("option", value, name, chosen.get(name) == value) for value in values]
    page += text(product.title, f"Price: ${product.price:.2f}", f"Rating: {product.rating}")
    page += button(*DETAILS, *(["Attributes"] if show_attributes else []), BUY)
    return page


def detail_page(product: Product, detail: str) -> Page:
    page = button(SEARCH, PREVIOUS)
    if detail == "Description":
        page += text(product.description)
    elif detail == "Features":
        page += text(*product.features)
    elif detail == "Attributes":
        page += text(*product.attributes)
    else:
        page += text(
            *(f"{title} ({stars} stars): {body}" for title, stars, body in product.reviews)
        )
    return page if len(page) > 2 else page + text("Nothing here.")


def clickable(page: Page) -> dict[str, PagePart]:
    """Label in lower case -> part. Of equal labels the first counts, buttons before options."""
    parts = [part for part in page if part.kind != "text"]
    parts.sort(key=lambda part: part.kind == "option")
    labels: dict[str, PagePart] = {}
    for part in parts:
        labels.setdefault(part.text.lower(), part)
    return labels


def as_html(page: Page) -> str:
    lines: list[str] = []
    for part in page:
        shown, on = escape(part.text), part.is_on
        if part.kind == "button":
            lines.append(f"<button>{shown}</button>")
        elif part.kind == "product":
            lines.append(f'<a class="{"product visited" if on else "product"}">{shown}</a>')
        elif part.kind == "option":
            field = f'<input type="radio" name="{escape(part.name)}" value="{shown}"'
            lines.append(f"<label>{field}{' checked' if on else ''}>{shown}</label>")
        else:
            lines.append(f"<p>{shown}</p>")
    body = "\n".join(lines)
    return f"<html>\n<body>\n{body}\n</body>\n</html>"


def as_text(page: Page) -> str:
    return " [SEP] ".join(f"{part.text} (clicked)" if part.is_on else part.text for part in page)


def as_rich_text(page: Page) -> str:
    lines: list[str] = []
    for part in page:
        if part.kind == "text":
            lines.append(part.text)
        elif part.is_on:
            lines.append(f"[clicked button] {part.text} [clicked button_]")
        else:
            lines.append(f"[button] {part.text} [button_]")
    return "\n".join(lines)


RENDERINGS = {"html": as_html, "text": as_text, "text_rich": as_rich_text}

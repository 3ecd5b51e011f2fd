"""Products and shopping instructions, read from WebShop's files or the small bundled set.

A folder holds items_shuffle*.json (products), items_ins_v2*.json (their attributes) and
items_human_ins*.json (instructions); reviews.json is optional.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from graft.data.errors import DataError
from graft.envs.splits import split_of
from graft_envs.text_ranking import TextRanking

BUNDLED = Path(__file__).parent / "data"
MAX_HITS = 50
ASIN_LENGTH = 10
UNKNOWN_PRICE = 100.0
NO_LIMIT = 1_000_000.0


@dataclass(frozen=True)
class Product:
    asin: str
    title: str
    query: str
    """The search that found the product: its kind, in a few words."""
    product_category: str
    """From the general to the special: "Home & Kitchen › Lighting › Desk Lamps"."""
    price: float
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    features: tuple[str, ...]
    description: str
    reviews: tuple[tuple[str, str, str], ...]
    """(title, stars, text) of each."""
    rating: str


@dataclass(frozen=True)
class Goal:
    """An instruction and its requirements."""

    asin: str
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_upper: float


class Shop:
    """All products, the goals of both splits, and the search over them."""

    def __init__(self, products: list[Product], goals: list[Goal]) -> None:
        self.products = {product.asin: product for product in products}
        self.asins = list(self.products)
        self.goals: dict[str, list[Goal]] = {"train": [], "test": []}
        for goal in goals:
            self.goals[split_of(f"{goal.asin} {goal.instruction}")].append(goal)
        self.index = TextRanking([searchable(product) for product in products])

    def search(self, query: str) -> list[str]:
        """The asins of the best products, best first."""
        return [self.asins[number] for number in self.index.search(query, MAX_HITS)]


@cache
def open_shop(folder: str) -> Shop:
    """The shop in `folder`, read once per process."""
    where = Path(folder)
    rows = read(where, "items_shuffle")
    attributes = read(where, "items_ins_v2")
    instructions = read(where, "items_human_ins")
    reviews: dict[str, Any] = {}
    if (where / "reviews.json").is_file():
        reviews = {
            row["asin"]: row for row in json.loads((where / "reviews.json").read_text("utf-8"))
        }
    products: dict[str, Product] = {}
    goals: list[Goal] = []
    at = ""
    try:
        for number, row in enumerate(rows, 1):
            at = f"product {number}"
            if len(row["asin"]) == ASIN_LENGTH:  # WebShop's files contain a few broken ones
                products.setdefault(row["asin"], product_of(row, attributes, reviews))
        for asin, several in instructions.items():
            at = f"instructions of {asin}"
            if asin in products:
                goals += [
                    goal_of(products[asin], g) for g in several if g["instruction_attributes"]
                ]
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder}: {at} cannot be read: {error!r}") from error
    if not goals:
        raise DataError(f"{folder}: no instruction belongs to any of the {len(products)} products")
    return Shop(list(products.values()), goals)


def read(folder: Path, stem: str) -> Any:
    files = sorted(folder.glob(f"{stem}*.json"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise DataError(
            f"{folder} must hold one file {stem}*.json, found {found}; WebShop's data is "
            "axon-rl/webshop on the hub; without data= a small bundled shop is used"
        )
    try:
        return json.loads(files[0].read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{files[0]} is not JSON: {error}") from error


def product_of(row: dict[str, Any], attributes: Any, reviews: Any) -> Product:
    asin = row["asin"]
    features = row["small_description"] or []
    reviewed = reviews.get(asin, {})
    return Product(
        asin=asin,
        title=row["name"],
        query=row["query"].lower().strip(),
        product_category=row["product_category"],
        price=price_of(row.get("pricing")),
        attributes=tuple(attributes.get(asin, {}).get("attributes", ())),
        options={
            name.lower(): tuple(one["value"].strip().replace("/", " | ").lower() for one in values)
            for name, values in (row["customization_options"] or {}).items()
            if values
        },
        features=tuple(features if isinstance(features, list) else [features]),
        description=row["full_description"] or "",
        reviews=tuple(
            (
                str(one.get("title", "")),
                str(one.get("score", one.get("stars", ""))),
                str(one.get("body", one.get("review", ""))),
            )
            for one in reviewed.get("reviews", ())
        ),
        rating=str(reviewed.get("average_rating", "N.A.")),
    )


def price_of(pricing: str | None) -> float:
    """ "$24.99" -> 24.99; of a range the upper end; 100 if none is given, as in WebShop."""
    numbers = re.findall(r"\d+(?:\.\d+)?", (pricing or "").replace(",", ""))
    return max(map(float, numbers[:2]), default=UNKNOWN_PRICE)


def goal_of(product: Product, given: dict[str, Any]) -> Goal:
    """The instruction with a price limit: one of the next multiples of 10 above the price.

    WebShop draws the limit at every start; here the text decides it, so a goal never changes.
    """
    text = given["instruction"].strip().strip(".")
    digest = hashlib.sha256(text.encode()).digest()[0]
    price_upper = 10.0 * (product.price // 10 + 2 + digest % 3)
    if price_upper >= 1000:
        price_upper = NO_LIMIT
    else:
        text += f", and price lower than {price_upper:.2f} dollars"
    wanted = given["instruction_options"]
    options = wanted.values() if isinstance(wanted, dict) else wanted
    return Goal(
        asin=product.asin,
        instruction=text,
        attributes=tuple(given["instruction_attributes"]),
        options=tuple(str(option).lower() for option in options),
        price_upper=price_upper,
    )


def searchable(product: Product) -> str:
    choices = [value for values in product.options.values() for value in values]
    first = product.features[:1]
    return " ".join([product.title, product.description, *first, *choices])

"""A made shop: users, products and orders, all drawn from one seed.

    store = build_store(seed=0)
    store["users"]["mira_holt_4821"]["payment_methods"]     {"gift_card_318": {"source": "gift_card", ...}}
    store["products"]["7301955412"]["variants"]             {"5120...": {"options": {"size": "M"}, ...}}
    store["orders"]["#W4417203"]["status"]                  "pending", "processed", "delivered" or "cancelled"

The fields are those of tau-bench's retail data; names, addresses, prices and orders are our own.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from random import Random
from typing import Any

Record = dict[str, Any]
Store = dict[str, dict[str, Record]]

NUM_USERS = 60
NUM_VARIANTS = (4, 8)
CATALOGUE: dict[str, tuple[int, dict[str, tuple[str, ...]]]] = {
    "Rain Jacket": (85, {"color": ("green", "navy", "red"), "size": ("S", "M", "L", "XL")}),
    "Wool Socks": (14, {"color": ("grey", "brown"), "size": ("S", "M", "L"), "pack": ("2", "4")}),
    "Desk Chair": (190, {"material": ("mesh", "leather", "fabric"), "armrest": ("yes", "no")}),
    "Reading Lamp": (48, {"color": ("white", "black", "brass"), "bulb": ("warm", "cold")}),
    "Hiking Boots": (130, {"size": ("7", "8", "9", "10"), "material": ("leather", "synthetic")}),
    "Water Kettle": (39, {"capacity": ("1L", "1.5L", "2L"), "material": ("steel", "glass")}),
    "Yoga Mat": (32, {"thickness": ("4mm", "6mm", "8mm"), "color": ("blue", "purple", "black")}),
    "Bluetooth Speaker": (75, {"color": ("black", "red", "blue"), "battery": ("10h", "20h")}),
    "Travel Backpack": (95, {"size": ("small", "medium", "large"), "color": ("black", "olive")}),
    "Chess Set": (55, {"material": ("wood", "plastic", "marble"), "board": ("folding", "flat")}),
    "Coffee Grinder": (60, {"power": ("manual", "electric"), "color": ("silver", "black")}),
    "Wall Clock": (36, {"diameter": ("25cm", "30cm", "40cm"), "color": ("white", "oak")}),
}
FIRST = (
    "Mira",
    "Jonas",
    "Lena",
    "Pavel",
    "Amara",
    "Theo",
    "Ines",
    "Rafael",
    "Noor",
    "Klara",
    "Emil",
    "Tova",
)
LAST = ("Holt", "Vance", "Okoye", "Lindt", "Moreau", "Silva", "Brandt", "Yilmaz", "Novak", "Ferris")
STREETS = (
    "Alder Way",
    "Mill Lane",
    "Harbor Street",
    "Quarry Road",
    "Linden Avenue",
    "Station Road",
)
CITIES = (
    ("Portland", "OR", "972"),
    ("Madison", "WI", "537"),
    ("Tucson", "AZ", "857"),
    ("Albany", "NY", "122"),
    ("Raleigh", "NC", "276"),
    ("Boise", "ID", "837"),
)
STATUSES = ("pending",) * 5 + ("delivered",) * 5 + ("processed", "cancelled")


@cache
def build_store(seed: int = 0) -> Store:
    """The shop of a seed; attempts share it and keep their changes apart (`Database`)."""
    rng = Random(f"retail store {seed}")
    products = dict(_product(name, rng) for name in CATALOGUE)
    users: dict[str, Record] = {}
    orders: dict[str, Record] = {}
    while len(users) < NUM_USERS:
        user_id, user = _user(rng)
        if user_id in users:
            continue
        users[user_id] = user
        for _ in range(rng.randint(2, 4)):
            number = f"#W{rng.randint(10**6, 10**7 - 1)}"
            orders[number] = _order(number, user_id, user, products, rng)
            user["orders"].append(number)
    return {"users": users, "products": products, "orders": orders}


def draw_address(rng: Random) -> Record:
    city, state, start = rng.choice(CITIES)
    return {
        "address1": f"{rng.randint(10, 999)} {rng.choice(STREETS)}",
        "address2": f"Suite {rng.randint(100, 999)}" if rng.random() < 0.5 else "",
        "city": city,
        "state": state,
        "country": "USA",
        "zip": f"{start}{rng.randint(10, 99)}",
    }


def _product(name: str, rng: Random) -> tuple[str, Record]:
    price, options = CATALOGUE[name]
    product_id = _digits(rng)
    combos = [dict(zip(options, values, strict=True)) for values in product(*options.values())]
    chosen = rng.sample(combos, min(rng.randint(*NUM_VARIANTS), len(combos)))
    variants = {
        item_id: {
            "item_id": item_id,
            "options": combo,
            "available": rng.random() < 0.8,
            "price": round(price * rng.uniform(0.85, 1.2), 2),
        }
        for item_id, combo in ((_digits(rng), combo) for combo in chosen)
    }
    return product_id, {"name": name, "product_id": product_id, "variants": variants}


def _user(rng: Random) -> tuple[str, Record]:
    first, last, number = rng.choice(FIRST), rng.choice(LAST), rng.randint(1000, 9999)
    methods: dict[str, Record] = {}
    for source in rng.sample(("credit_card", "paypal", "gift_card"), rng.randint(2, 3)):
        method: Record = {"source": source, "id": f"{source}_{rng.randint(1000000, 9999999)}"}
        if source == "credit_card":
            method |= {
                "brand": rng.choice(("visa", "mastercard")),
                "last_four": f"{rng.randint(0, 9999):04d}",
            }
        if source == "gift_card":
            method["balance"] = rng.randint(5, 150)
        methods[method["id"]] = method
    return f"{first}_{last}_{number}".lower(), {
        "name": {"first_name": first, "last_name": last},
        "address": draw_address(rng),
        "email": f"{first}.{last}{number}@example.com".lower(),
        "payment_methods": methods,
        "orders": [],
    }


def _order(
    number: str, user_id: str, user: Record, products: dict[str, Record], rng: Random
) -> Record:
    items: list[Record] = []
    for product_id in rng.sample(sorted(products), rng.randint(1, 3)):
        variants = products[product_id]["variants"]
        variant = variants[rng.choice(sorted(variants))]
        items.append(
            {
                "name": products[product_id]["name"],
                "product_id": product_id,
                "item_id": variant["item_id"],
                "price": variant["price"],
                "options": variant["options"],
            }
        )
    status, total = rng.choice(STATUSES), round(sum(item["price"] for item in items), 2)
    methods = sorted(user["payment_methods"])
    able = [m for m in methods if user["payment_methods"][m]["source"] != "gift_card"] or methods
    shipped = status in ("processed", "delivered")
    return {
        "order_id": number,
        "user_id": user_id,
        "address": dict(user["address"]),
        "items": items,
        "status": status,
        "fulfillments": [
            {"tracking_id": [_digits(rng)], "item_ids": [item["item_id"] for item in items]}
        ]
        if shipped
        else [],
        "payment_history": [
            {"transaction_type": "payment", "amount": total, "payment_method_id": rng.choice(able)}
        ],
    }


def _digits(rng: Random) -> str:
    return str(rng.randint(10**9, 10**10 - 1))

"""What a customer wants: requests with the gold actions and the outputs that the agent must say.

    Request "I want to cancel my order #W4417203."      details "I no longer need it."
            actions [("cancel_pending_order", {"order_id": "#W4417203", "reason": "no longer needed"})]
    Request "What is the tracking number of #W1200981?"  outputs ["8820194417"]
    Request "Please cancel order #W1200981." (delivered) neither: the rules forbid it, and nothing may change

A case is one customer with one to three requests about different orders. It is drawn again where a gold
action is not allowed after those before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from graft.envs.splits import split_of
from graft.tools.errors import is_error
from graft_envs.retail.database import Database
from graft_envs.retail.store import Record, Store, draw_address
from graft_envs.retail.tools import REASONS, Desk

Call = tuple[str, dict[str, Any]]
MAX_TRIES = 1000


@dataclass(slots=True)
class Request:
    """One wish, in the customer's words, and what fulfils it."""

    text: str
    details: str = ""
    """What the customer adds when asked."""
    order_id: str = ""
    product_id: str = ""
    actions: list[Call] = field(default_factory=list[Call])
    outputs: list[str] = field(default_factory=list[str])

    @property
    def is_allowed(self) -> bool:
        return bool(self.actions or self.outputs)


@dataclass(slots=True)
class Case:
    """A customer, how they identify themselves, and their requests."""

    user_id: str
    identity: str
    find: Call
    """The call that finds the user by what they say."""
    requests: list[Request]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Case:
        def call(values: Any) -> Call:
            name, arguments = values
            return name, arguments

        requests = [
            Request(**{**one, "actions": [call(action) for action in one["actions"]]})
            for one in data["requests"]
        ]
        return cls(data["user_id"], data["identity"], call(data["find"]), requests)

    @property
    def actions(self) -> list[Call]:
        return [action for request in self.requests for action in request.actions]

    @property
    def outputs(self) -> list[str]:
        return [output for request in self.requests for output in request.outputs]


def draw_case(rng: Random, store: Store, split: str, max_requests: int) -> Case:
    """A case whose gold actions the rules allow, one after the other."""
    users = [user for user in sorted(store["users"]) if split_of(f"retail user {user}") == split]
    for _ in range(MAX_TRIES):
        user_id, desk = rng.choice(users), Desk(Database(store))
        maker = RequestMaker(rng, desk, user_id)
        requests = [maker.draw() for _ in range(rng.randint(1, max_requests))]
        kept = [one for one in requests if one is not None]
        if kept and any(one.is_allowed for one in kept) and _is_possible(kept, store):
            return Case(user_id, *_identity(rng, user_id, store), kept)
    raise ValueError(f"the store has no possible case for split={split!r} in {MAX_TRIES} draws")


def _is_possible(requests: list[Request], store: Store) -> bool:
    desk = Desk(Database(store))
    calls = [action for request in requests for action in request.actions]
    return not any(is_error(desk.carry_out(*call)) for call in calls)


def _identity(rng: Random, user_id: str, store: Store) -> tuple[str, Call]:
    user = store["users"][user_id]
    first, last = user["name"]["first_name"], user["name"]["last_name"]
    same = [
        other
        for other in store["users"].values()
        if (other["name"], other["address"]["zip"]) == (user["name"], user["address"]["zip"])
    ]
    if rng.random() < 0.5 or len(same) > 1:
        return f"My email is {user['email']}.", ("find_user_id_by_email", {"email": user["email"]})
    zip_code = user["address"]["zip"]
    names = {"first_name": first, "last_name": last, "zip": zip_code}
    text = f"My name is {first} {last}, and my zip code is {zip_code}."
    return text, ("find_user_id_by_name_zip", names)


class RequestMaker:
    """Draws requests of one user; each takes another order."""

    def __init__(self, rng: Random, desk: Desk, user_id: str) -> None:
        self.rng, self.user_id, self.database = rng, user_id, desk.database
        self.user: Record = self.database.store["users"][user_id]
        self.free = [self.database.store["orders"][number] for number in self.user["orders"]]
        self.kinds: list[Callable[[], Request | None]] = [
            self.cancel,
            self.order_address,
            self.order_items,
            self.order_payment,
            self.returned,
            self.exchanged,
            self.user_address,
            self.tracking,
            self.price_paid,
            self.forbidden_cancel,
            self.forbidden_return,
            self.forbidden_refund,
        ]

    def draw(self) -> Request | None:
        """A request of any kind; None where the user has no order for it."""
        return self.rng.choice(self.kinds)()

    def cancel(self) -> Request | None:
        if (order := self._take("pending")) is None:
            return None
        number, reason = order["order_id"], self.rng.choice(REASONS)
        why = "I no longer need it." if reason == REASONS[0] else "I ordered it by mistake."
        call = ("cancel_pending_order", {"order_id": number, "reason": reason})
        return Request(f"I want to cancel my order {number}. {why}", why, number, actions=[call])

    def order_address(self) -> Request | None:
        if (order := self._take("pending")) is None:
            return None
        number, address = order["order_id"], draw_address(self.rng)
        call = ("modify_pending_order_address", {"order_id": number, **address})
        details = f"The new address: {written(address)}."
        return Request(
            f"Please ship order {number} to another address. {details}",
            details,
            number,
            actions=[call],
        )

    def user_address(self) -> Request | None:
        address = draw_address(self.rng)
        call = ("modify_user_address", {"user_id": self.user_id, **address})
        details = f"It is now {written(address)}."
        return Request(
            f"I have moved. Please change my default address. {details}", details, actions=[call]
        )

    def order_payment(self) -> Request | None:
        if (order := self._take("pending")) is None:
            return None
        number, paid = order["order_id"], order["payment_history"][0]
        others = [m for m in self._methods(paid["amount"]) if m != paid["payment_method_id"]]
        if not others:
            return None
        method = self.rng.choice(others)
        call = ("modify_pending_order_payment", {"order_id": number, "payment_method_id": method})
        details = f"Take my {self._named(method)}."
        return Request(
            f"I want to pay order {number} differently. {details}", details, number, actions=[call]
        )

    def order_items(self) -> Request | None:
        return self._replacement("pending", "modify_pending_order_items", "change")

    def exchanged(self) -> Request | None:
        return self._replacement("delivered", "exchange_delivered_order_items", "exchange")

    def returned(self) -> Request | None:
        if (order := self._take("delivered")) is None:
            return None
        number, original = order["order_id"], order["payment_history"][0]["payment_method_id"]
        cards = [
            m for m, one in self.user["payment_methods"].items() if one["source"] == "gift_card"
        ]
        method = self.rng.choice([original, *cards])
        items = self.rng.sample(order["items"], self.rng.randint(1, len(order["items"])))
        call = (
            "return_delivered_order_items",
            {
                "order_id": number,
                "item_ids": [item["item_id"] for item in items],
                "payment_method_id": method,
            },
        )
        names = " and the ".join(item["name"] for item in items)
        details = f"The {names}; the refund goes to my {self._named(method)}."
        return Request(
            f"I want to return items of order {number}. {details}", details, number, actions=[call]
        )

    def tracking(self) -> Request | None:
        if (order := self._take("processed", "delivered")) is None:
            return None
        number = order["order_id"]
        output = order["fulfillments"][0]["tracking_id"][0]
        return Request(
            f"What is the tracking number of order {number}?", order_id=number, outputs=[output]
        )

    def price_paid(self) -> Request | None:
        if (order := self._take("pending", "processed", "delivered")) is None:
            return None
        number, amount = order["order_id"], order["payment_history"][0]["amount"]
        return Request(
            f"How much did I pay for order {number}?", order_id=number, outputs=[str(amount)]
        )

    def forbidden_cancel(self) -> Request | None:
        """Only pending orders can be cancelled."""
        if (order := self._take("processed", "delivered")) is None:
            return None
        number = order["order_id"]
        return Request(f"Please cancel order {number}. I no longer need it.", order_id=number)

    def forbidden_return(self) -> Request | None:
        """Only delivered items can be returned."""
        if (order := self._take("pending", "processed")) is None:
            return None
        number = order["order_id"]
        return Request(f"I want to return everything in order {number}.", order_id=number)

    def forbidden_refund(self) -> Request | None:
        """A refund goes to the original payment method or a gift card, not to another card."""
        if (order := self._take("delivered")) is None:
            return None
        original = order["payment_history"][0]["payment_method_id"]
        methods = self.user["payment_methods"]
        others = [m for m in methods if methods[m]["source"] != "gift_card" and m != original]
        if not others:
            return None
        number, name = order["order_id"], order["items"][0]["name"]
        wish = f"the refund must go to my {self._named(others[0])} and to nothing else"
        return Request(f"I want to return the {name} of order {number}; {wish}.", order_id=number)

    def _replacement(self, status: str, tool: str, verb: str) -> Request | None:
        if (order := self._take(status)) is None:
            return None
        number, item = order["order_id"], self.rng.choice(order["items"])
        variants = self.database.store["products"][item["product_id"]]["variants"]
        others = [
            v for v in variants.values() if v["available"] and v["item_id"] != item["item_id"]
        ]
        if not others:
            return None
        new = self.rng.choice(others)
        methods = self._methods(round(new["price"] - item["price"], 2))
        if not methods:
            return None
        method = self.rng.choice(methods)
        call = (
            tool,
            {
                "order_id": number,
                "item_ids": [item["item_id"]],
                "new_item_ids": [new["item_id"]],
                "payment_method_id": method,
            },
        )
        options = ", ".join(f"{name} {value}" for name, value in new["options"].items())
        details = f"The new one: {options}. Use my {self._named(method)} for the price difference."
        return Request(
            f"I want to {verb} the {item['name']} of order {number}. {details}",
            details,
            number,
            item["product_id"],
            actions=[call],
        )

    def _take(self, *statuses: str) -> Record | None:
        """An order of the user that no other request is about."""
        fitting = [order for order in self.free if order["status"] in statuses]
        if not fitting:
            return None
        order = self.rng.choice(fitting)
        self.free.remove(order)
        return order

    def _methods(self, amount: float) -> list[str]:
        """The payment methods that can pay `amount`."""
        return [
            name
            for name, method in sorted(self.user["payment_methods"].items())
            if method["source"] != "gift_card" or method["balance"] >= amount
        ]

    def _named(self, method_id: str) -> str:
        method = self.user["payment_methods"][method_id]
        if method["source"] == "credit_card":
            return f"{method['brand']} card ending in {method['last_four']}"
        return {"paypal": "PayPal account", "gift_card": "gift card"}[method["source"]]


def written(address: Record) -> str:
    """The address in one line."""
    return ", ".join(str(part) for part in address.values() if part)

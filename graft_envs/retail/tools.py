"""The tools of the service desk. A call that the rules forbid changes nothing and is answered "Error: ..."

cancel_pending_order("#W4417203", "no longer needed")      the order's status is "cancelled", each payment
                                                           has a refund; a gift card is refilled at once
cancel_pending_order("#W4417203", "no longer needed")      Error: only a pending order can be cancelled; ...
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from graft.tools.calculator import CalculatorError, work
from graft.tools.errors import ERROR, is_error
from graft.tools.function import tool
from graft_envs.retail.database import Database
from graft_envs.retail.store import Record

REASONS = ("no longer needed", "ordered by mistake")
TRANSFERRED = "Transfer successful"


class ForbiddenCall(Exception):
    """A call that the rules forbid; the text is the answer."""


class RetailTools:
    """Sixteen tools on `database`, with the names and arguments of tau-bench's retail domain."""

    database: Database
    is_transferred = False
    num_writes = 0
    """Calls that have changed the database."""

    @tool
    def find_user_id_by_email(self, email: str) -> str:
        """Find a user's id by email. Answers an error if there is no such user."""
        for user_id in self.database.store["users"]:  # emails never change
            if self._user(user_id)["email"].lower() == email.strip().lower():
                return user_id
        return f"{ERROR}user not found"

    @tool
    def find_user_id_by_name_zip(self, first_name: str, last_name: str, zip: str) -> str:
        """Find a user's id by first name, last name and zip code of the default address."""
        wanted = (first_name.strip().lower(), last_name.strip().lower(), zip.strip())
        for user_id in self.database.store["users"]:
            user = self._user(user_id)
            name = user["name"]
            known = (name["first_name"].lower(), name["last_name"].lower(), user["address"]["zip"])
            if known == wanted:
                return user_id
        return f"{ERROR}user not found"

    @tool
    def get_user_details(self, user_id: str) -> str:
        """A user's name, email, default address, payment methods and order ids."""
        return self._answer(lambda: self._user(user_id))

    @tool
    def get_order_details(self, order_id: str) -> str:
        """An order's status, items, address, shipment and payments. An order id looks like '#W0000000'."""
        return self._answer(lambda: self._order(order_id))

    @tool
    def get_product_details(self, product_id: str) -> str:
        """All variants of a product: options, price, availability. A product id is not an item id."""
        return self._answer(lambda: self._find_record("products", product_id, "product"))

    @tool
    def list_all_product_types(self) -> str:
        """The names of all products with their product ids."""
        products = self.database.store["products"]
        return json.dumps({one["name"]: key for key, one in products.items()}, sort_keys=True)

    @tool
    def calculate(self, expression: str) -> str:
        """Work out an expression of numbers, + - * / and parentheses, rounded to two digits."""
        return self._answer(lambda: calculated(expression))

    @tool
    def think(self, thought: str) -> str:
        """Write down a thought. It changes nothing and answers nothing."""
        return ""

    @tool
    def transfer_to_human_agents(self, summary: str) -> str:
        """Hand the customer over to a human agent, with a summary. This ends the conversation."""
        self.is_transferred = True
        return TRANSFERRED

    @tool
    def cancel_pending_order(self, order_id: str, reason: str) -> str:
        """Cancel a pending order. The reason is 'no longer needed' or 'ordered by mistake'."""

        def run() -> Record:
            self._pending(order_id, "cancelled")
            if reason not in REASONS:
                raise ForbiddenCall(f"the reason must be one of: {', '.join(REASONS)}")
            order = self.database.edit("orders", order_id)
            for payment in [*order["payment_history"]]:
                self._pay(order, -payment["amount"], payment["payment_method_id"])
            return self._changed("orders", order_id, status="cancelled", cancel_reason=reason)

        return self._write(run)

    @tool
    def modify_pending_order_address(
        self,
        order_id: str,
        address1: str,
        address2: str,
        city: str,
        state: str,
        country: str,
        zip: str,
    ) -> str:
        """Change the shipping address of a pending order."""
        address = address_of(address1, address2, city, state, country, zip)

        def run() -> Record:
            self._pending(order_id, "changed")
            return self._changed("orders", order_id, address=address)

        return self._write(run)

    @tool
    def modify_user_address(
        self,
        user_id: str,
        address1: str,
        address2: str,
        city: str,
        state: str,
        country: str,
        zip: str,
    ) -> str:
        """Change the default address of a user."""
        address = address_of(address1, address2, city, state, country, zip)

        def run() -> Record:
            self._user(user_id)
            return self._changed("users", user_id, address=address)

        return self._write(run)

    @tool
    def modify_pending_order_payment(self, order_id: str, payment_method_id: str) -> str:
        """Pay a pending order with another payment method of the user."""

        def run() -> Record:
            order = self._pending(order_id, "changed")
            method = self._method(order["user_id"], payment_method_id)
            history = order["payment_history"]
            if len(history) != 1:
                raise ForbiddenCall("the order has more than one payment")
            if history[0]["payment_method_id"] == payment_method_id:
                raise ForbiddenCall("the order is already paid with this method")
            amount = history[0]["amount"]
            if method["source"] == "gift_card" and method["balance"] < amount:
                raise ForbiddenCall("the balance of the gift card does not cover the order")
            order = self.database.edit("orders", order_id)
            self._pay(order, amount, payment_method_id)
            self._pay(order, -amount, history[0]["payment_method_id"])
            return order

        return self._write(run)

    @tool
    def modify_pending_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> str:
        """Replace items of a pending order by other variants of the same products. Allowed once: list all
        items. The price difference is paid or refunded with the payment method."""

        def run() -> Record:
            order = self._pending(order_id, "changed")
            pairs, difference = self._replaced(order, item_ids, new_item_ids, payment_method_id)
            order = self.database.edit("orders", order_id)
            if difference:
                self._pay(order, difference, payment_method_id)
            for old, new in pairs:
                item = next(one for one in order["items"] if one["item_id"] == old)
                item |= {key: new[key] for key in ("item_id", "price", "options")}
            order["status"] = "pending (item modified)"
            return order

        return self._write(run)

    @tool
    def return_delivered_order_items(
        self, order_id: str, item_ids: list[str], payment_method_id: str
    ) -> str:
        """Request the return of items of a delivered order. The refund goes to the original payment method
        or to a gift card."""

        def run() -> Record:
            order = self._delivered(order_id, "returned")
            method = self._method(order["user_id"], payment_method_id)
            original = order["payment_history"][0]["payment_method_id"]
            if method["source"] != "gift_card" and payment_method_id != original:
                raise ForbiddenCall("a refund goes to the original payment method or a gift card")
            self._items(order, item_ids)
            return self._changed(
                "orders",
                order_id,
                status="return requested",
                return_items=sorted(item_ids),
                return_payment_method_id=payment_method_id,
            )

        return self._write(run)

    @tool
    def exchange_delivered_order_items(
        self, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
    ) -> str:
        """Request the exchange of items of a delivered order for other variants of the same products.
        Allowed once: list all items. The price difference is paid or refunded with the payment method."""

        def run() -> Record:
            order = self._delivered(order_id, "exchanged")
            _, difference = self._replaced(order, item_ids, new_item_ids, payment_method_id)
            return self._changed(
                "orders",
                order_id,
                status="exchange requested",
                exchange_items=sorted(item_ids),
                exchange_new_items=sorted(new_item_ids),
                exchange_payment_method_id=payment_method_id,
                exchange_price_difference=difference,
            )

        return self._write(run)

    def _write(self, run: Callable[[], Record]) -> str:
        answer = self._answer(run)
        self.num_writes += not is_error(answer)
        return answer

    def _answer(self, run: Callable[[], Any]) -> str:
        try:
            result = run()
        except ForbiddenCall as why:
            return f"{ERROR}{why}"
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)

    def _changed(self, table: str, key: str, **fields: Any) -> Record:
        record = self.database.edit(table, key)
        record |= fields
        return record

    def _find_record(self, table: str, key: str, what: str) -> Record:
        record = self.database.get(table, key)
        if record is None:
            raise ForbiddenCall(f"{what} not found")
        return record

    def _user(self, user_id: str) -> Record:
        return self._find_record("users", user_id, "user")

    def _order(self, order_id: str) -> Record:
        return self._find_record("orders", order_id, "order")

    def _pending(self, order_id: str, done: str) -> Record:
        order = self._order(order_id)
        if order["status"] != "pending":
            raise ForbiddenCall(
                f"only a pending order can be {done}; this one is {order['status']}"
            )
        return order

    def _delivered(self, order_id: str, done: str) -> Record:
        order = self._order(order_id)
        if order["status"] != "delivered":
            raise ForbiddenCall(
                f"only items of a delivered order can be {done}; it is {order['status']}"
            )
        return order

    def _method(self, user_id: str, method_id: str) -> Record:
        methods = self._user(user_id)["payment_methods"]
        if method_id not in methods:
            raise ForbiddenCall("payment method not found")
        return methods[method_id]

    def _items(self, order: Record, item_ids: list[str]) -> None:
        """Refuse items that the order does not have, or not as often."""
        if not item_ids:
            raise ForbiddenCall("name at least one item")
        there = Counter(item["item_id"] for item in order["items"])
        if missing := Counter(item_ids) - there:
            raise ForbiddenCall(f"item {next(iter(missing))} is not in the order")

    def _replaced(
        self, order: Record, item_ids: list[str], new_item_ids: list[str], method_id: str
    ) -> tuple[list[tuple[str, Record]], float]:
        """Each old item with its new variant, and what they cost more; refused where the rules forbid it."""
        self._items(order, item_ids)
        if len(item_ids) != len(new_item_ids):
            raise ForbiddenCall("give one new item for each item")
        pairs: list[tuple[str, Record]] = []
        difference = 0.0
        for old, new in zip(item_ids, new_item_ids, strict=True):
            item = next(one for one in order["items"] if one["item_id"] == old)
            variants = self._find_record("products", item["product_id"], "product")["variants"]
            if new not in variants or not variants[new]["available"] or new == old:
                raise ForbiddenCall(
                    f"item {new} is not an available other variant of the same product"
                )
            pairs.append((old, variants[new]))
            difference += variants[new]["price"] - item["price"]
        difference = round(difference, 2)
        method = self._method(order["user_id"], method_id)
        if method["source"] == "gift_card" and method["balance"] < difference:
            raise ForbiddenCall("the balance of the gift card does not cover the price difference")
        return pairs, difference

    def _pay(self, order: Record, amount: float, method_id: str) -> None:
        """A payment, or a refund of a negative amount; a gift card's balance changes at once."""
        kind = "payment" if amount >= 0 else "refund"
        order["payment_history"].append(
            {"transaction_type": kind, "amount": abs(amount), "payment_method_id": method_id}
        )
        if self._method(order["user_id"], method_id)["source"] == "gift_card":
            method = self.database.edit("users", order["user_id"])["payment_methods"][method_id]
            method["balance"] = round(method["balance"] - amount, 2)


def address_of(
    address1: str, address2: str, city: str, state: str, country: str, zip: str
) -> Record:
    return {
        "address1": address1,
        "address2": address2,
        "city": city,
        "state": state,
        "country": country,
        "zip": zip,
    }


def calculated(expression: str) -> str:
    """The value, rounded to two digits: "12.5*3+0.1" -> "37.6"."""
    try:
        value = work(expression).value
    except CalculatorError as error:
        raise ForbiddenCall(str(error)) from error
    return f"{float(value):.2f}".rstrip("0").rstrip(".")


class Desk(RetailTools):
    """The tools on a database, without a conversation: how gold actions are carried out."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def carry_out(self, name: str, arguments: Record) -> str:
        return getattr(self, name)(**arguments)

"""The service desk: what each tool changes, what the rules forbid, and what earns the reward."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

import graft
from graft.types import Author, Turn
from graft.user_code import UserCodeError
from graft_envs.retail.cases import Case, Request
from graft_envs.retail.customer import YES, ScriptedCustomer
from graft_envs.retail.database import Database
from graft_envs.retail.env import teacher
from graft_envs.retail.store import Store, build_store
from graft_envs.retail.tools import Desk, calculated

ADDRESS = {
    "address1": "1 Main Street",
    "address2": "",
    "city": "Boise",
    "state": "ID",
    "country": "USA",
    "zip": "83701",
}


def shop() -> Store:
    """One user, one product with four variants (one sold out), an order of two items in each status."""
    prices = {"11": 10.0, "12": 12.5, "13": 40.0, "14": 9.0}
    variants = {
        item: {
            "item_id": item,
            "options": {"size": item},
            "available": item != "14",
            "price": price,
        }
        for item, price in prices.items()
    }
    items = [
        {"name": "Mug", "product_id": "1", "item_id": i, "price": prices[i], "options": {"size": i}}
        for i in ("11", "12")
    ]
    payment = {"transaction_type": "payment", "amount": 22.5, "payment_method_id": "card"}
    orders = {
        f"#{status}": {
            "order_id": f"#{status}",
            "user_id": "ann",
            "address": dict(ADDRESS),
            "items": [dict(item) for item in items],
            "status": status,
            "fulfillments": [],
            "payment_history": [dict(payment)],
        }
        for status in ("pending", "delivered", "processed")
    }
    methods = {
        "card": {"source": "credit_card", "id": "card"},
        "other": {"source": "credit_card", "id": "other"},
        "gift": {"source": "gift_card", "id": "gift", "balance": 25},
        "poor": {"source": "gift_card", "id": "poor", "balance": 1},
    }
    user = {
        "name": {"first_name": "Ann", "last_name": "Lee"},
        "email": "ann@example.com",
        "address": dict(ADDRESS),
        "payment_methods": methods,
        "orders": [*orders],
    }
    product = {"name": "Mug", "product_id": "1", "variants": variants}
    return {"users": {"ann": user}, "products": {"1": product}, "orders": orders}


def desk() -> Desk:
    return Desk(Database(shop()))


def history(order: dict[str, Any]) -> list[tuple[str, float, str]]:
    return [tuple(one.values()) for one in order["payment_history"]]  # type: ignore[misc]


def test_users_are_found_by_email_or_by_name_and_zip():
    service = desk()
    assert service.find_user_id_by_email("Ann@example.com ") == "ann"
    assert service.find_user_id_by_name_zip("ann", "LEE", "83701") == "ann"
    assert service.find_user_id_by_name_zip("Ann", "Lee", "1") == "Error: user not found"
    assert json.loads(service.get_order_details("#pending"))["status"] == "pending"
    assert json.loads(service.list_all_product_types()) == {"Mug": "1"}
    assert service.get_product_details("11") == "Error: product not found"
    assert service.think("hm") == "" and service.num_writes == 0


def test_a_cancelled_order_is_refunded_and_a_gift_card_refilled():
    service = desk()
    service.modify_pending_order_payment("#pending", "gift")
    assert service.database.get("users", "ann")["payment_methods"]["gift"]["balance"] == 2.5
    service = desk()
    order = json.loads(service.cancel_pending_order("#pending", "no longer needed"))
    assert (order["status"], order["cancel_reason"]) == ("cancelled", "no longer needed")
    assert history(order) == [("payment", 22.5, "card"), ("refund", 22.5, "card")]
    assert service.num_writes == 1


def test_another_payment_method_pays_and_the_first_is_refunded():
    order = json.loads(desk().modify_pending_order_payment("#pending", "gift"))
    assert history(order) == [
        ("payment", 22.5, "card"),
        ("payment", 22.5, "gift"),
        ("refund", 22.5, "card"),
    ]


def test_items_of_a_pending_order_are_changed_once():
    service = desk()
    order = json.loads(service.modify_pending_order_items("#pending", ["11"], ["12"], "gift"))
    assert [item["item_id"] for item in order["items"]] == ["12", "12"]
    assert history(order)[1:] == [("payment", 2.5, "gift")]
    assert order["status"] == "pending (item modified)"
    assert service.database.get("users", "ann")["payment_methods"]["gift"]["balance"] == 22.5
    for answer in (
        service.modify_pending_order_items("#pending", ["12"], ["11"], "card"),
        service.cancel_pending_order("#pending", "no longer needed"),
        service.modify_pending_order_address("#pending", **ADDRESS),
        service.modify_pending_order_payment("#pending", "other"),
    ):
        assert answer.startswith("Error: only a pending order")


def test_returns_and_exchanges_are_requests_on_a_delivered_order():
    order = json.loads(desk().return_delivered_order_items("#delivered", ["12", "11"], "gift"))
    assert (order["status"], order["return_items"]) == ("return requested", ["11", "12"])
    service = desk()
    order = json.loads(service.exchange_delivered_order_items("#delivered", ["11"], ["13"], "card"))
    assert order["exchange_price_difference"] == 30.0
    again = service.exchange_delivered_order_items("#delivered", ["12"], ["13"], "card")
    assert again.startswith("Error: only items of a delivered order")


FORBIDDEN = [
    ("cancel_pending_order", ("#delivered", "no longer needed"), "only a pending order"),
    ("cancel_pending_order", ("#processed", "no longer needed"), "only a pending order"),
    ("cancel_pending_order", ("#pending", "too expensive"), "the reason must be"),
    ("cancel_pending_order", ("#none", "no longer needed"), "order not found"),
    ("modify_pending_order_payment", ("#pending", "card"), "already paid with this method"),
    ("modify_pending_order_payment", ("#pending", "poor"), "does not cover the order"),
    ("modify_pending_order_payment", ("#pending", "none"), "payment method not found"),
    ("modify_pending_order_items", ("#pending", ["11"], ["14"], "card"), "not an available other"),
    ("modify_pending_order_items", ("#pending", ["11"], ["11"], "card"), "not an available other"),
    ("modify_pending_order_items", ("#pending", ["11"], ["99"], "card"), "not an available other"),
    ("modify_pending_order_items", ("#pending", ["13"], ["11"], "card"), "is not in the order"),
    ("modify_pending_order_items", ("#pending", ["11"], ["12", "13"], "card"), "one new item"),
    ("modify_pending_order_items", ("#pending", ["11"], ["13"], "poor"), "price difference"),
    ("return_delivered_order_items", ("#pending", ["11"], "card"), "only items of a delivered"),
    ("return_delivered_order_items", ("#delivered", ["11"], "other"), "the original payment"),
    ("return_delivered_order_items", ("#delivered", ["11", "11"], "card"), "is not in the order"),
    ("return_delivered_order_items", ("#delivered", [], "card"), "at least one item"),
    ("exchange_delivered_order_items", ("#pending", ["11"], ["12"], "card"), "only items of a"),
    ("modify_user_address", ("nobody", *ADDRESS.values()), "user not found"),
]


@pytest.mark.parametrize(("tool", "arguments", "why"), FORBIDDEN)
def test_a_forbidden_call_is_answered_and_changes_nothing(tool: str, arguments: Any, why: str):
    service = desk()
    before = service.database.digest()
    answer = getattr(service, tool)(*arguments)
    assert answer.startswith("Error: ") and why in answer
    assert service.database.digest() == before and service.num_writes == 0


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12.5*3 + 0.1", "37.6"), ("-(2-5)/4", "0.75"), ("10*100", "1000"), ("12345.678", "12345.68")],
)
def test_calculate(expression: str, value: str):
    assert calculated(expression) == value


@pytest.mark.parametrize("expression", ["1/0", "2**9", "__import__('os')", "(", "9" * 300, "a"])
def test_calculate_refuses_what_is_not_arithmetic(expression: str):
    assert desk().calculate(expression).startswith("Error: ")


def test_the_hash_is_of_the_state_and_not_of_the_way_to_it():
    one, two = desk(), desk()
    one.modify_user_address("ann", **{**ADDRESS, "zip": "1"})
    one.modify_user_address("ann", **{**ADDRESS, "zip": "2"})
    two.modify_user_address("ann", **{**ADDRESS, "zip": "2"})
    assert one.database.digest() == two.database.digest() != desk().database.digest()
    two.modify_user_address("ann", **ADDRESS)  # as it was
    assert two.database.digest() == desk().database.digest()


def test_the_store_is_made_from_its_seed_and_attempts_do_not_change_it():
    assert build_store.__wrapped__(3) == build_store.__wrapped__(3) != build_store(0)
    before = json.dumps(build_store(0), sort_keys=True)
    for seed in range(5):
        solve(seed)
    assert json.dumps(build_store(0), sort_keys=True) == before


def solve(seed: int, **settings: Any) -> Turn:
    env = graft.make("tau:retail", **settings)
    env.reset(seed)
    return run(env, teachers_texts(env))


def teachers_texts(env: Any) -> list[str]:
    return [text for author, text in env.demonstrate(random.Random(0)) if author == Author.POLICY]


def run(env: Any, actions: list[str]) -> Turn:
    turn = Turn()
    for action in actions:
        if turn.is_over:
            break
        turn = env.step(action)
    return turn


def test_the_teacher_solves_every_case_by_the_rules():
    for split in ("train", "test"):
        env = graft.make("tau:retail", split=split, strict=True, max_requests=3)
        for seed in range(25):
            env.reset(seed)
            turn = run(env, teachers_texts(env))
            assert turn.reward == 1.0 and turn.terminated, (split, seed)


def with_action(**settings: Any) -> tuple[Any, list[str]]:
    """An env whose only request is one change, and the teacher's messages and calls."""
    for seed in range(100):
        env = graft.make("tau:retail", max_requests=1, **settings)
        env.reset(seed)
        case: Case = env.unwrapped.case
        if case.actions:
            steps = teacher(case)
            return env, [one if isinstance(one, str) else env.written(*one) for one in steps]
    raise AssertionError("no case changes anything")


def test_an_agent_that_does_nothing_or_too_much_earns_nothing():
    env, actions = with_action()
    turn = run(env, [one for one in actions if "order" not in one or not one.startswith("<")] * 3)
    assert turn.terminated and turn.reward == 0.0 and not turn.info["is_database_right"]

    env, actions = with_action()
    user = env.unwrapped.case.user_id
    extra = env.written("modify_user_address", {"user_id": user, **ADDRESS})
    turn = run(env, [*actions[:3], extra, *actions[3:]])
    assert turn.terminated and turn.reward == 0.0


def test_a_change_without_the_customers_yes_costs_the_reward_only_if_strict():
    for strict, reward in ((False, 1.0), (True, 0.0)):
        env, actions = with_action(strict=strict)
        turn = run(env, [one for one in actions if "Do you confirm" not in one])
        assert (turn.reward, turn.info["unconfirmed"]) == (reward, 1)


def test_an_output_must_be_said():
    env = graft.make("tau:retail", max_requests=1)
    seed = next(s for s in range(200) if env.reset(s) and env.unwrapped.case.outputs)
    assert solve(seed, max_requests=1).reward == 1.0
    env.reset(seed)
    turn = run(env, ["Who are you?", *["I will look into it."] * 3])
    assert turn.terminated and turn.reward == 0.0 and turn.info["is_database_right"]


def test_a_transfer_ends_the_conversation_and_is_graded():
    env, _ = with_action()
    turn = env.step(env.written("transfer_to_human_agents", {"summary": "help"}))
    assert turn.terminated and turn.reward == 0.0
    assert turn.observation == "Transfer successful"
    with pytest.raises(RuntimeError, match="reset"):
        env.step("Hello?")


def test_running_out_of_turns_earns_nothing():
    env = graft.make("tau:retail", max_turns=2)
    env.reset(0)
    turn = run(env, [env.written("think", {"thought": "hm"})] * 2)
    assert turn.truncated and not turn.terminated and turn.reward == 0.0


def test_the_customer_confirms_what_names_the_order_accepts_a_refusal_and_loses_patience():
    allowed = Request("Cancel #W1.", "By mistake.", "#W1", actions=[("cancel_pending_order", {})])
    case = Case("ann", "I am Ann.", ("", {}), [allowed, Request("Return #W2.", order_id="#W2")])
    customer = ScriptedCustomer()
    assert customer.begin(case).endswith("Cancel #W1.")
    assert customer.reply(case, "Who are you?", "", 0) == "I am Ann."
    assert customer.reply(case, "Do you confirm this?", "", 0) == "By mistake."  # of which order?
    assert customer.reply(case, "Cancel #W1: do you confirm?", "", 0) == YES
    assert "look again" in customer.reply(case, "I cannot do that.", "", 0)
    assert "Return #W2." in customer.reply(case, "Done.", "", 1)
    assert "that was all. ###STOP###" in customer.reply(case, "That is not possible.", "", 1)
    customer.begin(case)
    replies = [customer.reply(case, "Hm.", "", 0) for _ in range(4)]
    assert replies[:3] == ["I am Ann.", "By mistake.", "By mistake."]
    assert replies[3].endswith("###STOP###")


def test_roles_of_a_demonstration_are_those_of_a_rollout():
    env, _ = with_action()
    roles = [
        getattr(text, "role", "")
        for author, text in env.demonstrate(random.Random(0))
        if author == Author.ENV
    ]
    assert set(roles) == {"user", "tool"}
    turn = env.step("May I have your email?")
    assert turn.info["observe_as"] == "user"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"customer": "scriptd"}, "did you mean 'scripted'"),
        ({"format": "tags"}, "use hermes or mcp"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"split": "dev"}, "split='dev'"),
        ({"customer": "model", "customer_args": {"uri": "x"}}, "did you mean 'url'"),
        ({"customer": "model", "customer_args": {"url": "host"}}, "not of the form"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises((ValueError, UserCodeError), match=message):
        graft.make("tau:retail", **settings)

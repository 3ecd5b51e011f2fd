"""A customer, a service agent with tools, and a database: tau-bench's retail domain on a made shop.

    task    system: the rules; user: "Hello, ... I want to cancel my order #W4417203. ..."
    policy  "May I have your email, or your name and zip code?"
    env     user: "My email is mira.holt4821@example.com."
    policy  <tool_call>{"name": "find_user_id_by_email", "arguments": {...}}</tool_call>
    env     tool: "mira_holt_4821"
    ...

A message without a call goes to the customer. When the customer is done, or the agent hands over to a
human, the reward is 1 if the database is exactly as after the gold actions and every required output
was said, else 0. An attempt that runs out of turns earns 0.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from graft.envs.base import BaseEnv, Trace
from graft.envs.own_tools import own_tools
from graft.envs.splits import check_split
from graft.envs.tool_env import ToolEnv
from graft.registry import check_options, resolve
from graft.tools.rebind import rebound
from graft.types import Author, Message, MessageText, Turn
from graft_envs.retail.cases import Call, Case, Request, draw_case
from graft_envs.retail.customer import CUSTOMERS, STOP, YES, Customer, ScriptedCustomer
from graft_envs.retail.database import Database
from graft_envs.retail.store import Store, build_store
from graft_envs.retail.tools import Desk, RetailTools

MAX_TURNS = 30
POLICY = Path(__file__).with_name("policy.md").read_text().strip()
"""The rules that the agent works by: the system message."""
WRITTEN = {
    "hermes": '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
    "mcp": "<tool_call><tool_name>{name}</tool_name><arguments>{arguments}</arguments></tool_call>",
}
"""Call format -> a call in it."""


class RetailDesk(RetailTools, BaseEnv):
    """The conversation with the customer; the tools are methods of `RetailTools`."""

    env_id = "tau:retail"
    max_turns = None
    shared = ("store",)
    saved = (*BaseEnv.saved, "is_transferred", "num_writes", "said", "is_confirmed", "unconfirmed")

    def __init__(
        self, customer: Customer, store_seed: int, split: str, max_requests: int, strict: bool
    ) -> None:
        super().__init__()
        self.split = check_split(split)
        self.store: Store = build_store(store_seed)
        self.max_requests, self.strict = max_requests, strict
        self.customer = customer
        self.blocking = customer.blocking
        self.database = Database(self.store)
        self.case = Case("", "", ("", {}), [])
        self.said = ""  # by the agent, as outputs are looked for in it
        self.is_confirmed = False  # the customer said yes since the last change
        self.unconfirmed = 0  # changes that the customer had not agreed to

    def pose(self) -> list[Message]:
        self.database = Database(self.store)
        self.is_transferred, self.num_writes = False, 0
        self.said, self.is_confirmed, self.unconfirmed = "", False, 0
        self.case = draw_case(self.rng, self.store, self.split, self.max_requests)
        self.answer = {
            "actions": [list(call) for call in self.case.actions],
            "outputs": self.case.outputs,
        }
        return [
            {"role": "system", "content": POLICY},
            {"role": "user", "content": self.customer.begin(self.case)},
        ]

    def respond(self, action: str) -> Turn:
        self.said += "\n" + as_said(action)
        reply = self.customer.reply(self.case, action, self.said, self.num_writes)
        words = reply.lower()
        self.is_confirmed = reply == YES or words.startswith("yes") or "go ahead" in words
        text = reply.replace(STOP, "").strip()
        return self.ended(text) if STOP in reply else Turn(text)

    def ended(self, text: str) -> Turn:
        """The last turn, with the reward."""
        gold = Desk(Database(self.store))
        for call in self.case.actions:
            gold.carry_out(*call)
        checks = {
            "is_database_right": self.database.digest() == gold.database.digest(),
            "is_output_said": all(output in self.said for output in self.case.outputs),
            "unconfirmed": self.unconfirmed,
        }
        is_right = checks["is_database_right"] and checks["is_output_said"]
        is_right = is_right and not (self.strict and self.unconfirmed)
        return Turn(text, float(is_right), terminated=True, info={"is_right": is_right, **checks})

    def count_write(self) -> None:
        """A change of the database: the customer must have agreed to it."""
        self.unconfirmed += not self.is_confirmed
        self.is_confirmed = False

    def describe(self) -> dict[str, Any]:
        return {"user_id": self.case.user_id, "requests": len(self.case.requests)}

    def get_state(self) -> dict[str, Any]:
        own = {
            "changes": self.database.changes,
            "case": self.case.to_json(),
            "customer": self.customer.state,
        }
        return {**super().get_state(), **copy.deepcopy(own)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self.database = Database(self.store)
        self.database.changes = copy.deepcopy(state["changes"])
        self.case = Case.from_json(copy.deepcopy(state["case"]))
        self.customer.state = copy.deepcopy(state["customer"])


class RetailTask(ToolEnv):
    """A customer's case and sixteen tools; see the top of this file.

    customer        "scripted", "model" (a language model), or your own class
    customer_args   its arguments: {url: http://host:8001/v1, model: NAME} for a model
    format          of the calls: hermes (JSON in <tool_call>) or mcp
    max_turns       messages and calls of the agent
    max_requests    most requests of one customer
    strict          a change that the customer had not agreed to costs the reward, which tau-bench's
                    comparison of databases does not notice
    split           train or test: the customers are different ones
    store_seed      another seed is another shop
    """

    def __init__(
        self,
        *,
        customer: str = "scripted",
        customer_args: Mapping[str, Any] | None = None,
        format: str = "hermes",
        max_turns: int = MAX_TURNS,
        max_requests: int = 2,
        strict: bool = False,
        split: str = "train",
        store_seed: int = 0,
    ) -> None:
        for name, value in {"max_turns": max_turns, "max_requests": max_requests}.items():
            if value < 1:
                raise ValueError(f"{name}={value}: must be 1 or more")
        if format not in WRITTEN:
            raise ValueError(
                f"format={format!r}: calls have JSON arguments; use {' or '.join(WRITTEN)}"
            )
        kind: Any = resolve(customer, CUSTOMERS, "customer")
        options = dict(customer_args or {})
        check_options(kind, options, f"customer {customer!r}")
        desk = RetailDesk(kind(**options), store_seed, split, max_requests, strict)
        super().__init__(desk, tools_of(desk), format=format, max_uses=None)
        self.limit, self.written_as = max_turns, format

    @property
    def max_turns(self) -> int:
        return self.limit

    def step(self, action: str) -> Turn:
        desk: RetailDesk = self.env
        before = desk.num_writes
        turn = super().step(action)
        if desk.num_writes > before:
            desk.count_write()
        if desk.is_transferred and not turn.terminated:
            desk.is_over = self.is_over = True
            last = desk.ended(turn.observation)
            turn = last._replace(info={**turn.info, **last.info})
        turn.info.update(self._totals())
        return turn

    def demonstrate(self, rng: random.Random) -> Trace:
        """A teacher that knows the case and works by the rules."""
        twin = self.fork()
        trace: Trace = []
        for action in teacher(twin.env.case):
            turn = twin.step(action if isinstance(action, str) else self.written(*action))
            text = action if isinstance(action, str) else self.written(*action)
            role = "user" if isinstance(action, str) else self.observe_as
            trace += [(Author.POLICY, text), (Author.ENV, MessageText(turn.observation, role))]
            if turn.is_over:
                break
        return trace[:-1]

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call in the format of the environment."""
        body = json.dumps(arguments, ensure_ascii=False)
        return WRITTEN[self.written_as].format(name=name, arguments=body)

    def sample_random_action(self) -> str:
        """A question, or a look at one of the store's records."""
        desk: RetailDesk = self.env
        rng = desk.action_rng()
        if rng.random() < 0.3:
            return "May I have your email, or your name and zip code?"
        order = rng.choice(sorted(desk.store["orders"]))
        return self.written("get_order_details", {"order_id": order})


@cache
def _first_desk() -> tuple[RetailDesk, list[Any]]:
    desk = RetailDesk(ScriptedCustomer(), 0, "train", 1, strict=False)
    return desk, own_tools(desk)


def tools_of(desk: RetailDesk) -> list[Any]:
    """The desk's methods as tools; their schemas, which take a while to make, are made once."""
    first, tools = _first_desk()
    return [rebound(tool, {id(first): desk}) for tool in tools]


def teacher(case: Case) -> list[str | Call]:
    """Messages and calls that solve a case; the scripted customer's answers need not be read."""
    steps: list[str | Call] = ["May I have your email, or your first name, last name and zip code?"]
    steps += [case.find, ("get_user_details", {"user_id": case.user_id})]
    for request in case.requests:
        steps += _solved(request)
    return steps


def _solved(request: Request) -> list[str | Call]:
    steps: list[str | Call] = []
    if request.order_id:
        steps.append(("get_order_details", {"order_id": request.order_id}))
    if request.product_id:
        steps.append(("get_product_details", {"product_id": request.product_id}))
    if request.outputs:
        return [*steps, f"It is {' and '.join(request.outputs)}. Is there anything else?"]
    if not request.actions:
        return [*steps, f"I am sorry, this is not possible for order {request.order_id}."]
    for name, arguments in request.actions:
        steps.append(f"{described(name, arguments)} Do you confirm this (yes or no)?")
        steps.append((name, arguments))
    return [*steps, "That is done. Is there anything else?"]


def described(name: str, arguments: Mapping[str, Any]) -> str:
    """ "I would cancel pending order: order_id #W4417203, reason no longer needed." """
    parts = ", ".join(f"{key} {value}" for key, value in arguments.items() if value)
    return f"I would {name.replace('_', ' ')}: {parts}."


def as_said(message: str) -> str:
    """A message as outputs are looked for: lower case, "1,234.5" as "1234.5"."""
    return message.lower().replace(",", "")

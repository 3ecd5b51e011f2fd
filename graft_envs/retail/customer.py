"""Customers: a script that answers in the same way every time, and a language model behind a server.

agent     "Hello, may I have your email, or your name and zip code?"
customer  "My email is mira.holt4821@example.com."
agent     "I would cancel order #W4417203, no longer needed. Is that right (yes or no)?"
customer  "Yes, please go ahead."
agent     "Done. Anything else?"
customer  "No, thank you. That was all. ###STOP###"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from graft.http import HttpFault
from graft.tools.chat_model import ChatModel
from graft.tools.errors import ToolError
from graft.types import Message
from graft_envs.retail.cases import Case

STOP = "###STOP###"
"""Ends the conversation, as in tau-bench."""
YES = "Yes, please go ahead."
PATIENCE = 3
"""Messages of the agent that may pass without progress on a request."""
ASKING = (
    "confirm",
    "is that right",
    "is this right",
    "yes or no",
    "(yes",
    "shall i",
    "proceed",
    "go ahead",
)
REFUSING = ("cannot", "can't", "can not", "not possible", "unable", "not allowed", "not able")
OPENING = "Hello, I need help with my account. "

PROMPT = """You play a customer of an online shop in a chat with a service agent. Speak as the customer.
- Write one short message at a time, and only what the agent needs next.
- Say who you are only when asked: {identity}
- What you want, in this order:
{wishes}
- If the agent describes an action that is exactly what you want and asks for your consent, say yes. If it
  is not what you want, say no and say what is wrong.
- If the agent explains that something is not possible, accept it and go on with your next wish.
- Invent nothing that is not written here.
- When all wishes are settled, or the agent hands you over to a human, write {stop} and nothing else."""


class Customer(Protocol):
    """The other side of the conversation. `state` is plain data and all that changes."""

    blocking: bool
    state: dict[str, Any]

    def begin(self, case: Case) -> str:
        """The first message."""
        ...

    def reply(self, case: Case, message: str, said: str, num_writes: int) -> str:
        """The answer to the agent's `message`; `said`: everything the agent has said, in lower case."""
        ...


class ScriptedCustomer:
    """States one request at a time, confirms what names its order, accepts a refusal, loses patience."""

    blocking = False

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def begin(self, case: Case) -> str:
        self.state = {
            "number": 0,
            "is_known": False,
            "patience": PATIENCE,
            "insisted": False,
            "writes": 0,
        }
        return OPENING + case.requests[0].text

    def reply(self, case: Case, message: str, said: str, num_writes: int) -> str:
        state, text = self.state, message.lower()
        if not state["is_known"]:
            state["is_known"] = True
            return case.identity
        request = case.requests[state["number"]]
        is_said = all(output in said for output in request.outputs)
        if num_writes > state["writes"] or (request.outputs and is_said):
            return self._next(case, num_writes)
        if request.actions and _has(text, ASKING) and request.order_id.lower() in text:
            return YES
        if _has(text, REFUSING):
            if not request.is_allowed or state["insisted"]:
                return self._next(case, num_writes)
            state["insisted"] = True
            return f"Are you sure? Please look again. {request.text}"
        state["patience"] -= 1
        if state["patience"] <= 0:
            return f"This leads nowhere. Goodbye. {STOP}"
        return request.details or request.text

    def _next(self, case: Case, num_writes: int) -> str:
        state = self.state
        number = state["number"] + 1
        state.update(number=number, patience=PATIENCE, insisted=False, writes=num_writes)
        if number == len(case.requests):
            return f"Thank you, that was all. {STOP}"
        return f"Thank you. One more thing: {case.requests[number].text}"


class ModelCustomer:
    """A language model behind an OpenAI-compatible server, which reads the case as its instructions."""

    blocking = True

    def __init__(
        self,
        url: str | None = None,
        model: str | None = None,
        *,
        api_key_env: str = "",
        temperature: float = 0.0,
        timeout: float = 60.0,
        retries: int = 3,
    ) -> None:
        """
        url: the server's base, such as http://host:8001/v1; None takes $CUSTOMER_URL.
        model: the served model; None takes $CUSTOMER_MODEL, and "" sends no name.
        api_key_env: the environment variable with the key for this server; "": no key, or
        $OPENAI_API_KEY for OpenAI's own server.
        """
        self.chat = ChatModel(
            url,
            model,
            who="customer",
            api_key_env=api_key_env,
            timeout=timeout,
            retries=retries,
            deadline=4 * timeout,
        )
        self.temperature = temperature
        self.state: dict[str, Any] = {}

    def begin(self, case: Case) -> str:
        wishes = "\n".join(f"  {n}. {one.text}" for n, one in enumerate(case.requests, 1))
        prompt = PROMPT.format(identity=case.identity, wishes=wishes, stop=STOP)
        self.state = {"messages": [{"role": "system", "content": prompt}]}
        return self._said("Hello, how can I help you?")

    def reply(self, case: Case, message: str, said: str, num_writes: int) -> str:
        return self._said(message)

    def _said(self, message: str) -> str:
        """The model's answer; in its own chat the agent is the user."""
        messages: list[Message] = self.state["messages"]
        messages.append({"role": "user", "content": message})
        try:
            answer = self.chat.reply(messages, temperature=self.temperature)
        except HttpFault as fault:
            raise ToolError(f"the customer's model at {self.chat.url} {fault}") from fault
        answer = answer.rpartition("</think>")[2].strip()
        messages.append({"role": "assistant", "content": answer})
        return answer


def _has(text: str, words: Sequence[str]) -> bool:
    return any(word in text for word in words)


CUSTOMERS = {"scripted": ScriptedCustomer, "model": ModelCustomer}

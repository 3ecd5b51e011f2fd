"""A small real taskset for verifiers: sums to answer, with a calculator tool and a guessing game.

Its harness talks to the model from within this process, which verifiers allows; the ones that
verifiers brings along install programs from the network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["ToyHarness", "ToyTaskset"]

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


class ToyData(vf.TaskData):
    answer: int


class ToyTask(vf.Task[ToyData]):
    @vf.reward
    async def correct(self, task: ToyData, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == str(task.answer))

    @vf.reward(weight=0.1)
    async def polite(self, trace: vf.Trace) -> float:
        return float("please" in trace.last_reply)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class ToyTaskset(vf.Taskset[ToyTask, vf.TasksetConfig]):
    def load(self) -> Iterator[ToyTask]:
        for a, b in ((1, 2), (3, 4), (5, 6)):
            data = ToyData(prompt=f"{a}+{b}=", system_prompt="Answer.", answer=a + b)
            yield ToyTask(data, self.config.task)


class ToyHarnessConfig(vf.HarnessConfig):
    pass


class ToyHarness(vf.Harness[ToyHarnessConfig]):
    """Call the model; while it calls the calculator, calculate and call again."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
        **_: Any,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        async with httpx.AsyncClient(timeout=60) as http:
            while True:
                body = {"model": ctx.model, "messages": messages, "tools": [CALCULATOR]}
                reply = await http.post(
                    f"{endpoint}/chat/completions",
                    json=body,
                    headers={"Authorization": f"Bearer {secret}"},
                )
                if reply.status_code != 200:
                    return vf.ProgramResult(1, "", reply.text)
                message = reply.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    given = json.loads(call["function"]["arguments"])
                    total = str(given.get("a", 0) + given.get("b", 0))
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": total})

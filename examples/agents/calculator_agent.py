"""An openai-agents program with a calculator, which works off the attempts of a training run.

python calculator_agent.py http://127.0.0.1:8399 TOKEN        # both are printed by graft serve agent
"""

import ast
import asyncio
import operator
import sys
from contextlib import suppress

import httpx
from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import AgentsException
from openai import AsyncOpenAI, OpenAIError

AT_A_TIME = 64
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@function_tool
def calc(x: str) -> str:
    """Calculate an expression with +, - and *."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        return int(node.value)

    try:
        return str(value(ast.parse(x, mode="eval").body))
    except (SyntaxError, ValueError, KeyError, TypeError, AttributeError):
        return "?"


async def attempt(graft: httpx.AsyncClient, openai: AsyncOpenAI) -> None:
    answer = await graft.post("/graft/sessions", json={})
    if answer.status_code == 503:  # the step is being trained
        return await asyncio.sleep(0.5)
    claimed = answer.raise_for_status().json()
    client = openai.with_options(base_url=claimed["openai_base_url"], api_key=claimed["key"])
    agent = Agent("calculator", tools=[calc], model=OpenAIResponsesModel("policy", client))
    # a call of a tool that does not exist, too many turns, a limit of the run: the attempt ends as it is
    with suppress(AgentsException, OpenAIError):
        await Runner.run(agent, claimed["task"]["prompt"][0]["content"], max_turns=4)
    await graft.post(f"/graft/sessions/{claimed['id']}/end", json={})


async def work(graft: httpx.AsyncClient, openai: AsyncOpenAI) -> None:
    while True:
        try:
            await attempt(graft, openai)
        except httpx.ConnectError:
            return
        except httpx.TransportError:  # the connection ended with the step
            await asyncio.sleep(0.5)


async def main(url: str, token: str) -> None:
    set_tracing_disabled(True)
    headers = {"authorization": f"Bearer {token}"}
    limits = httpx.Limits(max_connections=AT_A_TIME)
    async with (
        httpx.AsyncClient(base_url=url, headers=headers, timeout=900, limits=limits) as graft,
        AsyncOpenAI(base_url=url, api_key=token, timeout=900) as openai,
    ):
        await asyncio.gather(*(work(graft, openai) for _ in range(AT_A_TIME)))
    print("the run is over")


asyncio.run(main(*sys.argv[1:]))

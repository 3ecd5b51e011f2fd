"""An AutoGen assistant."""

import argparse
import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--stream", action="store_true")
parser.add_argument("--output", default="text", help="or schema")
args = parser.parse_args()


class Product(BaseModel):
    value: int


async def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


model = OpenAIChatCompletionClient(
    model="policy",
    model_info=ModelInfo(
        vision=False,
        function_calling=True,
        json_output=True,
        family="unknown",
        structured_output=True,
    ),
)
# OpenAI's client takes a schema beside strict tools only
strict = args.output == "schema"
tools = [FunctionTool(one, one.__doc__, strict=strict) for one in (add, multiply)]
agent = AssistantAgent(
    "calculator",
    model,
    tools=tools,
    system_message="You calculate with tools.",
    model_client_stream=args.stream,
    output_content_type=Product if args.output == "schema" else None,
    reflect_on_tool_use=True,
    max_tool_iterations=5,
)
print(asyncio.run(agent.run(task=args.question)).messages[-1].content)

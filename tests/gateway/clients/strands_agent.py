"""A Strands agent, which always streams."""

import argparse

from pydantic import BaseModel
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--api", default="chat", help="or anthropic")
parser.add_argument("--output", default="text", help="or tool")
args = parser.parse_args()


class Product(BaseModel):
    """The product."""

    value: int


@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


@tool
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


if args.api == "anthropic":
    model = AnthropicModel(model_id="policy", max_tokens=500)
else:
    model = OpenAIModel(model_id="policy")
agent = Agent(
    model=model,
    tools=[add, multiply],
    system_prompt="You calculate with tools.",
    callback_handler=None,
)
result = agent(args.question, structured_output_model=Product if args.output == "tool" else None)
print(result.structured_output or str(result).strip())

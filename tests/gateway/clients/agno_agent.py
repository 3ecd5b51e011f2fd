"""An agno agent; `--output` says how its structured answer is asked for."""

import argparse

from agno.agent import Agent
from agno.models.anthropic import Claude
from agno.models.openai import OpenAIChat, OpenAIResponses
from pydantic import BaseModel

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--api", default="chat", help="or responses, anthropic")
parser.add_argument("--stream", action="store_true")
parser.add_argument("--output", default="text", help="or schema, object")
args = parser.parse_args()


class Product(BaseModel):
    value: int


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


models = {"chat": OpenAIChat, "responses": OpenAIResponses, "anthropic": Claude}
agent = Agent(
    model=models[args.api](id="policy"),
    tools=[add, multiply],
    instructions="You calculate with tools.",
    output_schema=None if args.output == "text" else Product,
    use_json_mode=args.output == "object",
    telemetry=False,
)
if args.stream:
    *_, last = agent.run(args.question, stream=True, yield_run_output=True)
    print(last.content)
else:
    print(agent.run(args.question).content)

"""A Haystack agent."""

import argparse
import os

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from pydantic import BaseModel

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--responses", action="store_true")
parser.add_argument("--stream", action="store_true")
parser.add_argument("--output", default="text", help="or schema")
args = parser.parse_args()


class Product(BaseModel):
    value: int


@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


@tool
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


generator = OpenAIResponsesChatGenerator if args.responses else OpenAIChatGenerator
name = "text_format" if args.responses else "response_format"
agent = Agent(
    chat_generator=generator(
        model="policy",
        api_base_url=os.environ["OPENAI_BASE_URL"],
        streaming_callback=(lambda chunk: None) if args.stream else None,
        generation_kwargs={name: Product} if args.output == "schema" else None,
    ),
    tools=[add, multiply],
    system_prompt="You calculate with tools.",
)
print(agent.run(messages=[ChatMessage.from_user(args.question)])["last_message"].text)

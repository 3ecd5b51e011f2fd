"""A LlamaIndex agent, whose server is one like OpenAI's; `--output` asks for a structured answer."""

import argparse
import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--stream", action="store_true")
parser.add_argument("--react", action="store_true", help="calls of tools are text")
parser.add_argument("--output", default="text", help="or function, schema")
args = parser.parse_args()


class Product(BaseModel):
    value: int


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


model = OpenAILike(
    model="policy",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    is_chat_model=True,
    is_function_calling_model=not args.react,
    should_use_structured_outputs=args.output == "schema",
    context_window=32768,
)
kind = ReActAgent if args.react else FunctionAgent
agent = kind(
    tools=[add, multiply],
    llm=model,
    system_prompt="You calculate with tools.",
    streaming=args.stream,
)


async def main() -> str:
    return str(await agent.run(args.question))


if args.output == "text":
    print(asyncio.run(main()))
else:
    answer = model.as_structured_llm(Product).complete(args.question)
    print(f"The answer is {answer.raw.value}.")

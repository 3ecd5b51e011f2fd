"""A pydantic-ai program: `--api` chooses the API, `--output` how a structured answer is asked for."""

import argparse

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--api", default="openai-chat", help="or openai-responses, anthropic")
parser.add_argument("--stream", action="store_true")
parser.add_argument("--output", default="text", help="or tool, native, prompted")
args = parser.parse_args()


class Product(BaseModel):
    value: int


outputs = {
    "text": str,
    "tool": ToolOutput(Product),
    "native": NativeOutput(Product, strict=True),
    "prompted": PromptedOutput(Product),
}
agent = Agent(
    f"{args.api}:policy", instructions="You calculate with tools.", output_type=outputs[args.output]
)


@agent.tool_plain
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


@agent.tool_plain
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


async def read(context, events) -> None:
    """Each answer is streamed to a handler."""
    async for _ in events:
        pass


handler = read if args.stream else None
print(agent.run_sync(args.question, event_stream_handler=handler).output)

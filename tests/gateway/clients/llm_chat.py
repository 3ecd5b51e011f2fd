"""The `llm` library with tools, or with `--schema` a structured answer."""

import argparse
import os

from llm.default_plugins.openai_models import Chat
from pydantic import BaseModel

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--stream", action="store_true")
parser.add_argument("--schema", action="store_true")
args = parser.parse_args()


class Product(BaseModel):
    value: int


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


model = Chat(
    "policy",
    model_name="policy",
    api_base=os.environ["OPENAI_BASE_URL"],
    supports_schema=True,
    supports_tools=True,
)
model.key = os.environ["OPENAI_API_KEY"]
if args.schema:
    print(model.prompt(args.question, schema=Product, stream=args.stream).text())
else:
    chain = model.chain(
        args.question,
        system="You calculate with tools.",
        tools=[add, multiply],
        stream=args.stream,
    )
    print("".join(chain).splitlines()[-1])

"""An instructor program: `--mode` is one of instructor's, in which the structured answer is asked for."""

import argparse

import instructor
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--mode", default="TOOLS")
parser.add_argument("--stream", action="store_true")
args = parser.parse_args()


class Product(BaseModel):
    """The product."""

    value: int


mode = instructor.Mode[args.mode]
messages = [{"role": "user", "content": args.question}]
if args.mode.startswith("ANTHROPIC"):
    client = instructor.from_anthropic(Anthropic(), mode=mode)
else:
    client = instructor.from_openai(OpenAI(), mode=mode)
how = {"model": "policy", "messages": messages, "max_retries": 1, "max_tokens": 500}
if args.stream:
    *_, product = client.create_partial(response_model=Product, **how)
else:
    product = client.create(response_model=Product, **how)
print(f"The answer is {product.value}.")

"""A loop around litellm.completion; `--provider anthropic` speaks the other dialect."""

import argparse
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from pydantic import BaseModel

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--provider", default="openai")
parser.add_argument("--stream", action="store_true")
parser.add_argument("--responses", action="store_true")
parser.add_argument("--output", default="text", help="or schema, object")
args = parser.parse_args()


class Product(BaseModel):
    value: int


NUMBERS = {"a": {"type": "number"}, "b": {"type": "number"}}
PARAMETERS = {"type": "object", "properties": NUMBERS, "required": ["a", "b"]}
TOOLS = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b}
FUNCTIONS = [{"name": name, "description": "", "parameters": PARAMETERS} for name in TOOLS]
formats = {"text": None, "schema": Product, "object": {"type": "json_object"}}


def results(calls):
    for id, name, arguments in calls:
        yield id, str(TOOLS[name](**json.loads(arguments)))


def chat() -> str:
    messages: list = [
        {"role": "system", "content": "You calculate with tools."},
        {"role": "user", "content": args.question},
    ]
    while True:
        answer = litellm.completion(
            f"{args.provider}/policy",
            messages,
            tools=[{"type": "function", "function": one} for one in FUNCTIONS],
            response_format=formats[args.output],
            stream=args.stream,
        )
        if args.stream:
            answer = litellm.stream_chunk_builder(list(answer))
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        calls = [(one.id, one.function.name, one.function.arguments) for one in message.tool_calls]
        for id, text in results(calls):
            messages.append({"role": "tool", "tool_call_id": id, "content": text})


def responses() -> str:
    items: list = [{"role": "user", "content": args.question}]
    while True:
        answer = litellm.responses(
            input=items,
            model=f"{args.provider}/policy",
            tools=[{"type": "function", **one} for one in FUNCTIONS],
        )
        items += [one.model_dump(exclude_none=True) for one in answer.output]
        called = [one for one in answer.output if one.type == "function_call"]
        if not called:
            return answer.output_text
        calls = [(one.call_id, one.name, one.arguments) for one in called]
        for id, text in results(calls):
            items.append({"type": "function_call_output", "call_id": id, "output": text})


print(responses() if args.responses else chat())

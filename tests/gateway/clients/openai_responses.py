"""A loop around responses.create; `--chained` sends only what is new, after previous_response_id."""

import argparse
import json

from openai import OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--chained", action="store_true")
args = parser.parse_args()

NUMBERS = {"a": {"type": "number"}, "b": {"type": "number"}}
PARAMETERS = {"type": "object", "properties": NUMBERS, "required": ["a", "b"]}
TOOLS = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b}
SCHEMAS = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in TOOLS]

client = OpenAI()
said: list = [{"role": "user", "content": args.question}]
before = None
while True:
    response = client.responses.create(
        model="policy",
        instructions="You calculate with tools.",
        input=said,
        tools=SCHEMAS,
        **({"previous_response_id": before} if before else {}),
    )
    if args.chained:
        said, before = [], response.id
    else:
        said += response.output
    calls = [item for item in response.output if item.type == "function_call"]
    if not calls:
        break
    for call in calls:
        result = TOOLS[call.name](**json.loads(call.arguments))
        said.append(
            {"type": "function_call_output", "call_id": call.call_id, "output": str(result)}
        )
print(response.output_text)

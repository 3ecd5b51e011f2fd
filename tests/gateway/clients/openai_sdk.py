"""A loop around chat.completions; `--stream` streams the answers, `--timeout` gives up on slow ones."""

import argparse
import json

from openai import OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--stream", action="store_true")
parser.add_argument("--timeout", type=float, default=60.0)
args = parser.parse_args()

NUMBERS = {"a": {"type": "number"}, "b": {"type": "number"}}
PARAMETERS = {"type": "object", "properties": NUMBERS, "required": ["a", "b"]}
TOOLS = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b}
SCHEMAS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in TOOLS
]

client = OpenAI(timeout=args.timeout, max_retries=10)
messages = [
    {"role": "system", "content": "You calculate with tools."},
    {"role": "user", "content": args.question},
]
while True:
    request = {"model": "policy", "messages": messages, "tools": SCHEMAS}
    if args.stream:
        with client.chat.completions.stream(**request) as stream:
            answer = stream.get_final_completion().choices[0].message
    else:
        answer = client.chat.completions.create(**request).choices[0].message
    messages.append(answer)
    if not answer.tool_calls:
        break
    for call in answer.tool_calls:
        result = TOOLS[call.function.name](**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
print(answer.content)

"""A loop around messages.create; `--stream` streams, `--runner` lets the SDK's tool runner loop."""

import argparse

from anthropic import Anthropic, beta_tool

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--stream", action="store_true")
parser.add_argument("--runner", action="store_true")
args = parser.parse_args()


@beta_tool
def add(a: float, b: float) -> str:
    """Add two numbers."""
    return str(a + b)


@beta_tool
def multiply(a: float, b: float) -> str:
    """Multiply two numbers."""
    return str(a * b)


client = Anthropic()
tools = {tool.name: tool for tool in (add, multiply)}
messages: list = [{"role": "user", "content": args.question}]
request = {"model": "policy", "max_tokens": 1000, "system": "You calculate with tools."}
while not args.runner:
    whole = {**request, "messages": messages, "tools": [one.to_dict() for one in tools.values()]}
    if args.stream:
        with client.messages.stream(**whole) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**whole)
    messages.append({"role": "assistant", "content": answer.content})
    results = [
        {"type": "tool_result", "tool_use_id": one.id, "content": tools[one.name].call(one.input)}
        for one in answer.content
        if one.type == "tool_use"
    ]
    if not results:
        break
    messages.append({"role": "user", "content": results})
if args.runner:
    runner = client.beta.messages.tool_runner(**request, messages=messages, tools=[add, multiply])
    answer = runner.until_done()
print("".join(block.text for block in answer.content if block.type == "text"))

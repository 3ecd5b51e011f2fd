"""A smolagents program: tool calls, or with `--code` Python that calls the tools."""

import argparse

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--code", action="store_true")
args = parser.parse_args()


@tool
def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


@tool
def multiply(a: float, b: float) -> float:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


kind = CodeAgent if args.code else ToolCallingAgent
agent = kind([add, multiply], OpenAIServerModel("policy"), verbosity_level=0)
print(agent.run(args.question))

"""An openai-agents program. `--team`: another agent is a tool of the first, called twice at once;
`--handoff`: the first agent hands the conversation over."""

import argparse
import asyncio

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--chat", action="store_true", help="chat completions, not responses")
parser.add_argument("--stream", action="store_true")
parser.add_argument("--team", action="store_true")
parser.add_argument("--handoff", action="store_true")
args = parser.parse_args()


@function_tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


@function_tool
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


worker = Agent("worker", instructions="You do one sum.", tools=[add], model="policy")
team = [worker.as_tool("ask_worker", "Lets a worker do one sum.")]
boss = Agent(
    "boss",
    instructions="You calculate with tools.",
    tools=team if args.team else [add, multiply],
    model="policy",
)
desk = Agent("desk", instructions="You hand over.", handoffs=[boss], model="policy")
first = desk if args.handoff else boss
config = RunConfig(
    model_provider=OpenAIProvider(use_responses=not args.chat), tracing_disabled=True
)


async def main() -> str:
    if not args.stream:
        return (await Runner.run(first, args.question, run_config=config)).final_output
    result = Runner.run_streamed(first, args.question, run_config=config)
    async for _ in result.stream_events():
        pass
    return result.final_output


print(asyncio.run(main()))

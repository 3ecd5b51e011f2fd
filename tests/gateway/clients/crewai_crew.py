"""A CrewAI crew of one agent."""

import argparse
import os

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}
os.environ |= {"CREWAI_TRACING_ENABLED": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from pydantic import BaseModel

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--model", default="openai/policy")
parser.add_argument("--stream", action="store_true")
parser.add_argument("--output", default="text", help="or schema")
args = parser.parse_args()


class Product(BaseModel):
    value: int


@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


@tool
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


worker = Agent(
    role="calculator",
    goal="You calculate with tools.",
    backstory="None.",
    tools=[add, multiply],
    llm=LLM(args.model, stream=args.stream),
)
task = Task(
    description=args.question,
    expected_output="A number.",
    agent=worker,
    output_pydantic=Product if args.output == "schema" else None,
)
print(Crew(agents=[worker], tasks=[task]).kickoff().raw)

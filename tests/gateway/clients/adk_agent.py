"""A Google ADK agent, whose models are litellm's."""

import argparse
import asyncio
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from pydantic import BaseModel

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--provider", default="openai")
parser.add_argument("--stream", action="store_true")
parser.add_argument("--output", default="text", help="or schema, schema-and-tools")
args = parser.parse_args()


class Product(BaseModel):
    value: int


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


agent = LlmAgent(
    name="calculator",
    model=LiteLlm(f"{args.provider}/policy"),
    instruction="You calculate with tools.",
    tools=[] if args.output == "schema" else [add, multiply],
    output_schema=None if args.output == "text" else Product,
)


async def main() -> str:
    runner = InMemoryRunner(agent, app_name="calculator")
    session = await runner.session_service.create_session(app_name="calculator", user_id="user")
    mode = StreamingMode.SSE if args.stream else StreamingMode.NONE
    text = ""
    async for event in runner.run_async(
        user_id="user",
        session_id=session.id,
        new_message=types.UserContent(args.question),
        run_config=RunConfig(streaming_mode=mode),
    ):
        if event.is_final_response() and event.content:
            text = "".join(part.text or "" for part in event.content.parts if not part.thought)
    return text


print(asyncio.run(main()))

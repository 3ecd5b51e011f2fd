"""An OpenHands agent with its terminal."""

import argparse
import os
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--model", default="openai/policy")
parser.add_argument("--stream", action="store_true")
args = parser.parse_args()

is_anthropic = args.model.startswith("anthropic")
model = LLM(
    model=args.model,
    base_url=os.environ["ANTHROPIC_BASE_URL" if is_anthropic else "OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    stream=args.stream,
    num_retries=0,
)
agent = Agent(llm=model, tools=[Tool(name=TerminalTool.name)])
conversation = Conversation(
    agent=agent,
    workspace=Path.cwd(),
    visualizer=None,
    token_callbacks=[lambda chunk: None] if args.stream else None,
)
conversation.send_message(args.question)
conversation.run()
print(conversation.state.events[-1].observation.text)

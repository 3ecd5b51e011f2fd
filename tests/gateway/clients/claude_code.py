"""Claude Code through its SDK; `--agents` gives it a sub-agent."""

import argparse
import asyncio

from claude_agent_sdk import AgentDefinition, ClaudeAgentOptions, ResultMessage, query

parser = argparse.ArgumentParser()
parser.add_argument("question")
parser.add_argument("--agents", action="store_true")
args = parser.parse_args()

ADDER = AgentDefinition("Adds numbers.", prompt="You do one sum with Bash.", tools=["Bash"])
TOOLS = ["Bash", "Agent"] if args.agents else ["Bash"]
options = ClaudeAgentOptions(
    model="policy",
    system_prompt="You calculate with Bash.",
    tools=TOOLS,
    allowed_tools=TOOLS,
    setting_sources=[],
    agents={"adder": ADDER} if args.agents else None,
)


async def main() -> None:
    async for message in query(prompt=args.question, options=options):
        if isinstance(message, ResultMessage):
            print(message.result)


asyncio.run(main())

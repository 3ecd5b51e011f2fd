"""A graft environment in OpenRLHF: --train.agent_func_path examples/trainers/openrlhf_agent.py."""

from __future__ import annotations

from graft_interop.openrlhf import agent_executor

AgentExecutor = agent_executor(
    "game:GuessTheNumber-v0", wrappers={"tools": {"use": "calculator", "format": "gem"}}
)

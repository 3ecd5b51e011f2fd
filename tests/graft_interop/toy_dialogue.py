"""A verifiers env that leads a dialogue: guess 3, "higher" or "lower" comes back as a user turn."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from toy_taskset import ToyHarness, ToyTaskset

__all__ = ["DialogueEnv", "ToyHarness", "ToyTaskset"]


class DialogueConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class DialogueEnv(vf.Env[DialogueConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != "3":
                segment = await interaction.turn("lower" if segment.last_reply > "3" else "higher")
        interaction.trace.record_reward("game", float(segment.last_reply == "3"), 1.0)

"""A verifiers harness that does not only append: it calls helpers, compacts, and has a fixed judge.

"delegate"   a helper gets 20+3=, with tools of its own; its reply comes back as a user turn
"compact"    the history becomes one message that sums it up
"both"       two messages of the user's at once
"""

from __future__ import annotations

from typing import Any

import httpx
import verifiers.v1 as vf
from toy_taskset import CALCULATOR, ToyHarness, ToyTaskset

__all__ = ["TeamEnv", "TeamHarness", "ToyTaskset"]

HELPER = [{"role": "system", "content": "Help."}, {"role": "user", "content": "20+3="}]


class TeamHarness(ToyHarness):
    async def launch(self, *given: Any, **_: Any) -> Any:
        ctx, _trace, _runtime, endpoint, secret, _mcp_urls, data = given
        system, prompt = self.resolve_prompt(data)
        opening = [{"role": "system", "content": system}] if system else []
        messages: list[Any] = [*opening, {"role": "user", "content": prompt}]

        async def complete(messages: list[Any], tools: list[Any]) -> Any:
            body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            headers = {"Authorization": f"Bearer {secret}"}
            reply = await http.post(f"{endpoint}/chat/completions", json=body, headers=headers)
            reply.raise_for_status()
            return reply.json()["choices"][0]["message"]

        async with httpx.AsyncClient(timeout=60) as http:
            while True:
                message = await complete(messages, [])
                messages.append(message)
                match message["content"]:
                    case "delegate":
                        helped = await complete(HELPER, [CALCULATOR])
                        report = f"The helper says {helped['content']}."
                        messages.append({"role": "user", "content": report})
                    case "compact":
                        summary = f"So far {len(messages)} messages. {prompt}"
                        messages = [*opening, {"role": "user", "content": summary}]
                    case "both":
                        messages += [{"role": "user", "content": word} for word in ("One.", "Two.")]
                    case "on":
                        messages.append({"role": "user", "content": "Go on."})
                    case _:
                        return vf.ProgramResult(0, "", "")


class TeamConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class TeamEnv(vf.Env[TeamConfig]):
    """The judge is fixed, not trained."""

    async def setup(self, agents: Any) -> None:
        agents.judge.trainable = False

    async def run(self, task: Any, agents: Any) -> None:
        await agents.player.run(task)
        await agents.judge.run(task)

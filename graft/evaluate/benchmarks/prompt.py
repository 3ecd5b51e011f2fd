r"""The system prompt of ARPO's benchmarks: its tags, and the available tools.

    system   Work the task out step by step. ... <answer>It is \boxed{42}.</answer>
             You can call tools. ...
             - <python>...</python>: Run Python code ... At most 5 times.
    user     What is 6 * 7?

It is rendered when an episode begins, from the tools around the question; without tools
(`graft eval --no-tools`) it does not mention them. `graft eval --prompt NAME` gives it another text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graft.envs.base import Wrapper, as_messages
from graft.envs.tool_env import ToolEnv
from graft.protocols import Env, Observation
from graft.types import Message, Task

FORM = (
    "Work the task out step by step. Write what you think inside <think> and </think>, as often as "
    "you need. At the end write the answer once, inside <answer> and </answer>, with the result alone "
    "in \\boxed{}, like this: <answer>It is \\boxed{42}.</answer>"
)
TOOLS = (
    "You can call tools between your thoughts. Write the call in the tool's tags and stop there; what "
    "the tool gives back is put behind it, inside <result> and </result>. Never write a result "
    "yourself. The tools:"
)


class SystemPrompt(Wrapper):
    """The outermost wrapper: the system prompt before the question, as a message of its own.

    `text` is the prompt; empty: rendered from the tools. A system message of the question is replaced.
    """

    saved = ("prompt",)

    def __init__(self, env: Env, *, text: str = "") -> None:
        super().__init__(env)
        self.text = text
        self.prompt: list[Message] = []

    def reset(self, seed: int | None = None, **options: Any) -> tuple[Observation, dict[str, Any]]:
        observation, info = self.env.reset(seed, **options)
        system: Message = {"role": "system", "content": self.text or system_prompt(self.env)}
        others = [one for one in as_messages(observation) if one["role"] != "system"]
        self.prompt = [system, *others]
        return self.prompt, info

    def task(self) -> Task:
        task: Task = self.env.task()
        return replace(task, prompt=as_messages(self.prompt)) if self.prompt else task


def system_prompt(env: Any) -> str:
    """The system prompt of this environment."""
    lines: list[str] = []
    while isinstance(env, Wrapper):
        if isinstance(env, ToolEnv):
            limit = "" if env.max_uses is None else f" At most {env.max_uses} times."
            for name, tool in env.tools.items():
                style = env.styles[name]
                lines.append(f"- {style.open}...{style.close}: {tool.description}{limit}")
        env = env.env
    return "\n".join([FORM, TOOLS, *reversed(lines)] if lines else [FORM])

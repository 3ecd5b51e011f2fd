"""Any env with tools: the policy may call one in the middle of its text and read the result.

    policy  "I need 34*5. <calculator>34*5</calculator>"      ends at a close string: a call
    env     "<result>170</result>"                           appended inline, never trained
    policy  "<answer>170</answer>"                            no call: goes to the inner env

A turn is a call if it ends with a close string. The call is what stands after the last open string;
a close string without an open one is a call too, a malformed one. Everything else is the inner
env's business, half-written calls included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from graft.envs.base import Wrapper, as_messages, limit_turns
from graft.protocols import Env, Observation, Tool
from graft.tools import ERROR, is_error
from graft.types import Task, Turn


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How calls to one tool and their results are written. "{}" stands for the result."""

    open: str
    close: str
    result: str
    error: str | None = None
    """Written in place of any error message, for alphabets too small to spell one."""
    spent: str = ""
    """The answer to calls beyond `max_uses`."""

    def render(self, result: str) -> str:
        if self.error is not None and is_error(result):
            return self.error
        return self.result.replace("{}", result)


def tagged(name: str) -> CallStyle:
    """<calculator>12*3</calculator> is answered with <result>36</result>."""
    return CallStyle(
        open=f"<{name}>",
        close=f"</{name}>",
        result="<result>{}</result>",
        spent="<result>No calls are left. Give the final answer.</result>",
    )


COMPACT = CallStyle(open="[", close="]", result="{};", error="?;", spent="?;")
"""[12*3] is answered with 36; and every fault with ?; for models that read single characters."""


class Call(NamedTuple):
    tool: str
    content: str | None
    """None: the close string came without an open one."""


class ToolEnv(Wrapper):
    """`env` with `tools`. Calls do not use up turns of the inner env.

    Calls beyond `max_uses` are counted and answered with the style's `spent` text, and the episode
    goes on, so that the policy can still answer. Beyond the inner env's turns, the uses and one
    such refusal the episode is truncated: `max_turns` = inner max_turns + max_uses + 1.
    `max_uses=None` sets no limit, then only the caller's budget ends a policy that never answers.

    Each Turn's info has "tool_uses" (calls so far), and for a call also "tool" and "tool_ok". An
    observation of the inner env that enters the context another way says so in "observe_as".
    """

    shared = ("tools", "styles")
    saved = ("turns", "tool_uses", "is_over")

    def __init__(
        self,
        env: Env,
        tools: Sequence[Tool],
        *,
        styles: Mapping[str, CallStyle] | None = None,
        max_uses: int | None = 10,
        instructions: str = "",
    ) -> None:
        super().__init__(env)
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) != len(tools):
            raise ValueError(f"two tools share a name: {[tool.name for tool in tools]}")
        given = styles or {}
        self.styles = {name: given.get(name) or tagged(name) for name in self.tools}
        self.max_uses = max_uses
        self.instructions = instructions
        inner_turns: int | None = getattr(env, "max_turns", None)
        self.max_turns = (
            None if max_uses is None or inner_turns is None else inner_turns + max_uses + 1
        )
        closes = [style.close for style in self.styles.values()]
        self.stop = tuple(dict.fromkeys((*env.stop, *closes)))
        self.observe_as = "inline"
        self.blocking = env.blocking or any(getattr(tool, "blocking", False) for tool in tools)
        self.turns = 0
        self.tool_uses = 0
        self.is_over = True

    def reset(self, seed: int | None = None) -> tuple[Observation, dict[str, Any]]:
        observation, info = self.env.reset(seed)
        self.turns = self.tool_uses = 0
        self.is_over = False
        return with_instructions(observation, self.instructions), {**info, "tool_uses": 0}

    def step(self, action: str) -> Turn:
        if self.is_over:
            raise RuntimeError("no episode is running; call reset() first")
        call = find_call(action, self.styles)
        turn = self._pass_on(action) if call is None else self._answer(call)
        self.turns += 1
        turn = limit_turns(turn, self.turns, self.max_turns)
        self.is_over = turn.is_over
        return turn

    def task(self) -> Task:
        task: Task = self.env.task()
        observation: Observation = list(task.prompt)
        return replace(task, prompt=as_messages(with_instructions(observation, self.instructions)))

    def _pass_on(self, action: str) -> Turn:
        turn: Turn = self.env.step(action)
        info = {**turn.info, "tool_uses": self.tool_uses}
        if self.env.observe_as != self.observe_as and not turn.is_over:
            info.setdefault("observe_as", self.env.observe_as)
        return turn._replace(info=info)

    def _answer(self, call: Call) -> Turn:
        style = self.styles[call.tool]
        self.tool_uses += 1
        if self.max_uses is not None and self.tool_uses > self.max_uses:
            text, is_ok = style.spent, False
        else:
            if call.content is None:
                result = f"{ERROR}{style.close} without {style.open}"
            else:
                result = self.tools[call.tool](call.content)
            text, is_ok = style.render(result), not is_error(result)
        info = {"tool": call.tool, "tool_ok": is_ok, "tool_uses": self.tool_uses}
        return Turn(text, info=info)


def find_call(action: str, styles: Mapping[str, CallStyle]) -> Call | None:
    """The call that an action ends with, if it ends with one.

    >>> find_call("so [34*5]", {"calculator": COMPACT})
    Call(tool='calculator', content='34*5')
    """
    text = action.rstrip()
    ending = {name: style for name, style in styles.items() if text.endswith(style.close)}
    if not ending:
        return None
    # tools may share a close string: the one opened last is the one being closed
    opened = {
        name: text.rfind(style.open, 0, len(text) - len(style.close))
        for name, style in ending.items()
    }
    name = max(opened, key=opened.__getitem__)
    if opened[name] < 0:
        return Call(name, None)
    style = ending[name]
    return Call(name, text[opened[name] + len(style.open) : len(text) - len(style.close)])


def with_instructions(observation: Observation, instructions: str) -> Observation:
    """`instructions` on a line of their own at the end of the prompt."""
    if not instructions:
        return observation
    if isinstance(observation, str):
        return f"{observation}\n{instructions}"
    *before, last = observation
    return [*before, {**last, "content": f"{last['content']}\n{instructions}"}]

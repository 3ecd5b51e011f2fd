"""Does every tool answer? Each is called once, with a harmless input.

    pass  tool python       "print(1)" -> "1" in 0.4 s
    fail  tool search       Error: the search service at http://... does not answer

Bundled tools get an input that they must understand. Any other tool gets arguments made up from its
schema, so an error text may be the right answer. A tool of an MCP server is not called, since its effects
are unknown; its server lists its tools again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from typing import Any

from graft.doctor.deadline import checked
from graft.envs.base import inner_envs
from graft.envs.tool_env import ToolEnv
from graft.protocols import Env
from graft.registry import resolve
from graft.tools import TOOLS, has_state, is_error
from graft.tools.calling import call_tool
from graft.tools.schema import parameters_of
from graft.train.monitor.check import FAIL, PASS, WARN, Check
from graft.user_code import short

INPUTS = {"calculator": "1+1", "python": "print(1)", "search": "a city by a river"}
"""Of the tools in `graft.tools.TOOLS`."""
MADE_UP: Mapping[str, Any] = {
    "string": "test",
    "integer": 1,
    "number": 1.0,
    "boolean": False,
    "array": [],
    "object": {},
}
"""JSON type -> a value of it."""


def tools_of(env: Env) -> list[Any]:
    """The tools of all wrappers, the innermost first."""
    tool_envs = [one for one in (env, *inner_envs(env)) if isinstance(one, ToolEnv)]
    return [tool for one in reversed(tool_envs) for tool in one.tools.values()]


def tool_checks(env: Env, deadline: float, seed: int = 0) -> Iterator[Check]:
    """A line per tool, called in the first state of a task; the environment is closed afterwards."""
    with closing(env):
        with suppress(Exception):  # where it fails the line `env` says so
            env.reset(seed)  # a tool that is a method reads what `pose` set
        for tool in tools_of(env):
            name = f"tool {tool.name}"
            yield from checked(name, lambda tool=tool, name=name: answer_of(tool, name), deadline)


def answer_of(tool: Any, name: str) -> Check:
    started = time.perf_counter()
    if hasattr(tool, "link"):  # of an MCP server
        listed = [one["name"] for one in tool.link.tools()]
        took = f"{time.perf_counter() - started:.1f} s"
        if tool.called in listed:
            return Check(
                name, PASS, f"its server answers and lists it, in {took}; it was not called"
            )
        seen = f"its server answers in {took} but no longer lists it: {', '.join(listed)}"
        return Check(name, FAIL, seen, "start the server that has it, or leave the tool out")
    if has_state(tool):
        tool.reset()
    is_ours = tool.name in INPUTS and isinstance(tool, resolve(tool.name, TOOLS, "tool"))
    given = INPUTS[tool.name] if is_ours else arguments_for(tool)
    answer = call_tool(tool, given)
    took = f"{time.perf_counter() - started:.1f} s"
    seen = f"{short(given)} -> {short(answer)} in {took}"
    # a replayed cache answers only recorded queries, and this is none
    is_replay = getattr(tool, "cache_mode", "") == "replay"
    if is_ours and is_error(answer) and not is_replay:
        remedy = "the policy would get the same answer at every call: repair what the text names"
        return Check(name, FAIL, seen, remedy)
    is_bundled = type(tool).__module__.startswith(
        ("graft.envs.", "graft_envs.")
    )  # it works and refuses this input
    if not is_ours and is_error(answer) and not is_bundled:
        return Check(
            name, WARN, seen, "fine if the made-up input is the reason; else repair the tool"
        )
    return Check(name, PASS, seen)


def arguments_for(tool: Any) -> dict[str, Any]:
    """Values for what a tool's schema requires.

    {"properties": {"city": {"type": "string"}}, "required": ["city"]} -> {"city": "test"}
    """
    parameters = parameters_of(tool)
    known = parameters.get("properties", {})
    return {
        name: _value(known.get(name, {}))
        for name in parameters.get("required", [])
        if name in known
    }


def _value(described: Mapping[str, Any]) -> Any:
    if described.get("enum"):
        return described["enum"][0]
    kind = described.get("type", "string")
    return MADE_UP.get(kind[0] if isinstance(kind, list) else kind, "test")

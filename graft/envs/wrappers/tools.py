"""Wrappers that add tools to an env: GEM's by name, with its rewards and limits, or any others."""

from __future__ import annotations

import json
import threading
from functools import lru_cache
from typing import Any

from graft.envs.call_rewards import MAX_TOOL_REWARD
from graft.envs.tool_env import ToolEnv
from graft.protocols import Env
from graft.registry import check_options
from graft.tools import has_state, make_tools
from graft.tools.formats import CallStyle, plain

MAX_USES = 5


def tools(env: Env, *, use: Any, **options: Any) -> ToolEnv:
    """Any tools in any format: {"tools": {"use": ["calculator", {"search": {...}}], ...}}.

    `use` is what `make_tools` takes, the rest are ToolEnv's options.
    """
    check_options(ToolEnv, options, "wrapper 'tools'", given=("env", "tools"))
    return ToolEnv(env, _shared(use), **{"counters": True, "instructions": None, **options})


def python_tool(
    env: Env,
    *,
    tool_reward: float = 0.05,
    tool_success_reward: float = 0.25,
    max_tool_reward: float | None = MAX_TOOL_REWARD,
    max_uses: int | None = MAX_USES,
    instructions: str | None = None,
    instructions_at: str = "start",
    **arguments: Any,
) -> ToolEnv:
    """Python in <python> tags or a fence; `arguments` are PythonTool's (timeout=5, ...).

    A call earns what it earns in GEM, but all calls of an episode at most `max_tool_reward`: in GEM
    (None) five idle calls earn 1.5, a right answer 1. GEM's instructions follow the task:
    `instructions_at="end"`.
    """
    return _gem(
        env,
        _shared({"python": {"timeout": 5.0, **arguments}})[0],
        "Code execution result: {}",
        tool_reward=tool_reward,
        tool_success_reward=tool_success_reward,
        max_tool_reward=max_tool_reward,
        max_uses=max_uses,
        instructions=instructions,
        instructions_at=instructions_at,
    )


def python_tool_no_int_reward(env: Env, **arguments: Any) -> ToolEnv:
    """The same, and calls earn nothing."""
    return python_tool(env, **{"tool_reward": 0.0, "tool_success_reward": 0.0, **arguments})


def python_tool_no_int_reward_last_line_error(env: Env, **arguments: Any) -> ToolEnv:
    """The same, and of a traceback only the last line is shown."""
    return python_tool_no_int_reward(env, **{"keep_error_last_line": True, **arguments})


def search_tool(
    env: Env,
    *,
    tool_reward: float = 0.3,
    max_tool_reward: float | None = MAX_TOOL_REWARD,
    max_uses: int | None = MAX_USES,
    instructions: str | None = None,
    instructions_at: str = "start",
    **arguments: Any,
) -> ToolEnv:
    """Search in <search> tags; `arguments` are SearchTool's (corpus=, url=, topk=3, ...).

    `max_tool_reward` and `instructions_at` as in `python_tool`.
    """
    return _gem(
        env,
        _shared({"search": arguments})[0],
        "{}",
        tool_reward=tool_reward,
        max_tool_reward=max_tool_reward,
        max_uses=max_uses,
        instructions=instructions,
        instructions_at=instructions_at,
    )


def search_tool_no_int_reward(env: Env, **arguments: Any) -> ToolEnv:
    """The same, and calls earn nothing."""
    return search_tool(env, **{"tool_reward": 0.0, **arguments})


def _gem(env: Env, tool: Any, result: str, **options: Any) -> ToolEnv:
    style = plain(tool.name)
    styles = {tool.name: CallStyle(style.open, style.close, result, None, style.spent, style.last)}
    return ToolEnv(env, [tool], format="gem", styles=styles, counters=True, **options)


def _shared(use: Any) -> list[Any]:
    """The same tools for all envs with the same `use`: a recipe builds an env per task, but an index
    is opened once and an MCP server started once."""
    try:
        written = json.dumps(use)
    except TypeError:  # holds an object, which may not be safe to share
        return make_tools(use)
    with _building:
        tools = _built(written)
    return [tool.fork() if has_state(tool) else tool for tool in tools]


_building = threading.Lock()


@lru_cache(maxsize=32)
def _built(written: str) -> list[Any]:
    return make_tools(json.loads(written))

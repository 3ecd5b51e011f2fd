"""graft: reinforcement learning for language-model agents, from a laptop CPU to a cluster.

    policy  = graft.load("Qwen/Qwen3-0.6B")
    engine  = graft.Engine(policy)
    learner = graft.Learner(policy, algo="grpo", lr=1e-6)
    for step in range(100):
        episodes = graft.collect(engine, "game:GuessTheNumber-v0", tasks=16, samples=8)
        metrics = learner.step(episodes)

Names are imported when they are first used: `import graft` loads neither torch nor transformers.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from graft.version import __version__

if TYPE_CHECKING:
    from graft.api.agents import agent, rollout
    from graft.api.collect import acollect, collect
    from graft.api.engine import PolicyEngine as Engine
    from graft.api.evaluate import Scores, evaluate
    from graft.api.generate import Generation, agenerate, generate
    from graft.api.learner import PolicyLearner as Learner
    from graft.api.policy import Policy, load
    from graft.api.runs import RunResult, sft, train
    from graft.config import load_config as load_recipe
    from graft.envs import make, make_vec, register
    from graft.envs.base import BaseEnv
    from graft.envs.multi_agent.base import MultiAgentEnv
    from graft.structure import Structure
    from graft.tools.function import tool
    from graft.types import Episode, Sampling, Task, Trajectory, Turn

__all__ = [
    "BaseEnv",
    "Engine",
    "Episode",
    "Generation",
    "Learner",
    "MultiAgentEnv",
    "Policy",
    "RunResult",
    "Sampling",
    "Scores",
    "Structure",
    "Task",
    "Trajectory",
    "Turn",
    "__version__",
    "acollect",
    "agenerate",
    "agent",
    "collect",
    "evaluate",
    "generate",
    "load",
    "load_recipe",
    "make",
    "make_vec",
    "register",
    "rollout",
    "sft",
    "tool",
    "train",
]

_LAZY = {
    "BaseEnv": "graft.envs.base:BaseEnv",
    "Engine": "graft.api.engine:PolicyEngine",
    "Episode": "graft.types:Episode",
    "Generation": "graft.api.generate:Generation",
    "Learner": "graft.api.learner:PolicyLearner",
    "MultiAgentEnv": "graft.envs.multi_agent.base:MultiAgentEnv",
    "Policy": "graft.api.policy:Policy",
    "RunResult": "graft.api.runs:RunResult",
    "Sampling": "graft.types:Sampling",
    "Structure": "graft.structure:Structure",
    "Scores": "graft.api.evaluate:Scores",
    "Task": "graft.types:Task",
    "Trajectory": "graft.types:Trajectory",
    "Turn": "graft.types:Turn",
    "acollect": "graft.api.collect:acollect",
    "agenerate": "graft.api.generate:agenerate",
    "agent": "graft.api.agents:agent",
    "collect": "graft.api.collect:collect",
    "generate": "graft.api.generate:generate",
    "load": "graft.api.policy:load",
    "load_recipe": "graft.config:load_config",
    "make": "graft.envs:make",
    "make_vec": "graft.envs:make_vec",
    "register": "graft.envs:register",
    "sft": "graft.api.runs:sft",
    "tool": "graft.tools.function:tool",
}
_PACKAGES = ("evaluate", "rollout", "train")
"""Functions that are packages too; see `graft.callable_package`."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"graft.{name}")
    from graft.registry import load
    from graft.spelling import nearest

    if name not in _LAZY:
        hint = None if name.startswith("_") else nearest(name, [*__all__])
        meant = f"; did you mean {hint!r}?" if hint else ""
        raise AttributeError(f"module 'graft' has no attribute {name!r}{meant}")
    return load(_LAZY[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "IPython" in sys.modules:
    from graft.api.tracebacks import shorten_tracebacks

    shorten_tracebacks()

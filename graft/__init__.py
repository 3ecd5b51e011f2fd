"""graft: reinforcement learning for language-model agents, from a laptop CPU to a cluster."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graft.version import __version__

if TYPE_CHECKING:
    from graft.config import load_config as load_recipe
    from graft.envs import make, make_vec, register
    from graft.tools.function import tool
    from graft.train.session import train_recipe as train

__all__ = ["__version__", "load_recipe", "make", "make_vec", "register", "tool", "train"]

_LAZY = {
    "load_recipe": "graft.config:load_config",
    "make": "graft.envs:make",
    "make_vec": "graft.envs:make_vec",
    "register": "graft.envs:register",
    "tool": "graft.tools.function:tool",
}
"""Looked up when first used: importing graft imports neither torch nor transformers."""


def __getattr__(name: str) -> Any:
    if name == "train":  # a package that can be called, see there
        return import_module("graft.train")
    from graft.registry import load, nearest

    if name not in _LAZY:
        hint = None if name.startswith("_") else nearest(name, [*__all__])
        meant = f"; did you mean {hint!r}?" if hint else ""
        raise AttributeError(f"module 'graft' has no attribute {name!r}{meant}")
    return load(_LAZY[name])

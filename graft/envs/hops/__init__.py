"""Questions about an invented town that take several searches and a multiplication."""

from __future__ import annotations

from graft.envs.hops.env import HopsTask

__all__ = ["HopsTask"]

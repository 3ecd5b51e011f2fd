"""Questions over a made town that take several searches and a product."""

from __future__ import annotations

from graft.envs.hops.env import HopsTask

__all__ = ["HopsTask"]

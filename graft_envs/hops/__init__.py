"""Questions about an invented town that take several searches and a multiplication."""

from __future__ import annotations

from graft.envs.entry import EnvEntry

HOPS = {"hops": EnvEntry("graft_envs.hops.env:HopsTask", turns=7, needs=("sandbox",))}

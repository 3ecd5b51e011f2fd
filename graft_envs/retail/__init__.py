"""A shop's customer service by tau-bench's rules, `tau:retail`. Start in env.py."""

from __future__ import annotations

from graft.envs.entry import EnvEntry

RETAIL: dict[str, EnvEntry] = {
    "tau:retail": EnvEntry("graft_envs.retail.env:RetailTask", turns=30),
}

"""A graft environment in RL2: rollout.env_path=examples/trainers/rl2_env.py."""

from __future__ import annotations

from graft_interop.rl2 import generator

generate = generator("game:GuessTheNumber-v0", wrappers="concat")

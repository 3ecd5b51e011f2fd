"""The games of GEM's gym, `game:STEM-v0[-VARIANT]`: all offline, each its own file."""

from __future__ import annotations

from graft.envs.games.variants import GAMES

__all__ = ["GAMES"]

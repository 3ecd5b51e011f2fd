"""GEM's games, `game:STEM-v0[-VARIANT]`: all offline, one file each; read `base.py` first."""

from __future__ import annotations

from graft.envs.games.variants import GAMES

__all__ = ["GAMES"]

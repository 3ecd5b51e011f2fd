"""The games of GEM's gym, `game:STEM-v0[-VARIANT]`: all offline, each its own file."""

from __future__ import annotations

from graft.envs.catalogue import Entry
from graft.envs.games.list_a import GAMES_A
from graft.envs.games.list_b import GAMES_B

GAMES: dict[str, Entry] = {**GAMES_A, **GAMES_B}

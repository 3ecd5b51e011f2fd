"""Games for several agents, `selfplay:...`; `graft.envs.multi_agent` has the base class of your own."""

from __future__ import annotations

from graft.envs.entry import EnvEntry

SELF_PLAY: dict[str, EnvEntry] = {
    "selfplay:tictactoe": EnvEntry("graft_envs.selfplay.tictactoe:TicTacToe", turns=5),
    "selfplay:split": EnvEntry("graft_envs.selfplay.split:SplitItems", turns=3),
}

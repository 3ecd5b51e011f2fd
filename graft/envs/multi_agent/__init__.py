"""Games for several agents, `selfplay:...`, and the base class of your own. Start in base.py."""

from __future__ import annotations

from graft.envs.entry import EnvEntry

SELF_PLAY: dict[str, EnvEntry] = {
    "selfplay:tictactoe": EnvEntry("graft.envs.multi_agent.tictactoe:TicTacToe", turns=5),
    "selfplay:split": EnvEntry("graft.envs.multi_agent.split:SplitItems", turns=3),
}

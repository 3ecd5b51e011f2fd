"""A tiny policy and two environments for the tests of the facade."""

from __future__ import annotations

from typing import Any

import graft

SHAPE = {
    "width": 32, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 16, "ff": 64, "max_positions": 64,
}  # fmt: skip


class Letters(graft.BaseEnv):
    """ "b?" -> "b" earns 1."""

    def pose(self) -> str:
        self.answer = self.rng.choice("abc")
        return f"{self.answer}?"

    def respond(self, action: str) -> graft.Turn:
        return graft.Turn(reward=float(action == self.answer), terminated=True)


class Ask(graft.BaseEnv):
    """ "?" -> the policy writes "?", reads the letter and writes it: two turns."""

    observe_as = "inline"
    max_turns = 2

    def pose(self) -> str:
        self.answer = self.rng.choice("abc")
        return "?"

    def respond(self, action: str) -> graft.Turn:
        if "?" in action:
            return graft.Turn(self.answer)
        return graft.Turn(reward=float(action == self.answer), terminated=True)


def new_policy(**options: Any) -> graft.Policy:
    return graft.load(**{"shape": SHAPE, "alphabet": "abc?", **options})

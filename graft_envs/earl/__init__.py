"""EARL's tasks, `earl:NAME`: arithmetic, countdown, CalcBench, sorting, and rows of EARL's own files.

Every id takes `split="train"` or "test", which also selects the test parameters where the original's
differ. Calls are written in tags; `syntax="actions"` takes them from actions beyond the vocabulary,
and the sorting tasks also take `syntax="words"`, calls in plain words. The calculator tasks take
`tool=False` to leave the calculator out. The original begins every answer with "Let me solve this step
by step.\\n", which a recipe adds (`task.prefill`).
"""

from __future__ import annotations

from graft.envs.entry import EnvEntry

CALC_TURNS = 34  # 32 calls, one refusal, the answer
SORT_TURNS = 32

_DRAWN = (
    *("arithmetic-digit", "arithmetic-lang1", "arithmetic-lang2", "arithmetic-lang3"),
    *("countdown-0", "countdown-1", "countdown-2"),
    *("calc-arithmetic", "calc-countdown", "calc-count"),
    *("calc-modulo", "calc-repeat", "calc-sudoku"),
)
_SORTED = ("order", "sort", "sort-4", "sort-4-5", "compare")
_GSM = ("data:gsm_8k_rewrite",)
_MIX = ("calc-arithmetic", "calc-countdown", "calc-gsm8k", "calc-count")
"""The four tasks that the paper reports; the original's script concatenates three more."""
_COMBINED = (*_MIX, "calc-modulo", "calc-repeat", "calc-sudoku")


def _calc(*tasks: str, needs: tuple[str, ...] = ()) -> EnvEntry:
    return EnvEntry("graft_envs.earl.calc:calc_task", {"tasks": tasks}, CALC_TURNS, needs)


EARL: dict[str, EnvEntry] = {
    **{f"earl:{name}": _calc(name) for name in _DRAWN},
    "earl:calc-gsm8k": _calc("calc-gsm8k", needs=_GSM),
    "earl:calc": _calc(*_MIX, needs=_GSM),
    "earl:calc-combined": _calc(*_COMBINED, needs=_GSM),
    **{
        f"earl:{name}": EnvEntry("graft_envs.earl.sorting:Sorting", {"name": name}, SORT_TURNS)
        for name in _SORTED
    },
    "earl:rows": EnvEntry(
        "graft_envs.earl.rows:earl_rows", turns=CALC_TURNS, needs=("data:rows of your own",)
    ),
}

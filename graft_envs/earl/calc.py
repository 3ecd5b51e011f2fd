"""EARL's calculator tasks: which questions, at which sizes, in which chat.

    system     You are a helpful assistant ... <calculator> (12 + 6) / 3 </calculator> ...
    user       What is the addition of 305 and (12 times 7)? ... after ####
    assistant  <calculator> 305 + 12 * 7 </calculator>       a call
    env        <result> 389 </result>                        appended inline, never trained
    assistant  #### 389

That is the syntax "tags". In the syntax "actions" the policy enters the calculator by an action, a call
is a `CallText`, the env answers with the bare value, and the actions write the text around both:

    assistant   calculate 305 + 12 * 7 =                     CallText("...", "calculator", ("3", "0", ...))
    env        389

`TASKS` holds every set of the original with its training and test parameters, `Mix` draws one of
several for each episode, `CalcChat` (`calc_chat.py`) adds the system message and the calculator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from graft.envs.arithmetic import Arithmetic
from graft.envs.base import BaseEnv
from graft.envs.entry import NOTHING
from graft.envs.splits import SPLITS, check_split
from graft.registry import resolve
from graft_envs.earl.calc_chat import CalcChat
from graft_envs.earl.count import Count
from graft_envs.earl.countdown import ExpressionCountdown
from graft_envs.earl.gsm import GsmRewrite
from graft_envs.earl.mix import Mix
from graft_envs.earl.modulo import Modulo
from graft_envs.earl.repeat import Repeat
from graft_envs.earl.sudoku import SudokuBoard
from graft_envs.earl.syntax import SYNTAXES

MAX_USES = 32
"""Calls per episode. The original sets no limit but its 1024 tokens, which hold about as many."""

Settings = Mapping[str, Any]


class Questions(NamedTuple):
    """One set of questions of the original."""

    build: Callable[..., BaseEnv]
    data_source: str
    rows: tuple[int, int]
    """How many rows the original drew for training and for test: the weights in a mix. Here the
    questions do not run out."""
    train: Settings = NOTHING
    test: Settings = NOTHING
    hint: bool = True
    """Whether the prompt mentions the calculator, which answers in any case."""


def _arithmetic(rows: tuple[int, int], train: Settings, test: Settings) -> Questions:
    return Questions(Arithmetic, "basic_calculator_tutorial", rows, train, test)


def _countdown(digits: int, operations: int) -> Questions:
    settings = {"digits": digits, "operations": operations}
    return Questions(ExpressionCountdown, "countdown", (20_000, 2_000), settings, settings)


def _sizes(digits: int, operations: int, language: float, read: str = "last") -> Settings:
    return {"digits": digits, "operations": operations, "language": language, "read": read}


_MARKED = {"digits": 4, "operations": 3, "whole": False, "form": "marked"}

TASKS: dict[str, Questions] = {
    "arithmetic-digit": _arithmetic((20_000, 1_000), _sizes(4, 3, 0.0), _sizes(4, 5, 0.0)),
    "arithmetic-lang1": _arithmetic((20_000, 2_000), _sizes(4, 4, 0.5), _sizes(4, 6, 0.5)),
    "arithmetic-lang2": _arithmetic((20_000, 2_000), _sizes(4, 3, 0.05), _sizes(4, 6, 0.7)),
    "arithmetic-lang3": _arithmetic((20_000, 2_000), _sizes(3, 5, 0.05), _sizes(4, 5, 0.7)),
    "countdown-0": _countdown(digits=2, operations=3),
    "countdown-1": _countdown(digits=4, operations=3),  # the one that the experiments use
    "countdown-2": _countdown(digits=3, operations=4),
    "calc-arithmetic": Questions(
        Arithmetic,
        "calc_bench",
        (1_000, 2_000),
        train=_sizes(5, 4, 0.1, "marked"),
        test=_sizes(5, 6, 0.7, "marked"),
    ),
    "calc-countdown": Questions(
        ExpressionCountdown, "calc_bench", (20_000, 2_000), _MARKED, _MARKED
    ),
    "calc-gsm8k": Questions(GsmRewrite, "calc_bench", (5_317, 579)),
    "calc-count": Questions(Count, "calc_bench", (1_000, 2_000), hint=False),
    "calc-modulo": Questions(
        Modulo,
        "calc_bench",
        (2_000, 2_000),
        train={"number": 10**7, "modulus": 10**5},
        test={"number": 10**9, "modulus": 10**7},
    ),
    "calc-repeat": Questions(Repeat, "calc_bench", (1_000, 2_000), hint=False),
    "calc-sudoku": Questions(
        SudokuBoard,
        "calc_bench",
        (400, 200),
        train={"scale": 6, "empty": (0.1, 0.7)},
        test={"scale": 4, "empty": (0.5, 0.7)},
        hint=False,
    ),
}


def calc_task(
    *,
    tasks: Sequence[str],
    data: str | None = None,
    split: str = "train",
    tool: bool = True,
    syntax: str = "tags",
    max_uses: int | None = MAX_USES,
    **settings: Any,
) -> CalcChat:
    """One of `TASKS`, or several in the proportions of the original's rows, one drawn per episode.

    `syntax` is how calls are written: "tags" or "actions"; see the top of this file.
    `data` is the file of rewritten GSM8K questions; without it leave that task out of the mix:
    make("earl:calc", tasks=["calc-arithmetic", "calc-countdown", "calc-count"]). Further keywords
    override the parameters of a single task: make("earl:arithmetic-digit", digits=2).
    """
    index = SPLITS.index(check_split(split))
    if settings and len(tasks) != 1:
        raise ValueError(
            f"{', '.join(settings)}: a mix of {len(tasks)} tasks takes no task parameters; "
            "set them on a single task"
        )
    sets: dict[str, Questions] = {name: resolve(name, TASKS, "calc task") for name in tasks}
    if data is not None and all(questions.build is not GsmRewrite for questions in sets.values()):
        raise ValueError(
            f"data={data!r}: {', '.join(sets)} generates its questions and reads no file"
        )
    parts: dict[str, BaseEnv] = {}
    for name, questions in sets.items():
        given = {**(questions.train, questions.test)[index], **settings}
        if questions.build is GsmRewrite:
            given["data"] = data
        parts[name] = questions.build(split=split, **given)
    env = Mix(parts, [questions.rows[index] for questions in sets.values()], split)
    env.data_source = next(iter(sets.values())).data_source
    hinted = [name for name, questions in sets.items() if questions.hint]
    return CalcChat(env, hinted, tool, resolve(syntax, SYNTAXES, "call syntax"), max_uses)

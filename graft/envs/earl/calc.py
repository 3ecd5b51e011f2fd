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
several for each episode, `CalcChat` adds the system message and the calculator.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from graft.envs.arithmetic import Arithmetic, value_of
from graft.envs.base import BaseEnv, Trace, as_messages
from graft.envs.calculator import CalculatorEnv, CalculatorSyntax, draw_flat
from graft.envs.countdown import draw_solution
from graft.envs.earl.count import Count
from graft.envs.earl.countdown import ExpressionCountdown
from graft.envs.earl.gsm import GsmRewrite
from graft.envs.earl.mix import Mix
from graft.envs.earl.syntax import SYNTAXES
from graft.envs.entry import NOTHING
from graft.envs.splits import SPLITS, check_split
from graft.protocols import Observation
from graft.registry import resolve
from graft.tools.calculator import Calculator
from graft.types import Author, Message, Turn

MAX_USES = 32
"""Calls per episode. The original sets no limit but its 1024 tokens, which hold about as many."""

ASSISTANT = "You are a helpful assistant. You think about the question first and then answer it."

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
}


class CalcChat(CalculatorEnv):
    """A question in a chat with a system message and, with `tool`, a calculator.

    As in the original, the whole response is graded, calls and results included: a policy that stops
    after "<result> 6 </result>" or "= 6" has written 6 last.
    """

    saved = (*CalculatorEnv.saved, "response")

    def __init__(
        self,
        env: BaseEnv,
        hinted: Collection[str],
        tool: bool,
        syntax: CalculatorSyntax,
        max_uses: int | None,
    ) -> None:
        super().__init__(env, Calculator() if tool else None, syntax, max_uses if tool else 0)
        self.hinted = hinted
        self.response = ""

    def reset(self, seed: int | None = None, **options: Any) -> tuple[Observation, dict[str, Any]]:
        observation, info = super().reset(seed, **options)
        self.response = ""
        self.prompt = [self._system(), *as_messages(observation)]
        return self.prompt, info

    def step(self, action: str) -> Turn:
        if not self.format.find(action, self.styles):
            return super().step(self.response + action)
        turn = super().step(action)
        if self.action_tools is not None:
            # a bare result: separated from the digits around it, as in the context
            self.response += f"{action} {turn.observation}\n"
        else:
            self.response += action + turn.observation
        return turn

    def demonstrate(self, rng: random.Random, tool_rate: float = 1.0, tries: int = 0) -> Trace:
        """Calls to the calculator, then the answer.

        Only a share `tool_rate` of the traces call it; the others write the working out themselves. In
        countdown up to `tries` wrong expressions precede the right one.
        """
        if tries < 0 or (tries and self.max_uses is not None and tries >= self.max_uses):
            raise ValueError(
                f"tries={tries}: must be 0 or more, and below max_uses={self.max_uses} so that the "
                "right expression is calculated too"
            )
        trace: Trace = []
        if self.tools and rng.random() < tool_rate:
            trace = self.calls(calculations(self.env.current, rng, tries))
        [(_, answer)] = self.env.demonstrate(rng)
        if trace:  # the calls are the working: only the last line is left to write
            answer = self.syntax.gap + answer.rpartition("\n")[2]
        return [*trace, (Author.POLICY, answer)]

    def sample_random_action(self) -> str:
        """A call or an answer, each half the time."""
        rng = self.env.action_rng()
        if self.tools and rng.random() < 0.5:
            return self.syntax.write(draw_flat(rng, (2, 3), (1, 4), "+-*/"))
        return self.env.sample_random_action()

    def _system(self) -> Message:
        is_hinted = bool(self.tools) and self.env.part in self.hinted
        return {"role": "system", "content": ASSISTANT + (self.syntax.hint if is_hinted else "")}


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


def calculations(env: Any, rng: random.Random, tries: int) -> list[str]:
    """What a teacher enters to solve the current question; nothing where a calculator does not help.

    The expressions are made of the numbers of the question, so they have no leading zeros or signs.
    """
    if isinstance(env, Arithmetic):
        return [env.expression]
    if isinstance(env, ExpressionCountdown):
        return [*wrong_tries(env, rng, rng.randint(0, tries)), env.solution]
    return []


def wrong_tries(env: ExpressionCountdown, rng: random.Random, count: int) -> list[str]:
    """Expressions that use each number once and miss the target."""
    found: list[str] = []
    while len(found) < count:
        attempt = draw_solution(rng, env.answer["numbers"])
        if value_of(attempt) not in (None, value_of(env.solution)):
            found.append(attempt)
    return found

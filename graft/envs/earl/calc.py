"""EARL's calculator tasks: which questions, at which sizes, in which chat.

    system     You are a helpful assistant ... <calculator> (12 + 6) / 3 </calculator> ...
    user       What is the addition of 305 and (12 times 7)? ... after ####
    assistant  <calculator> 305 + 12 * 7 </calculator>       a call
    env        <result> 389 </result>                        appended inline, never trained
    assistant  #### 389

`TASKS` holds every set of the original with its training and test parameters, `Mix` draws one of
several for each episode, `CalcChat` puts the system message and the calculator around it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Self

from graft.envs.arithmetic import Arithmetic
from graft.envs.base import SPLITS, BaseEnv, Trace, as_messages, check_split
from graft.envs.calculator import draw_flat
from graft.envs.catalogue import NOTHING
from graft.envs.earl.count import Count
from graft.envs.earl.countdown import ExpressionCountdown
from graft.envs.earl.gsm import GsmRewrite
from graft.envs.tooled import CallStyle, ToolEnv, find_call
from graft.protocols import Observation
from graft.registry import resolve
from graft.tools.calculator import Calculator
from graft.types import Author, Message, Turn

MAX_USES = 32
"""Calls per episode. The original sets no limit but its 1024 tokens, which hold about as many."""

STYLE = CallStyle(
    open="<calculator>",
    close="</calculator>",
    result=" <result> {} </result>",
    spent=" <result> No calls are left. Give the final answer. </result>",
)
ASSISTANT = "You are a helpful assistant. You think about the question first and then answer it."
HINT = (
    " You may use a calculator as often as you like: write an expression between <calculator> and "
    "</calculator>, and its value comes back between <result> and </result>. "
    "Example: <calculator> (12 + 6) / 3 </calculator> <result> 6 </result>"
)

Settings = Mapping[str, Any]


class Questions(NamedTuple):
    """One set of questions of the original."""

    build: Callable[..., BaseEnv]
    data_source: str
    rows: tuple[int, int]
    """How many the original drew for training and for test. Ours do not run out; in a mix these
    are the weights."""
    train: Settings = NOTHING
    test: Settings = NOTHING
    hint: bool = True
    """Whether the prompt speaks of the calculator. It answers in any case."""


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


class CalcChat(ToolEnv):
    """A question in a chat with a system message and, with `tool`, a calculator.

    What is graded is the whole response, calls and results included, as the original does: a policy
    that stops after "<result> 6 </result>" has written 6 last.
    """

    saved = (*ToolEnv.saved, "said")

    def __init__(self, env: BaseEnv, *, hinted: Collection[str], tool: bool, max_uses: int | None):
        tools = [Calculator()] if tool else []
        styles = {Calculator.name: STYLE} if tool else None
        super().__init__(env, tools, styles=styles, max_uses=max_uses if tool else 0)
        self.hinted = hinted
        self.said = ""

    def reset(self, seed: int | None = None, **options: Any) -> tuple[Observation, dict[str, Any]]:
        observation, info = super().reset(seed, **options)
        self.said = ""
        self.prompt = [self._system(), *as_messages(observation)]
        return self.prompt, info

    def step(self, action: str) -> Turn:
        if find_call(action, self.styles) is None:
            return super().step(self.said + action)
        turn = super().step(action)
        self.said += action + turn.observation
        return turn

    def demonstrate(self, rng: random.Random) -> Trace:
        """The calculator works out what is to be calculated, then the answer is given."""
        trace: Trace = []
        if self.tools:
            for expression in calculations(self.env.current):
                trace.append((Author.POLICY, f"{STYLE.open} {expression} {STYLE.close}"))
                trace.append((Author.ENV, STYLE.render(self.tools[Calculator.name](expression))))
        [(_, answer)] = self.env.demonstrate(rng)
        if trace:  # the working was the calculator's: only the last line is left to say
            answer = "\n" + answer.rpartition("\n")[2]
        return [*trace, (Author.POLICY, answer)]

    def sample_random_action(self) -> str:
        """A call or an answer, each half the time."""
        rng = self.env.whim()
        if self.tools and rng.random() < 0.5:
            return f"{STYLE.open} {draw_flat(rng, (2, 3), (1, 4), '+-*/')} {STYLE.close}"
        return self.env.sample_random_action()

    def _system(self) -> Message:
        is_hinted = bool(self.tools) and self.env.part in self.hinted
        return {"role": "system", "content": ASSISTANT + (HINT if is_hinted else "")}


def calc_task(
    *,
    tasks: Sequence[str],
    data: str | None = None,
    split: str = "train",
    tool: bool = True,
    max_uses: int | None = MAX_USES,
    **settings: Any,
) -> CalcChat:
    """One of `TASKS`, or several in the proportions of the original's rows, one drawn per episode.

    `data` is the file of rewritten GSM8K questions; without one leave that task out of the mix:
    make("earl:calc", tasks=["calc-arithmetic", "calc-countdown", "calc-count"]). More keywords
    override the parameters of a single task: make("earl:arithmetic-digit", digits=2).
    """
    index = SPLITS.index(check_split(split))
    if settings and len(tasks) != 1:
        raise ValueError(
            f"{', '.join(settings)}: a mix of {len(tasks)} tasks takes the parameters of its parts; "
            "change them on the single task"
        )
    sets: dict[str, Questions] = {name: resolve(name, TASKS, "calc task") for name in tasks}
    if data is not None and all(questions.build is not GsmRewrite for questions in sets.values()):
        raise ValueError(f"data={data!r}: {', '.join(sets)} draws its questions and reads no file")
    parts: dict[str, BaseEnv] = {}
    for name, questions in sets.items():
        given = {**(questions.train, questions.test)[index], **settings}
        if questions.build is GsmRewrite:
            given["data"] = data
        parts[name] = questions.build(split=split, **given)
    env = Mix(parts, [questions.rows[index] for questions in sets.values()], split)
    env.data_source = next(iter(sets.values())).data_source
    hinted = [name for name, questions in sets.items() if questions.hint]
    return CalcChat(env, hinted=hinted, tool=tool, max_uses=max_uses)


class Mix(BaseEnv):
    """Another env for every episode: `parts` by weight, drawn with the instance's seed.

    With a single part nothing is drawn and it is posed with the very seed.
    """

    env_id = "mix"
    shared = ("parts",)
    saved = (*BaseEnv.saved, "part")

    def __init__(self, parts: Mapping[str, BaseEnv], weights: Sequence[float], split: str) -> None:
        super().__init__()
        if not parts:
            raise ValueError("tasks=[]: name at least one task to draw from")
        self.parts = dict(parts)
        self.weights = list(weights)
        self.split = split
        self.part = next(iter(self.parts))

    @property
    def current(self) -> Any:
        return self.parts[self.part]

    def pose(self) -> Observation:
        seed = self.seed
        if len(self.parts) > 1:
            self.part = self.rng.choices(list(self.parts), self.weights)[0]
            seed = self.rng.getrandbits(53)
        observation, _ = self.current.reset(seed)
        self.answer = self.current.answer
        return observation

    def respond(self, action: str) -> Turn:
        return self.current.step(action)

    def demonstrate(self, rng: random.Random) -> Trace:
        return self.current.demonstrate(rng)

    def describe(self) -> dict[str, Any]:
        return {"task": self.part, **self.current.describe()}

    def sample_random_action(self) -> str:
        return self.current.sample_random_action()

    def fork(self) -> Self:
        twin = super().fork()
        twin.parts = {name: part.fork() for name, part in self.parts.items()}
        return twin

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "current": self.current.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self.current.set_state(state["current"])


def calculations(env: Any) -> list[str]:
    """What a teacher would enter to solve the current question; nothing where it is no help."""
    if isinstance(env, Arithmetic):
        return [env.expression]
    if isinstance(env, ExpressionCountdown):
        return [env.solution]
    return []

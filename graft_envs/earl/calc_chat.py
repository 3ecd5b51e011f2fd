"""A question in EARL's chat: a system message, a calculator, and a grade for the whole response."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

from graft.envs.arithmetic import Arithmetic, value_of
from graft.envs.base import BaseEnv, Trace, as_messages
from graft.envs.calculator import CalculatorEnv, CalculatorSyntax, draw_flat
from graft.envs.countdown import draw_solution
from graft.protocols import Observation
from graft.rewards.countdown_use import countdown_use
from graft.tools.calculator import Calculator
from graft.types import Author, Message, Turn
from graft_envs.earl.columns import calc_columns
from graft_envs.earl.countdown import ExpressionCountdown
from graft_envs.earl.modulo import Modulo

ASSISTANT = "You are a helpful assistant. You think about the question first and then answer it."


class GradedResponse(CalculatorEnv):
    """A question with a calculator whose whole response is graded, calls and results included.

    As in the original: a policy that stops after "<result> 6 </result>" or "= 6" has written 6 last.
    """

    saved = (*CalculatorEnv.saved, "response")

    def __init__(
        self, env: BaseEnv, tool: bool, syntax: CalculatorSyntax, max_uses: int | None
    ) -> None:
        super().__init__(env, Calculator() if tool else None, syntax, max_uses if tool else 0)
        self.response = ""

    def reset(self, seed: int | None = None, **options: Any) -> tuple[Observation, dict[str, Any]]:
        self.response = ""
        return super().reset(seed, **options)

    @property
    def given_numbers(self) -> list[int]:
        """The numbers of a countdown; none in other tasks."""
        return []

    def step(self, action: str) -> Turn:
        turn = self._graded_step(action)
        if numbers := self.given_numbers:
            whole = self.response if "tool" in turn.info else self.response + action
            use = countdown_use(whole, numbers)
            turn.info["tools/invalid_numbers"] = use.invalid
            turn.info["tools/planning_phrases"] = use.phrases
        return turn

    def _graded_step(self, action: str) -> Turn:
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
            trace = self.calls(self.calculations(rng, tries))
        [(_, answer)] = self.env.demonstrate(rng)
        if trace:  # the calls are the working: only the last line is left to write
            answer = self.syntax.gap + answer.rpartition("\n")[2]
        return [*trace, (Author.POLICY, answer)]

    def calculations(self, rng: random.Random, tries: int) -> list[str]:
        """What a teacher enters to solve the current question; nothing where a calculator does not help.

        The expressions are made of the numbers of the question, so they have no leading zeros or signs.
        """
        raise NotImplementedError(f"{type(self).__name__} must write calculations()")

    def sample_random_action(self) -> str:
        """A call or an answer, each half the time."""
        rng = self.env.action_rng()
        if self.tools and rng.random() < 0.5:
            return self.syntax.write(draw_flat(rng, (2, 3), (1, 4), "+-*/"))
        return self.env.sample_random_action()


class CalcChat(GradedResponse):
    """One of EARL's questions; the system message explains the calculator to those that are `hinted`."""

    env: Any

    def __init__(
        self,
        env: BaseEnv,
        hinted: Collection[str],
        tool: bool,
        syntax: CalculatorSyntax,
        max_uses: int | None,
    ) -> None:
        super().__init__(env, tool, syntax, max_uses)
        self.hinted = hinted

    def reset(self, seed: int | None = None, **options: Any) -> tuple[Observation, dict[str, Any]]:
        observation, info = super().reset(seed, **options)
        self.prompt = [self._system(), *as_messages(observation)]
        return self.prompt, info

    def calculations(self, rng: random.Random, tries: int) -> list[str]:
        match self.env.current:
            case Arithmetic() as env:
                return [env.expression]
            case ExpressionCountdown() as env:
                return [*wrong_tries(env, rng, rng.randint(0, tries)), env.solution]
            case Modulo() as env:
                return env.calculations
            case _:
                return []

    @property
    def given_numbers(self) -> list[int]:
        current = self.env.current
        return current.answer["numbers"] if isinstance(current, ExpressionCountdown) else []

    def row_columns(self) -> dict[str, Any]:
        """The original's columns for the current question, except the prompt."""
        return calc_columns(self.env.data_source, self.env.part, self.env.current)

    def _system(self) -> Message:
        is_hinted = bool(self.tools) and self.env.part in self.hinted
        return {"role": "system", "content": ASSISTANT + (self.syntax.hint if is_hinted else "")}


def wrong_tries(env: ExpressionCountdown, rng: random.Random, count: int) -> list[str]:
    """Expressions that use each number once and miss the target."""
    found: list[str] = []
    while len(found) < count:
        attempt = draw_solution(rng, env.answer["numbers"])
        if value_of(attempt) not in (None, value_of(env.solution)):
            found.append(attempt)
    return found

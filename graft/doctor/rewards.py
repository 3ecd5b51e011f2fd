r"""Does a right answer earn more than garbage? The reward, tried without any model.

    2+3=    gold "5"  1     the teacher "[2+3]5;5"  1     garbage "+;=9"  0       as it should be
            gold "5"  1     the teacher             1     garbage         1       everybody earns it

The gold answer of a task is what its environment says it is. How an answer has to be dressed is not
said, so the dresses that people use are tried on the first task, and the best one is kept.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from graft.actions.actions import Decisions
from graft.envs.base import as_messages
from graft.protocols import Env, Reward
from graft.rollout.demonstration import decided
from graft.rollout.last_info import info_of_reset, last_info
from graft.text.chat import Chat
from graft.train.monitor.check import FAIL, PASS, WARN, Check
from graft.types import Author, Called, Episode, Leaf, Span, Task
from graft.user_code import NotFinite

DRESSES = (
    "{}",
    "<answer>{}</answer>",
    "\\boxed{{{}}}",
    "#### {}",
    "<think>I know it.</think><answer>\\boxed{{{}}}</answer>",
    "<think>I know it.</think><answer>{}</answer>",
)
GARBAGE_TOKENS = 8
TRIES = 8
"""Of a teacher at one task."""


@dataclass(frozen=True, slots=True)
class RewardStage:
    """Where answers are tried: the run's environment and reward, and how text becomes tokens."""

    make_env: Callable[[Task], Env]
    reward: Reward | None
    chat: Chat
    max_turns: int = 8

    def earned(self, task: Task, actions: Sequence[str]) -> float:
        """What these actions bring, one per turn; the last is said again until it is over."""
        env = self.make_env(task)
        try:
            observation, info = env.reset(task.seed)
            posed = replace(
                task,
                prompt=as_messages(observation),
                answer=info.get("answer", task.answer),
                data_source=info.get("data_source") or task.env,
                meta=info.get("meta", {}),
            )
            episode = Episode(posed)
            tip = episode.append(Span(None, Author.TASK, self._encode(str(observation))))
            total, heard_last = 0.0, info_of_reset(info)
            for number in range(self.max_turns):
                said = actions[min(number, len(actions) - 1)]
                turn = env.step(said)
                total, heard_last = total + turn.reward, turn.info
                tokens = self._encode(said)
                words = Decisions(tokens, tokens, [0] * len(tokens), 0)
                tip = episode.append(decided(tip, words, str(said)))
                if turn.is_over:
                    break
                heard = self._encode(turn.observation)
                tip = episode.append(Span(tip, Author.ENV, heard, text=turn.observation))
        finally:
            env.close()
        leaf = Leaf((tip,), total, info=last_info(heard_last))
        episode.leaves.append(leaf)
        if self.reward is None:
            return total
        return float(self.reward(posed, next(episode.trajectories())))

    def gold(self, task: Task) -> str | None:
        """The right answer in plain text, where the environment tells it."""
        env = self.make_env(task)
        try:
            answer = env.reset(task.seed)[1].get("answer")
        finally:
            env.close()
        if isinstance(answer, list | tuple) and answer:
            answer = answer[0]
        return str(answer) if isinstance(answer, str | int | float) else None

    def lesson(self, task: Task, demo_args: Mapping[str, Any], number: int) -> list[str] | None:
        """What the environment's teacher says, turn by turn; None: it has none."""
        env = self.make_env(task)
        try:
            env.reset(task.seed)
            teach = getattr(env, "demonstrate", None)
            if teach is None:
                return None
            with suppress(NotImplementedError):
                return turns(teach(random.Random(number), **demo_args))
            return None
        finally:
            env.close()

    def taught(
        self, task: Task, demo_args: Mapping[str, Any], tries: int, floor: float
    ) -> float | None:
        """What the teacher earns, at best of so many tries: some guess wrongly on purpose. One that
        earns more than `floor` is enough."""
        best: float | None = None
        for number in range(tries):
            said = self.lesson(task, demo_args, number)
            if not said:
                return best
            reward = self.earned(task, said)
            best = reward if best is None else max(best, reward)
            if best > floor:
                break
        return best

    def garbage(self, task: Task) -> str:
        """Tokens drawn blindly, no special ones: always the same for a task."""
        tokenizer, dice = self.chat.tokenizer, random.Random(task.seed)
        plain = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
        return tokenizer.decode([dice.choice(plain) for _ in range(GARBAGE_TOKENS)])

    def _encode(self, text: str) -> list[int]:
        try:
            return self.chat.tokenizer.encode_plain(str(text))
        except ValueError:  # not in the alphabet; the reward reads the words
            return []


def turns(trace: Sequence[tuple[Author, str]]) -> list[str]:
    """The policy's turns of a teacher's trace: what it says in a row is one, and may end in a call."""
    found: list[str] = []
    for author, entries in groupby(trace, key=lambda entry: entry[0]):
        texts = [text for _, text in entries]
        if author is not Author.POLICY:
            continue
        last, whole = texts[-1], "".join(texts)
        is_call = isinstance(last, Called)
        found.append(Called(whole, last.tool, last.arguments) if is_call else whole)
    return found


def reward_check(
    stage: RewardStage, tasks: Sequence[Task], demo_args: Mapping[str, Any], tries: int = TRIES
) -> Check:
    """Gold answers, the teacher's best attempts and garbage, on the same tasks."""
    try:
        return _compared(stage, tasks, demo_args, tries)
    except NotFinite as error:  # of an environment's own reward
        return Check("reward", FAIL, f"not a finite number: {error}", "mend the reward")


def _compared(
    stage: RewardStage, tasks: Sequence[Task], demo_args: Mapping[str, Any], tries: int
) -> Check:
    garbage = [stage.earned(task, [stage.garbage(task)]) for task in tasks]
    teacher: list[float] = []
    for task, floor in zip(tasks, garbage, strict=True):
        if (best := stage.taught(task, demo_args, tries, floor)) is not None:
            teacher.append(best)
    golds = [stage.gold(task) for task in tasks]
    gold: list[float] = []
    if golds[0] is not None:
        first = {dress: stage.earned(tasks[0], [dress.format(golds[0])]) for dress in DRESSES}
        best = max(first, key=lambda dress: first[dress])
        if first[best] > 0 or not teacher:
            gold = [
                stage.earned(task, [best.format(answer)])
                for task, answer in zip(tasks, golds, strict=True)
                if answer is not None
            ]
    known = {"gold answers earn": gold, "the teacher at best": teacher, "garbage earns": garbage}
    tried = {name: rewards for name, rewards in known.items() if rewards}
    seen = ", ".join(f"{name} {_mean(rewards):.3g}" for name, rewards in tried.items())
    seen += f" on average of {len(tasks)} tasks"
    bad = [r for rewards in tried.values() for r in rewards if not math.isfinite(r)]
    if bad:
        return Check("reward", FAIL, f"{seen}; {bad[0]} is not a finite number", "mend the reward")
    return _judged(seen, gold, teacher, garbage)


def _judged(seen: str, gold: list[float], teacher: list[float], garbage: list[float]) -> Check:
    if not gold and not teacher:
        remedy = (
            "the environment tells no right answer and has no teacher, so only garbage was tried: "
            "try it yourself with `graft play ENV`"
        )
        return Check("reward", WARN, seen, remedy)
    top = max([*gold, *teacher])
    best = max(_mean(rewards) for rewards in (gold, teacher) if rewards)
    if best > _mean(garbage):
        at_top = sum(reward >= top for reward in gold)
        if gold and at_top < len(gold):
            seen += f"; {at_top} of {len(gold)} gold answers earn {top:.3g}, the most there was"
            remedy = "some right answers are not taken for right: look at the rows they belong to"
            return Check("reward", WARN, seen, remedy)
        return Check("reward", PASS, seen)
    if not teacher and not top and not any(garbage):
        remedy = (
            "no form that is known here of the right answers earns anything: <answer>, \\boxed{}, "
            "#### and the bare text were tried. See with `graft play ENV` that one can win"
        )
        return Check("reward", WARN, seen, remedy)
    remedy = (
        "what is right earns no more than blind tokens do, so there is nothing to learn: mend the "
        "reward (task.reward, or the environment's own)"
    )
    return Check("reward", FAIL, seen, remedy)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

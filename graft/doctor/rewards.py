r"""Does a right answer earn more than garbage? The reward, tried without any model.

    2+3=    gold "5"  1     the teacher "[2+3]5;5"  1     garbage "+;=9"  0       correct
            gold "5"  1     the teacher             1     garbage         1       every answer earns it

The gold answer of a task comes from its environment. The form of an answer is not known, so the usual forms
are tried on the first task, and the best one is used for the others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from graft.actions.actions import Decisions
from graft.envs.base import as_messages
from graft.protocols import Env, Reward
from graft.rollout.demonstration import decided
from graft.rollout.user_calls import info_of_reset, last_info
from graft.text.chat import Chat
from graft.train.monitor.check import FAIL, PASS, WARN, Check
from graft.types import Author, CallText, Episode, Leaf, Span, Task
from graft.user_code import NotFinite

ANSWER_FORMS = (
    "{}",
    "<answer>{}</answer>",
    "\\boxed{{{}}}",
    "#### {}",
    "<think>I know it.</think><answer>\\boxed{{{}}}</answer>",
    "<think>I know it.</think><answer>{}</answer>",
)
GARBAGE_TOKENS = 8
TRIES = 8
"""Demonstrations per task."""


@dataclass(frozen=True, slots=True)
class RewardTrial:
    """The run's environment, reward and tokenizer, to try answers with."""

    make_env: Callable[[Task], Env]
    reward: Reward | None
    chat: Chat
    max_turns: int = 8

    def earned(self, task: Task, actions: Sequence[str] | Callable[[Any, str], str]) -> float:
        """The reward of these actions, one per turn; the last one is repeated until the episode ends.
        Instead of a list: a function of the environment and its last observation."""
        with closing(self.make_env(task)) as env:
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
            total, last_seen, shown = 0.0, info_of_reset(info), str(observation)
            for number in range(self.max_turns):
                if callable(actions):
                    action = actions(env, shown)
                else:
                    action = actions[min(number, len(actions) - 1)]
                turn = env.step(action)
                shown = turn.observation
                total, last_seen = total + turn.reward, turn.info
                tokens = self._encode(action)
                decisions = Decisions(tokens, tokens, [0] * len(tokens), 0)
                tip = episode.append(decided(tip, decisions, str(action)))
                if turn.is_over:
                    break
                observed = self._encode(turn.observation)
                tip = episode.append(Span(tip, Author.ENV, observed, text=turn.observation))
        leaf = Leaf((tip,), total, info=last_info(last_seen))
        episode.leaves.append(leaf)
        if self.reward is None:
            return total
        return float(self.reward(posed, next(episode.trajectories())))

    def gold(self, task: Task) -> str | None:
        """The right answer as text, if the environment has one."""
        with closing(self.make_env(task)) as env:
            answer = env.reset(task.seed)[1].get("answer")
        if isinstance(answer, list | tuple) and answer:
            answer = answer[0]
        return str(answer) if isinstance(answer, str | int | float) else None

    def lesson(self, task: Task, demo_args: Mapping[str, Any], number: int) -> list[str] | None:
        """The turns of the environment's demonstration; None if it has none."""
        with closing(self.make_env(task)) as env:
            env.reset(task.seed)
            teach = getattr(env, "demonstrate", None)
            if teach is not None:
                with suppress(NotImplementedError):
                    return turns(teach(random.Random(number), **demo_args))
        return None

    def taught(
        self, task: Task, demo_args: Mapping[str, Any], tries: int, floor: float
    ) -> float | None:
        """The best reward of several demonstrations, since some guess wrongly on purpose. A reward above
        `floor` ends the search."""
        best: float | None = None
        for number in range(tries):
            turns = self.lesson(task, demo_args, number)
            if not turns:
                return best
            reward = self.earned(task, turns)
            best = reward if best is None else max(best, reward)
            if best > floor:
                break
        return best

    def garbage(self, task: Task) -> str:
        """Random tokens without special ones, the same for a task each time."""
        tokenizer, dice = self.chat.tokenizer, random.Random(task.seed)
        plain = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
        return tokenizer.decode([dice.choice(plain) for _ in range(GARBAGE_TOKENS)])

    def _encode(self, text: str) -> list[int]:
        try:
            return self.chat.tokenizer.encode_plain(str(text))
        except ValueError:  # not in the alphabet; the reward reads the text
            return []


def turns(trace: Sequence[tuple[Author, str]]) -> list[str]:
    """The policy's turns of a demonstration: consecutive texts are one turn, which may end in a call."""
    found: list[str] = []
    for author, entries in groupby(trace, key=lambda entry: entry[0]):
        texts = [text for _, text in entries]
        if author is not Author.POLICY:
            continue
        last, whole = texts[-1], "".join(texts)
        is_call = isinstance(last, CallText)
        found.append(CallText(whole, last.tool, last.arguments) if is_call else whole)
    return found


def reward_check(
    trial: RewardTrial, tasks: Sequence[Task], demo_args: Mapping[str, Any], tries: int = TRIES
) -> Check:
    """Gold answers, the best demonstrations and garbage, on the same tasks."""
    try:
        return _compared(trial, tasks, demo_args, tries)
    except NotFinite as error:  # of an environment's own reward
        return Check("reward", FAIL, f"not a finite number: {error}", "repair the reward")


def _compared(
    trial: RewardTrial, tasks: Sequence[Task], demo_args: Mapping[str, Any], tries: int
) -> Check:
    garbage = [trial.earned(task, [trial.garbage(task)]) for task in tasks]
    teacher: list[float] = []
    for task, floor in zip(tasks, garbage, strict=True):
        if (best := trial.taught(task, demo_args, tries, floor)) is not None:
            teacher.append(best)
    golds = [trial.gold(task) for task in tasks]
    gold: list[float] = []
    if golds[0] is not None:
        first = {form: trial.earned(tasks[0], [form.format(golds[0])]) for form in ANSWER_FORMS}
        best = max(first, key=lambda form: first[form])
        if first[best] > 0 or not teacher:
            gold = [
                trial.earned(task, [best.format(answer)])
                for task, answer in zip(tasks, golds, strict=True)
                if answer is not None
            ]
    known = {"gold answers earn": gold, "the best demonstration": teacher, "garbage earns": garbage}
    tried = {name: rewards for name, rewards in known.items() if rewards}
    seen = ", ".join(f"{name} {_mean(rewards):.3g}" for name, rewards in tried.items())
    seen += f" on average of {len(tasks)} tasks"
    bad = [r for rewards in tried.values() for r in rewards if not math.isfinite(r)]
    if bad:
        return Check(
            "reward", FAIL, f"{seen}; {bad[0]} is not a finite number", "repair the reward"
        )
    return _judged(seen, gold, teacher, garbage)


def _judged(seen: str, gold: list[float], teacher: list[float], garbage: list[float]) -> Check:
    if not gold and not teacher:
        remedy = (
            "the environment has neither a right answer nor a demonstration, so only garbage was tried: "
            "try it yourself with `graft play ENV`"
        )
        return Check("reward", WARN, seen, remedy)
    top = max([*gold, *teacher])
    best = max(_mean(rewards) for rewards in (gold, teacher) if rewards)
    if best > _mean(garbage):
        at_top = sum(reward >= top for reward in gold)
        if gold and at_top < len(gold):
            seen += f"; {at_top} of {len(gold)} gold answers earn {top:.3g}, the most there was"
            remedy = "some right answers are not accepted: check their rows"
            return Check("reward", WARN, seen, remedy)
        return Check("reward", PASS, seen)
    if not teacher and not top and not any(garbage):
        remedy = (
            "the right answer earns nothing in any form that was tried: <answer>, \\boxed{}, "
            "#### and the bare text. Check with `graft play ENV` that a reward can be earned"
        )
        return Check("reward", WARN, seen, remedy)
    remedy = (
        "right answers earn no more than random tokens, so there is nothing to learn: repair the "
        "reward (task.reward, or the environment's own)"
    )
    return Check("reward", FAIL, seen, remedy)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

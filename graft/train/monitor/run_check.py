"""Is what is trained what was sampled? Checks of a built run, on a few attempts of its own.

    ends        the template ends a turn with a token that sampling stops at
    mask        some tokens are trained, and they are the policy's
    eos         turns that ended by themselves are trained to end
    log-probs   learner and engine give the same tokens the same log-probs
    rewards     attempts are not all worth the same
    answers     right answers fit into a turn
    micro       loss and gradient do not depend on how rows fall into micro-batches

Each is a function of plain arguments that returns a `Check`. `first_look` makes the cheap ones before
the first step of every run, on attempts that the run has made anyway; `graft doctor RECIPE` makes all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from graft.algos.losses import Loss
from graft.models.tree.forest import Forest
from graft.rollout.batching import to_batch, trajectories_of
from graft.text.chat import Chat
from graft.tolerances import tolerances
from graft.train.learner import Learner
from graft.train.micro_batches import share_out
from graft.train.monitor.check import FAIL, PASS, WARN, Check
from graft.train.optimizer import Optimizer
from graft.types import Author, Episode, Finish, Span, Trajectory

FEW = 8
"""Attempts that are computed again."""
MOST_EQUAL = 8
"""So many attempts have to earn the same before anybody is told."""


def first_look(
    learner: Learner,
    episodes: Sequence[Episode],
    chat: Chat,
    temperature: float,
    stop: Sequence[str] = (),
    max_tokens: int = 0,
) -> list[Check]:
    """What can be known before the first step, from attempts sampled with the present weights.

    `stop` are the strings that end a turn in this environment, `max_tokens` is how long one may be
    (0: not looked at). A check that breaks is no reason to
    stop a run: it is told of.
    """
    spoken = [row for row in trajectories_of(episodes) if any(turns_of(row))]
    rows = few(spoken, learner.tokens_per_micro)
    if not rows:
        return []  # none came to say a word; the first step says why
    looks: dict[str, Callable[[], Check]] = {
        "ends": lambda: ends(chat, learner.policy.shape.vocab_size, stop),
        "mask": lambda: mask(spoken),
        "eos": lambda: eos(spoken, chat),
        "log-probs": lambda: agreement(learner, rows, temperature),
        "rewards": lambda: spread(episodes),
    }
    if max_tokens:
        looks["answers"] = lambda: answers(episodes, chat, max_tokens)
    found: list[Check] = []
    for name, look in looks.items():
        try:
            found.append(look())
        except Exception as error:
            seen = f"could not be looked at: {type(error).__name__}: {error}"
            found.append(Check(name, WARN, seen))
    return found


def few(rows: Sequence[Trajectory], budget: int) -> list[Trajectory]:
    """The first rows, as many as one micro-batch holds, and one at least."""
    kept: list[Trajectory] = []
    room = budget
    for row in rows[:FEW]:
        room -= len(row.tokens)
        if kept and room < 0:
            break
        kept.append(row)
    return kept


def ends(chat: Chat, vocab_size: int, stop: Sequence[str] = ()) -> Check:
    """Whether the end of a turn, as the template writes it, is something that sampling stops at."""
    tokenizer = chat.tokenizer
    own = "model.chat_template=chatml, or a template that ends an assistant's turn with a token"
    if not chat.end_text:
        seen = "the chat template writes nothing after an assistant's words, so"
        if stop:
            return Check("ends", WARN, f"{seen} only {', '.join(map(repr, stop))} ends a turn", own)
        return Check("ends", FAIL, f"{seen} no turn ever ends", own)
    ends_with, following = repr(chat.end_text), _after(chat)
    then = f"; what follows it, {following!r}, is not trained" if following else ""
    if not chat.end_ids:
        seen = (
            f"a turn ends with {ends_with}, a text of several tokens, found as a stop string{then}"
        )
        return Check("ends", WARN, seen, f"works, but one token is surer: {own}")
    end, *more = chat.ends
    if end >= vocab_size:
        seen = f"a turn ends with {ends_with}, token {end}, and the model knows {vocab_size} tokens"
        return Check("ends", FAIL, seen, "give the tokenizer that belongs to the model")
    seen = f"a turn ends with {ends_with}, token {end}, and sampling stops there{then}"
    if others := [i for i in dict.fromkeys([*more, *tokenizer.eos_ids]) if i != end]:
        named = (f"{tokenizer.decode([index])!r}, token {index}" for index in others)
        seen += f"; it also stops at {' and at '.join(named)}"
    return Check("ends", PASS, seen)


def _after(chat: Chat) -> str:
    """What the template writes behind the end of the last turn, such as a newline."""
    said = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}]
    try:
        return chat.pieces(said)[-1].text
    except ValueError:  # an alphabet without zeros
        return ""


def mask(rows: Sequence[Trajectory]) -> Check:
    """Whether there is something to train in these rows, read off the batch that the learner gets."""
    batch = to_batch(rows)
    total = sum(len(row.tokens) for row in rows)
    sampled = sum(len(s) for row in rows for s in row.spans if s.author is Author.POLICY)
    trained = batch.num_tokens
    seen = (
        f"{trained:,} of {total:,} tokens of {count(len(rows), 'attempt')} are trained, "
        f"{sampled:,} were the policy's"
    )
    if not trained:
        remedy = (
            "nothing would be learned: attempts say nothing (rollout.max_context leaves no room?) or "
            "all their tokens are masked"
        )
        return Check("mask", FAIL, seen, remedy)
    return Check("mask", PASS, seen)


def eos(rows: Sequence[Trajectory], chat: Chat) -> Check:
    """Whether turns that ended by themselves are trained to end: else a policy learns to go on."""
    closed = untrained = cut = 0
    for row in rows:
        turns = list(turns_of(row))
        for tokens, trained, _ in turns:
            if chat.is_closed(tokens) or tokens[-1] in chat.tokenizer.eos_ids:
                closed += 1
                untrained += not trained[-1]
        cut += bool(turns) and turns[-1][2] == Finish.LENGTH
    attempts = count(len(rows), "attempt")
    if untrained:
        seen = f"{untrained} of {closed} turns end with a token that is not trained ({attempts})"
        remedy = (
            "the policy would never learn to stop: the mask of a turn must include its end. Look at "
            "what wrote these spans (a branch or teacher of your own?)"
        )
        return Check("eos", FAIL, seen, remedy)
    if not closed and cut == len(rows):
        seen = f"none of {attempts} came to an end by itself, all were cut at their last token"
        remedy = (
            "the end of a turn is then never trained: raise rollout.max_tokens or "
            "rollout.max_context, warm up (sft.steps), or check the chat template"
        )
        return Check("eos", WARN, seen, remedy)
    return Check(
        "eos", PASS, f"{count(closed, 'turn')} of {attempts} ended so, and all are trained"
    )


def turns_of(row: Trajectory) -> Iterator[tuple[list[int], list[bool], str]]:
    """Tokens, mask and finish of each of the policy's turns; one may be of several spans."""
    for is_policy, some in groupby(row.spans, key=lambda span: span.author is Author.POLICY):
        spans: list[Span] = [span for span in some if len(span)]
        if is_policy and spans:
            tokens = [token for span in spans for token in span.tokens]
            trained = [flag for span in spans for flag in span.mask]
            yield tokens, trained, str(spans[-1].info.get("finish", ""))


@torch.no_grad()
def recomputed(learner: Learner, rows: Sequence[Trajectory], temperature: float) -> Tensor:
    """The learner's log-probs of what was chosen in these rows, [N, T] on the CPU."""
    forest = Forest(rows, to_batch(rows).mask, learner.policy.device)
    return forest.logprobs(learner.policy, temperature, learner.allowed)[0].float().cpu()


def agreement(learner: Learner, rows: Sequence[Trajectory], temperature: float) -> Check:
    """Whether the engine's log-probs of tokens it drew at `temperature` are the learner's.

    If not, the learner tries the temperatures that could explain it.
    """
    batch = to_batch(rows)
    if not batch.num_tokens:
        return Check("log-probs", WARN, "no token was sampled, so there is nothing to compare")

    def gap_at(degrees: float) -> Tensor:
        return (recomputed(learner, rows, degrees) - batch.logprobs).abs()[batch.mask]

    gap, dtype = gap_at(learner.temperature), learner.policy.dtype
    mean, most = float(gap.mean()), float(gap.max())
    mean_limit, most_limit = tolerances(dtype).mean_gap, tolerances(dtype).max_gap
    seen = (
        f"engine and learner differ by {mean:.2g} on average, {most:.2g} at most, over "
        f"{batch.num_tokens:,} tokens of {count(len(rows), 'attempt')} at temperature "
        f"{temperature:g} ({str(dtype).removeprefix('torch.')} explains {mean_limit:g} and "
        f"{most_limit:g})"
    )
    if mean <= mean_limit:
        if most <= most_limit:
            return Check("log-probs", PASS, seen)
        remedy = (
            "a few tokens are far apart; algo.importance_cap=2 weighs tokens by the difference, "
            "model.dtype=float32 tells whether it is rounding"
        )
        return Check("log-probs", WARN, seen, remedy)
    for degrees in {temperature, 1.0} - {learner.temperature}:
        if float(gap_at(degrees).mean()) <= mean_limit:
            seen += f". At temperature {degrees:g} they would agree"
            remedy = (
                f"the learner computes at {learner.temperature:g} what was sampled at {degrees:g}: "
                "both must take rollout.temperature"
                if degrees == temperature
                else f"the engine samples at {temperature:g} and tells log-probs of {degrees:g}: have "
                "it tell those it samples with (vLLM: logprobs_mode=processed_logprobs), or set "
                "rollout.temperature=1"
            )
            return Check("log-probs", FAIL, seen, remedy)
    remedy = (
        "the engine samples from other weights than those that are trained, or masks them otherwise; "
        "engine.name=native holds the learner's own tensors"
    )
    return Check("log-probs", FAIL, seen, remedy)


def spread(episodes: Sequence[Episode]) -> Check:
    """Whether some attempts are worth more than others; where none is, nothing can be learned."""
    rewards = [
        leaf.reward for episode in episodes for leaf in episode.leaves if leaf.status.is_trainable
    ]
    if len(rewards) < MOST_EQUAL or len(set(rewards)) > 1:
        known = f"{min(rewards):.3g} to {max(rewards):.3g}" if rewards else "none"
        return Check("rewards", PASS, f"{count(len(rewards), 'attempt')} earned {known}")
    seen = f"every one of {len(rewards)} attempts earned {rewards[0]:.3g}"
    remedy = (
        "where all earn the same nothing is learned. `graft doctor RECIPE` tries the reward on right "
        "answers and on garbage; easier tasks, a warm-up (sft.steps) or more rollout.samples may do"
    )
    return Check("rewards", WARN, seen, remedy)


def answers(episodes: Sequence[Episode], chat: Chat, max_tokens: int) -> Check:
    """Whether the right answers, where tasks have them as texts or numbers, fit into one turn."""
    lengths: list[int] = []
    for episode in episodes:
        answer = episode.task.answer
        accepted = answer if isinstance(answer, list | tuple) else [answer]
        texts = [str(one) for one in accepted if isinstance(one, str | int | float)]
        with suppress(
            ValueError
        ):  # an alphabet without one of its characters: another check's matter
            counts = [len(chat.tokenizer.encode(text)) for text in texts]
            lengths += [min(counts)] if counts else []
    if not lengths:
        return Check("answers", PASS, "no task has its answer as a text")
    over = sum(length >= max_tokens for length in lengths)  # one more ends the turn
    seen = f"the right answers of {count(len(lengths), 'task')} have up to {max(lengths)} tokens"
    if not over:
        return Check("answers", PASS, seen)
    remedy = f"{over} of them do not fit into rollout.max_tokens={max_tokens}; raise it"
    return Check("answers", WARN, seen, remedy)


class TrialRollout:
    """In the place of an optimizer: tells the norm of the gradient, and takes no step."""

    steps = 0

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def collect(self) -> None:
        self.optimizer.collect()

    def clear(self) -> None:
        self.optimizer.clear()

    def step(self) -> dict[str, float]:
        grads = [m.grad for m in self.optimizer.masters if m.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0
        self.clear()
        return {"grad_norm": norm}


def micro(learner: Learner, rows: Sequence[Trajectory], loss: Loss) -> Check:
    """Whether loss and gradient of these rows are the same in one micro-batch and row by row.

    Advantages are made up, from -1 to 1 over the rows: real ones may be 0, and prove nothing.
    """
    batch = to_batch(rows)
    whole, one = sum(len(row.tokens) for row in rows), 1
    cuts = [len(share_out(rows, budget, 1)[0]) for budget in (whole, one)]
    if len(set(cuts)) == 1 or not batch.num_tokens:
        return Check("micro", WARN, f"{count(len(rows), 'row')} cannot be cut in two ways")
    row_N = torch.linspace(-1.0, 1.0, batch.num_rows) + 0.1  # so that the loss itself is not 0
    batch = batch.replace(advantages=row_N[:, None].expand_as(batch.logprobs).contiguous())
    if learner.policy.shape.extra:
        batch = batch.replace(is_vocab_token=batch.actions < learner.policy.shape.vocab_size)
    rehearsal: Any = TrialRollout(learner.optimizer)

    def measure(budget: int) -> dict[str, float]:
        alone = replace(
            learner,
            tokens_per_micro=budget,
            optimizer=rehearsal,
            loss=loss,
            critic=None,
            critic_optimizer=None,
            reference=None,
            lora=None,  # nothing is stepped, so nothing has to be merged
            anchor=None,
            epochs=1,
            minibatches=1,
            keeps_logprobs=False,
        )
        return alone.update(rows, batch)

    limit = tolerances(learner.policy.dtype).micro
    together, apart = measure(whole), measure(one)
    told: list[str] = []
    is_same = True
    for name in ("loss", "grad_norm"):
        a, b = together[name], apart[name]
        off = abs(a - b) / max(abs(a), abs(b), 1e-6)
        is_same = is_same and off <= limit
        told.append(f"{name.replace('grad_norm', 'gradient norm')} {a:.6g} and {b:.6g} ({off:.1g})")
    seen = (
        f"{count(len(rows), 'row')} in {count(cuts[0], 'micro-batch')} and in {cuts[1]}: "
        f"{', '.join(told)}; {limit:g} is allowed"
    )
    if is_same:
        return Check("micro", PASS, seen)
    remedy = (
        "what is learned would depend on train.tokens_per_micro: a loss or reduction of your own must "
        "not average over the rows it is given, and the model must not mix rows"
    )
    return Check("micro", FAIL, seen, remedy)


def count(number: int, noun: str) -> str:
    """
    >>> count(1, "attempt"), count(2, "micro-batch")
    ('1 attempt', '2 micro-batches')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}"

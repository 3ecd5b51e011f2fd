"""Checks before the first step that the learner trains what the engine sampled, on a few attempts.

    ends        the template ends a turn with a token that sampling stops at
    mask        some tokens are trained, and they are the policy's
    eos         turns that ended with an end token are trained to end
    log-probs   learner and engine give the same tokens the same log-probs
    rewards     attempts do not all earn the same
    answers     correct answers fit into a turn
    micro       loss and gradient do not depend on the division into micro-batches

Each is a function of plain arguments that returns a `Check`. `check_attempts` runs the cheap ones before the
first step of every run, on attempts that the run has sampled anyway; `graft doctor RECIPE` runs all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.losses.loss import Loss
from graft.models.tree.forest import Forest
from graft.rollout.batching import to_batch, trajectories_of
from graft.text.chat import Chat
from graft.tolerances import tolerances
from graft.train.learner import Learner
from graft.train.micro_batches import share_out
from graft.train.monitor.check import FAIL, PASS, WARN, Check
from graft.train.optimizer import Optimizer
from graft.types import NO_ACTION, Author, Episode, Finish, Span, Trajectory

FEW = 8
"""Attempts that are recomputed."""
MIN_EQUAL = 8
"""Attempts that must earn the same for a warning."""


def check_attempts(
    learner: Learner,
    episodes: Sequence[Episode],
    chat: Chat,
    temperature: float,
    stop: Sequence[str] = (),
    max_tokens: int = 0,
    reads_rewards: bool = True,
) -> list[Check]:
    """Check attempts that were sampled with the current weights.

    `stop` are the strings that end a turn in this environment, `max_tokens` is the limit of a turn (0: not
    checked). Rewards need not differ where no credit reads them. A check that raises becomes a warning.
    """
    answered = [row for row in trajectories_of(episodes) if any(turns_of(row))]
    rows = first_rows(answered, learner.tokens_per_micro)
    if not rows:
        return []  # no attempt has a token of the policy; the first step reports why
    checks: dict[str, Callable[[], Check]] = {
        "ends": lambda: check_turn_ends(chat, learner.policy.shape.vocab_size, stop),
        "mask": lambda: mask(answered),
        "eos": lambda: eos(answered, chat),
        "log-probs": lambda: agreement(learner, rows, temperature),
    }
    if reads_rewards:
        checks["rewards"] = lambda: spread(episodes)
    if max_tokens:
        checks["answers"] = lambda: answers(episodes, chat, max_tokens)
    found: list[Check] = []
    for name, check in checks.items():
        try:
            found.append(check())
        except Exception as error:
            seen = f"the check failed: {type(error).__name__}: {error}"
            found.append(Check(name, WARN, seen))
    return found


def first_rows(rows: Sequence[Trajectory], budget: int) -> list[Trajectory]:
    """The first rows, as many as fit into one micro-batch, and at least one."""
    chosen: list[Trajectory] = []
    remaining = budget
    for row in rows[:FEW]:
        remaining -= len(row.tokens)
        if chosen and remaining < 0:
            break
        chosen.append(row)
    return chosen


def check_turn_ends(chat: Chat, vocab_size: int, stop: Sequence[str] = ()) -> Check:
    """Whether sampling stops at the end of a turn, as the template writes it."""
    tokenizer = chat.tokenizer
    own = _with_an_end(chat)
    if not chat.end_text:
        seen = "the chat template writes nothing after an assistant's text, so"
        if stop:
            return Check("ends", WARN, f"{seen} only {', '.join(map(repr, stop))} ends a turn", own)
        return Check("ends", FAIL, f"{seen} no turn ever ends", own)
    ends_with, following = repr(chat.end_text), _after(chat)
    then = f"; what follows it, {following!r}, is not trained" if following else ""
    if not chat.end_ids:
        seen = (
            f"a turn ends with {ends_with}, a text of several tokens, found as a stop string{then}"
        )
        return Check("ends", WARN, seen, f"it works, but one token is safer: {own}")
    end, *more = chat.ends
    if end >= vocab_size:
        seen = f"a turn ends with {ends_with}, token {end}, and the model has {vocab_size} tokens"
        return Check("ends", FAIL, seen, "use the tokenizer of the model")
    seen = f"a turn ends with {ends_with}, token {end}, and sampling stops there{then}"
    if others := [i for i in dict.fromkeys([*more, *tokenizer.eos_ids]) if i != end]:
        named = (f"{tokenizer.decode([index])!r}, token {index}" for index in others)
        seen += f"; it also stops at {' and at '.join(named)}"
    return Check("ends", PASS, seen)


def _with_an_end(chat: Chat) -> str:
    """What gives turns an end of one token: a template whose end this tokenizer has, or another tokenizer."""
    own = "a template that ends an assistant's turn with a token"
    for name in ("chatml", "plain"):
        try:
            if Chat(chat.tokenizer, name).end_ids:
                return f"model.chat_template={name}, or {own}"
        except ValueError:  # an alphabet that cannot write this template
            continue
    return f"a model whose tokenizer has {chat.end_text or '<|im_end|>'!r} as one token, or {own}"


def _after(chat: Chat) -> str:
    """Text that the template writes after the end of the last turn, such as a newline."""
    messages = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}]
    try:
        return chat.pieces(messages)[-1].text
    except ValueError:  # an alphabet without the digit 0
        return ""


def mask(rows: Sequence[Trajectory]) -> Check:
    """Whether these rows have trained tokens, in the batch that the learner gets."""
    batch = to_batch(rows)
    total = sum(len(row.tokens) for row in rows)
    sampled = sum(len(s) for row in rows for s in row.spans if s.author is Author.POLICY)
    trained = batch.num_tokens
    seen = (
        f"{trained:,} of {total:,} tokens of {count(len(rows), 'attempt')} are trained, "
        f"{sampled:,} are the policy's"
    )
    if not trained:
        remedy = (
            "nothing would be learned: attempts have no token of the policy (does rollout.max_context "
            "leave space for an answer?) or all their tokens are masked"
        )
        return Check("mask", FAIL, seen, remedy)
    return Check("mask", PASS, seen)


def eos(rows: Sequence[Trajectory], chat: Chat) -> Check:
    """Whether turns that ended with an end token are trained to end."""
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
            "the policy would never learn to stop: the mask of a turn must include its end. Check the "
            "code that wrote these spans (a custom branch or teacher?)"
        )
        return Check("eos", FAIL, seen, remedy)
    if not closed and cut == len(rows):
        seen = f"none of {attempts} ended with an end token, all reached their token limit"
        remedy = (
            "the end of a turn is never trained then: raise rollout.max_tokens or "
            "rollout.max_context, warm up (sft.steps), or check the chat template"
        )
        return Check("eos", WARN, seen, remedy)
    return Check(
        "eos", PASS, f"{count(closed, 'turn')} of {attempts} have an end token, and all are trained"
    )


def turns_of(row: Trajectory) -> Iterator[tuple[list[int], list[bool], str]]:
    """Tokens, mask and finish of each of the policy's turns, which may have several spans.

    What a structure or a description forced is no choice, so that it need not be trained: it counts as such.
    """
    for is_policy, some in groupby(row.spans, key=lambda span: span.author is Author.POLICY):
        spans: list[Span] = [span for span in some if len(span)]
        if is_policy and spans:
            tokens = [token for span in spans for token in span.tokens]
            choices = [pair for span in spans for pair in zip(span.mask, span.actions, strict=True)]
            trained = [flag or action == NO_ACTION for flag, action in choices]
            yield tokens, trained, str(spans[-1].info.get("finish", ""))


@torch.no_grad()
def recomputed(learner: Learner, rows: Sequence[Trajectory], temperature: float) -> Tensor:
    """The learner's log-probs of the sampled actions of these rows, [N, T] on the CPU."""
    forest = Forest(rows, to_batch(rows).mask, learner.policy.device)
    scoring = learner.policy, temperature, learner.allowed, learner.truncation
    return forest.logprobs(*scoring)[0].float().cpu()


def agreement(learner: Learner, rows: Sequence[Trajectory], temperature: float) -> Check:
    """Whether engine and learner agree on the log-probs of tokens sampled at `temperature`.

    If not, the learner also tries the temperatures that could explain the difference.
    """
    batch = to_batch(rows)
    if not batch.num_tokens:
        return Check("log-probs", WARN, "no token was sampled, so nothing can be compared")

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
            "a few tokens differ a lot; algo.importance_cap=2 weights tokens by the difference, "
            "model.dtype=float32 shows whether it is rounding"
        )
        return Check("log-probs", WARN, seen, remedy)
    for degrees in {temperature, 1.0} - {learner.temperature}:
        if float(gap_at(degrees).mean()) <= mean_limit:
            seen += f". At temperature {degrees:g} they would agree"
            remedy = (
                f"the learner computes at {learner.temperature:g} what was sampled at {degrees:g}: "
                "both must take rollout.temperature"
                if degrees == temperature
                else f"the engine samples at {temperature:g} and reports log-probs of {degrees:g}: "
                "configure it to report those it samples with (vLLM: "
                "logprobs_mode=processed_logprobs), or set "
                "rollout.temperature=1"
            )
            return Check("log-probs", FAIL, seen, remedy)
    remedy = (
        "the engine samples from other weights than the learner trains, or masks tokens differently; "
        "engine.name=native shares the learner's tensors"
    )
    return Check("log-probs", FAIL, seen, remedy)


def spread(episodes: Sequence[Episode]) -> Check:
    """Whether attempts earn different rewards; otherwise nothing can be learned."""
    rewards = [
        leaf.reward for episode in episodes for leaf in episode.leaves if leaf.status.is_trainable
    ]
    if len(rewards) < MIN_EQUAL or len(set(rewards)) > 1:
        known = f"{min(rewards):.3g} to {max(rewards):.3g}" if rewards else "none"
        return Check("rewards", PASS, f"{count(len(rewards), 'attempt')} earned {known}")
    seen = f"all {len(rewards)} attempts earned {rewards[0]:.3g}"
    remedy = (
        "without different rewards nothing is learned. `graft doctor RECIPE` tests the reward on correct "
        "answers and on garbage; try easier tasks, a warm-up (sft.steps) or more rollout.samples"
    )
    return Check("rewards", WARN, seen, remedy)


def answers(episodes: Sequence[Episode], chat: Chat, max_tokens: int) -> Check:
    """Whether correct answers that are texts or numbers fit into one turn."""
    lengths: list[int] = []
    for episode in episodes:
        answer = episode.task.answer
        accepted = answer if isinstance(answer, list | tuple) else [answer]
        texts = [str(one) for one in accepted if isinstance(one, str | int | float)]
        with suppress(ValueError):  # a character that the alphabet lacks: another check reports it
            counts = [len(chat.tokenizer.encode(text)) for text in texts]
            lengths += [min(counts)] if counts else []
    if not lengths:
        return Check("answers", PASS, "no task has its answer as a text")
    over = sum(length >= max_tokens for length in lengths)  # the end of the turn needs one more
    seen = f"the correct answers of {count(len(lengths), 'task')} have up to {max(lengths)} tokens"
    if not over:
        return Check("answers", PASS, seen)
    remedy = f"{over} of them do not fit into rollout.max_tokens={max_tokens}; raise it"
    return Check("answers", WARN, seen, remedy)


class DryRunOptimizer:
    """It stands in for an optimizer: it reports the gradient norm and takes no step."""

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


def micro(
    learner: Learner,
    rows: Sequence[Trajectory],
    loss: Loss,
    prepare: Callable[[Batch], Batch] = lambda batch: batch,
) -> Check:
    """Whether loss and gradient of these rows are the same in one micro-batch and row by row.

    Advantages are artificial, from -1 to 1 over the rows: real ones may be 0 and prove nothing.
    """
    batch = to_batch(rows)
    whole, one = sum(len(row.tokens) for row in rows), 1
    cuts = [len(share_out(rows, budget, 1)[0]) for budget in (whole, one)]
    if len(set(cuts)) == 1 or not batch.num_tokens:
        return Check("micro", WARN, f"{count(len(rows), 'row')} cannot be divided in two ways")
    row_N = torch.linspace(-1.0, 1.0, batch.num_rows) + 0.1  # so that the loss is not 0
    batch = batch.replace(advantages=row_N[:, None].expand_as(batch.logprobs).contiguous())
    if learner.policy.shape.extra:
        batch = batch.replace(is_vocab_token=batch.actions < learner.policy.shape.vocab_size)
    if learner.needs_old or learner.old_is_engine:
        batch = batch.replace(old_logprobs=batch.logprobs)
    if learner.teachers is not None:
        batch = batch.replace(**learner.teachers.annotate(learner, batch))
    batch = prepare(batch)
    # a teacher may be the reference; without a step nothing has to be merged
    unused: dict[str, Any] = {"reference": None, "lora": None, "anchor": None}
    unused = {} if learner.teachers is not None else unused
    dry_run: Any = DryRunOptimizer(learner.optimizer)

    def measure(budget: int) -> dict[str, float]:
        alone = replace(
            learner,
            tokens_per_micro=budget,
            optimizer=dry_run,
            loss=loss,
            critic=None,
            critic_optimizer=None,
            epochs=1,
            minibatches=1,
            keeps_logprobs=False,
            **unused,
        )
        return alone.update(batch)

    limit = tolerances(learner.policy.dtype).micro
    together, apart = measure(whole), measure(one)
    compared: list[str] = []
    is_same = True
    for name in ("loss", "grad_norm"):
        a, b = together[name], apart[name]
        off = abs(a - b) / max(abs(a), abs(b), 1e-6)
        is_same = is_same and off <= limit
        compared.append(
            f"{name.replace('grad_norm', 'gradient norm')} {a:.6g} and {b:.6g} ({off:.1g})"
        )
    seen = (
        f"{count(len(rows), 'row')} in {count(cuts[0], 'micro-batch')} and in {cuts[1]}: "
        f"{', '.join(compared)}; {limit:g} is allowed"
    )
    if is_same:
        return Check("micro", PASS, seen)
    remedy = (
        "the result would depend on train.tokens_per_micro: a custom loss or reduction must not average "
        "over the rows of a call, and the model must not mix rows"
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

"""One `sample` call in progress: what was requested, what has been drawn, and whether it ends here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

from graft.actions.matcher import StructureMatcher, only
from graft.engine.native.kv.sequences import Sequence
from graft.engine.stop_strings import StopStrings
from graft.protocols import Grammar
from graft.types import NO_ACTION, Completion, Finish, Sampling


@dataclass(slots=True, eq=False)
class SampleRequest:
    """The parameters of a sample and the completion so far; the tokens themselves are in `sequence`."""

    sequence: Sequence
    key: int
    sampling: Sampling
    stop_tokens: frozenset[int]
    stop_strings: StopStrings | None
    grammar: Grammar | None
    mode: int
    budget: int
    """Tokens it may write: `max_tokens`, or what is left of the model's window."""
    version: int
    """Of the weights when it began; the staleness of its oldest token."""
    future: asyncio.Future[Completion]
    matcher: StructureMatcher | None = None
    """Of the structure that the answer must have."""
    pending: list[int] = field(default_factory=list[int])
    """Forced tokens that a device is still to be fed, one in each step."""
    task: int = 0
    """A number of the prompt that its context began with: drafts come from contexts of the same."""
    slot: int | None = None
    """The row of the device's table that holds the matcher's; see `Masks.write`."""
    start: int = 0
    search_start: int = 0
    """Where the search for stop strings begins: `start`, or earlier if it continues a paused sample."""
    actions: list[int] = field(default_factory=list[int])
    """Filled only under a grammar or a structure; without either the actions are the tokens."""
    logprobs: list[float] = field(default_factory=list[float])
    entropies: list[float] = field(default_factory=list[float])
    modes: list[int] = field(default_factory=list[int])
    is_over: bool = False

    def __post_init__(self) -> None:
        self.start = len(self.sequence.tokens)
        self.search_start = max(self.start - self.sampling.num_begun, 0)

    @property
    def budget_left(self) -> int:
        return self.budget - len(self.logprobs)

    def add_tokens(
        self, tokens: list[int], logprobs: list[float], entropies: list[float]
    ) -> Finish | None:
        """Add drawn tokens up to the end of the completion; the reason if it ends with them."""
        count = self._count_until_stop(tokens)
        self.sequence.tokens += tokens[:count]
        self.logprobs += logprobs[:count]
        self.entropies += entropies[:count]
        self.modes += [self.mode] * count
        if self.grammar is not None:
            self.actions += tokens[:count]
        num_written = len(self.logprobs)
        if tokens[count - 1] in self.stop_tokens or (
            self.stop_strings is not None
            and num_written >= self.sampling.min_tokens
            and self.stop_strings.completed_by(self.sequence.tokens, self.search_start)
        ):
            return Finish.STOP
        return Finish.LENGTH if num_written >= self.budget else None

    def add_decision(
        self, action: int, logprob: float, entropy: float, tokens: list[int], is_exit: bool
    ) -> Finish | None:
        """Add the tokens that an action writes; the reason if the completion ends with them.

        Of a description that is longer than the budget only the beginning is written.
        """
        written = tokens[: self.budget_left]
        self.write(action, logprob, entropy, written)
        if len(written) < len(tokens):
            return Finish.LENGTH
        if is_exit:
            return Finish.EXIT
        is_stop_token = action in self.stop_tokens and written == [action]
        if is_stop_token or self._has_stop_string(len(written)):
            return Finish.STOP
        return Finish.LENGTH if len(self.logprobs) >= self.budget else None

    def write(self, action: int, logprob: float, entropy: float, tokens: list[int]) -> None:
        """Add an action and the tokens that it writes."""
        self.sequence.tokens += tokens
        self.actions.append(action)
        self.logprobs.append(logprob)
        self.entropies.append(entropy)
        self.modes.append(self.mode)
        if rest := len(tokens) - 1:
            self.actions += [NO_ACTION] * rest
            self.logprobs += [0.0] * rest
            self.entropies += [0.0] * rest
            self.modes += [self.mode] * rest

    def force(self) -> Finish | None:
        """Write what a structure forces before anything is drawn; the reason if nothing is left to draw."""
        if self.matcher is None:
            return None
        forced = self.matcher.force()
        if forced:
            written = forced[: self._count_until_stop(forced)][: self.budget]
            self.write(NO_ACTION, 0.0, 0.0, written)
            if self._has_stop_string(len(written)):
                return Finish.STOP
        if len(forced) <= self.budget and self._is_structure_over:
            return Finish.STOP
        return Finish.LENGTH if self.budget_left < 1 else None

    @property
    def allowed(self) -> bytes:
        """The bits of what a structure lets it draw next."""
        assert self.matcher is not None
        if self.pending:
            return only(self.pending[0])
        return self.matcher.draw().bits

    def write_pending(self) -> None:
        """Write the forced tokens at once, up to the last that fits: between bursts."""
        # the last one is drawn, and may end it
        count = min(self._count_until_stop(self.pending), self.budget_left) - 1
        if count > 0:
            self.write(NO_ACTION, 0.0, 0.0, self.pending[:count])
            del self.pending[:count]

    @property
    def must_go_on(self) -> bool:
        """Whether no stop token may be drawn yet: an answer whose structure is complete always may end."""
        return self.must_go_on_after(0)

    def must_go_on_after(self, count: int) -> bool:
        """Whether that holds after `count` more tokens."""
        is_short = len(self.logprobs) + count < self.sampling.min_tokens
        return is_short and not (self.matcher is not None and self.matcher.is_over)

    def add_matched(
        self, action: int, logprob: float, entropy: float, *, stepwise: bool
    ) -> Finish | None:
        """Add a token drawn under the structure, and what the structure forces after it.

        `stepwise`: what is forced follows as draws that have no choice, so that no prompt is computed between
        the steps of a burst.
        """
        assert self.matcher is not None
        if self.pending:
            self.write(NO_ACTION, 0.0, 0.0, [self.pending.pop(0)])
            if self._has_stop_string(1) or (not self.pending and self._is_structure_over):
                return Finish.STOP
            return Finish.LENGTH if self.budget_left < 1 else None
        self.mode = self.matcher.draw().id
        self.matcher.write([action])
        forced = [] if action in self.stop_tokens else self.matcher.force()
        if stepwise:
            self.pending, forced = forced, []
        is_cut = 1 + len(forced) > self.budget_left
        tokens = [action, *forced]
        tokens = tokens[: self._count_until_stop(tokens)]
        finish = self.add_decision(action, logprob, entropy, tokens, is_exit=False)
        is_whole = not is_cut and not self.pending
        is_end = finish is Finish.STOP or (is_whole and self._is_structure_over)
        return Finish.STOP if is_end else finish

    @property
    def _is_structure_over(self) -> bool:
        """Whether the answer is complete, with the token that ends a turn where there is one."""
        assert self.matcher is not None
        is_ended = not self.stop_tokens or self.sequence.tokens[-1] in self.stop_tokens
        return self.matcher.is_over and is_ended

    def finish(self, finish: Finish) -> None:
        """Resolve the future with the completion as it is."""
        tokens = self.sequence.tokens[self.start :]
        is_plain = self.grammar is None and self.matcher is None
        self.is_over = True
        if not self.future.done():  # the caller may have been cancelled
            self.future.set_result(
                Completion(
                    tokens,
                    list(tokens) if is_plain else self.actions,
                    self.logprobs,
                    self.entropies,
                    self.modes,
                    finish,
                    self.version,
                    {} if self.matcher is None else self.matcher.used,
                )
            )

    def fail(self, error: BaseException) -> None:
        self.is_over = True
        if not self.future.done():
            self.future.set_exception(error)

    def cancel(self) -> None:
        self.is_over = True
        self.future.cancel()

    def _count_until_stop(self, tokens: list[int]) -> int:
        """How many of the drawn tokens belong to the completion."""
        if len(tokens) == 1:
            return 1
        count = len(tokens)
        if not self.stop_tokens.isdisjoint(tokens):
            count = next(i for i, t in enumerate(tokens, 1) if t in self.stop_tokens)
        stops = self.stop_strings
        if stops is not None and any(map(stops.can_complete, tokens[:count])):
            searched = self.sequence.tokens[self.search_start :]
            for number, token in enumerate(tokens[:count], 1):
                searched.append(token)
                may_stop = len(self.logprobs) + number >= self.sampling.min_tokens
                if may_stop and stops.completed_by(searched, 0):
                    return number
        return count

    def _has_stop_string(self, count: int) -> bool:
        """Whether one of the last `count` tokens completes a stop string."""
        if self.stop_strings is None or len(self.logprobs) < self.sampling.min_tokens:
            return False
        tokens = self.sequence.tokens
        return any(
            self.stop_strings.completed_by(tokens[:end], self.search_start)
            for end in range(len(tokens) - count + 1, len(tokens) + 1)
        )


class Draw(NamedTuple):
    """What one step, or one segment of a burst, drew for a request.

    `NO_ACTION` stands where a step wrote the next token of a description and drew nothing.
    """

    request: SampleRequest
    actions: list[int]
    logprobs: list[float]
    entropies: list[float]

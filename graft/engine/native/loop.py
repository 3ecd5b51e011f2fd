"""The loop that turns requests into completions: a burst of steps, then everybody else's turn.

It lives as an asyncio task as long as there is work. `sleep(0)` between steps lets the callers of
finished samples run, so their next requests join the very next step: continuous batching without a
thread. Nothing of an event loop is kept, so an engine serves any number of `asyncio.run` calls.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

from graft.actions.grammar import Automaton
from graft.actions.space import ActionSpace
from graft.engine.errors import EngineError
from graft.engine.native.cpu.runner import Draw
from graft.engine.native.kv.sequences import Sequence, SequenceTree
from graft.engine.native.scheduler import PlannedWork, SampleRequest, Scheduler
from graft.protocols import Grammar
from graft.types import NO_ACTION, Completion, Finish

SEGMENT = (4, 32)
"""Fewest and most steps before the host looks. Rows that end between two looks idle until then."""
SEGMENTS = 4
"""Segments of a burst, at most, before everything is planned anew."""
BUSY = 0.75
"""Share of a burst's rows that must be alive for another segment."""


class SampleOutcome(NamedTuple):
    """What a grammar makes of a decision."""

    tokens: list[int]
    mode: int
    is_exit: bool
    fault: str
    """What is wrong with the grammar's answer; empty if nothing is."""


class Runs(Protocol):
    """What computes planned work: `Runner`, or `BurstRunner` where kernels run."""

    bursts: bool
    """Whether many steps are taken at a time, in which prompts have no part."""

    def run(
        self, works: list[PlannedWork], steps: int, segment: int, go_on: Callable[[], bool]
    ) -> Iterator[list[Draw]]: ...
    def follows(self, grammar: Grammar) -> bool: ...
    def rest(self) -> None: ...


class EngineLoop:
    """Owns the running task and the counters of what it did."""

    def __init__(
        self, tree: SequenceTree, scheduler: Scheduler, runner: Runs, space: ActionSpace
    ) -> None:
        self.tree, self.scheduler, self.runner, self.space = tree, scheduler, runner, space
        self.typical = 128.0  # length of a completion, as they come
        self.steps = self.prefill_tokens = self.decode_tokens = 0
        self._stale: set[Sequence] = set()
        self._grammar: Grammar | None = None
        self._telling: dict[int, frozenset[int]] = {}  # of that grammar
        self._outcomes: dict[
            tuple[int, int], SampleOutcome
        ] = {}  # of that grammar, as they come up
        self._task: asyncio.Task[None] | None = None

    async def submit(self, request: SampleRequest) -> Completion:
        """Queue the request and wait for its completion."""
        self.scheduler.add(request)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._drive())
        try:
            return await request.future
        finally:  # also when the caller was cancelled: nobody waits for it any more
            request.is_over = True

    def forget(self) -> None:
        """The weights changed: what was computed with the old ones is dropped.

        A completion in flight goes on with its own past, and is dropped when it ends.
        """
        in_flight = {r.sequence for r in self.scheduler.requests if r.logprobs}
        for sequence in self.tree.sequences:
            if sequence in in_flight:
                self._stale.add(sequence)
            else:
                self.tree.drop(sequence)

    def settle(self, sequence: Sequence) -> None:
        """A sample on `sequence` is over: drop pages that hold values of old weights."""
        if sequence in self._stale:
            self._stale.discard(sequence)
            self.tree.drop(sequence)

    def pause(self) -> None:
        """End every completion with what it has."""
        for request in self.scheduler.requests:
            self._finish(request, Finish.PAUSE)

    def fail_all(self, error: BaseException) -> None:
        for request in self.scheduler.requests:
            request.fail(error)

    async def _drive(self) -> None:
        try:
            while True:
                works = self.scheduler.plan()
                if not works:
                    self.runner.rest()
                    return
                requests = [work.request for work in works if work.request is not None]
                segment = self._segment(requests) if self.runner.bursts else 1
                steps = self.scheduler.look_ahead(works, segment * SEGMENTS if segment > 1 else 1)
                filling = [w for w in works if w.request is None or w.count > 1]
                self.prefill_tokens += sum(w.count for w in filling)
                self.decode_tokens -= sum(w.request is not None for w in filling)
                go_on = partial(self._may_go_on, requests)
                for draws in self.runner.run(works, steps, segment, go_on):
                    self.steps += max((len(actions) for _, actions, _, _ in draws), default=1)
                    self.decode_tokens += sum(len(actions) for _, actions, _, _ in draws)
                    is_sound = self._take(draws)
                    await asyncio.sleep(0)
                    if not is_sound:
                        break  # the burst goes on with pages that are gone
        except asyncio.CancelledError:  # the event loop is closing
            for request in self.scheduler.requests:
                request.is_over = True
                request.future.cancel()
            raise
        except Exception as error:
            self.fail_all(error)  # first: after a fault of the device nothing below may work
            self._forget_all()  # pages may be half written: keep nothing of this step

    def _segment(self, requests: list[SampleRequest]) -> int:
        """Steps until the host looks again: about an eighth of a completion, no more than is asked."""
        grammars = {id(r.grammar): r.grammar for r in requests if r.grammar is not None}
        followed = all(self.runner.follows(grammar) for grammar in grammars.values())
        if not requests or len(grammars) > 1 or not followed:
            return 1  # the host follows grammars decision by decision
        low, high = SEGMENT
        steps = min(max(int(self.typical / 8), low), high)
        return min(steps, max(request.room - len(request.logprobs) for request in requests))

    def _may_go_on(self, requests: list[SampleRequest]) -> bool:
        """Whether a burst should last: nobody waits to join it, and few have left it."""
        alive = sum(not request.is_over for request in requests)
        return not self.scheduler.waiting and alive >= BUSY * len(requests)

    def _take(self, draws: list[Draw]) -> bool:
        """Add the draws to their completions; False if pages had to be forgotten."""
        broken = False
        for request, actions, logprobs, entropies in draws:
            if math.isnan(logprobs[-1]):
                broken = True
                request.fail(
                    EngineError(
                        f"nothing can be drawn after {len(request.sequence.tokens)} tokens: the "
                        f"logits are not finite (weights version {request.version}), or mode "
                        f"{request.mode} with min_tokens={request.sampling.min_tokens} allows no "
                        f"token"
                    )
                )
                continue
            if request.grammar is None:
                self._add(request, actions, logprobs, entropies)
            else:
                self._follow(request, request.grammar, actions, logprobs, entropies)
            # what was drawn behind an end was never said
            request.sequence.cached = min(request.sequence.cached, len(request.sequence.tokens) - 1)
        if broken:
            self._forget_all()
        return not broken

    def _follow(
        self,
        request: SampleRequest,
        grammar: Grammar,
        actions: list[int],
        logprobs: list[float],
        entropies: list[float],
    ) -> None:
        """Take decisions one by one; words that are nothing but words, all at once."""
        if grammar is not self._grammar:
            self._grammar, self._telling = grammar, telling_actions(grammar, self.space)
            self._outcomes = {}
        start, count = 0, len(actions)
        while start < count and not request.is_over:
            telling = self._telling.get(request.mode)
            if telling is not None:
                stop = count
                if not telling.isdisjoint(actions):
                    stop = next((i for i in range(start, count) if actions[i] in telling), count)
                if stop > start:
                    run = slice(start, stop)
                    self._add(request, actions[run], logprobs[run], entropies[run])
                    start = stop
                    continue
            if actions[start] != NO_ACTION:
                self._decide(request, grammar, actions[start], logprobs[start], entropies[start])
            start += 1

    def _add(
        self,
        request: SampleRequest,
        tokens: list[int],
        logprobs: list[float],
        entropies: list[float],
    ) -> None:
        """Add drawn tokens up to the completion's end, and end it there."""
        count = self._wanted(request, tokens)
        request.sequence.tokens += tokens[:count]
        request.logprobs += logprobs[:count]
        request.entropies += entropies[:count]
        request.modes += [request.mode] * count
        if request.grammar is not None:
            request.actions += tokens[:count]
        written = len(request.logprobs)
        if tokens[count - 1] in request.stop_tokens or (
            request.stop_strings is not None
            and written >= request.sampling.min_tokens
            and request.stop_strings.completed_by(request.sequence.tokens, request.said_from)
        ):
            self._finish(request, Finish.STOP)
        elif written >= request.room:
            self._finish(request, Finish.LENGTH)

    def _decide(
        self, request: SampleRequest, grammar: Grammar, action: int, logp: float, entropy: float
    ) -> None:
        """Write what a decision stands for, and end the completion or go to its next mode.

        Of a description that is longer than the room only the beginning is written.
        """
        mode = request.mode
        outcome = self._outcomes.get((mode, action)) or self._ask(grammar, mode, action)
        tokens, request.mode, is_exit, fault = outcome
        if fault:
            request.fail(EngineError(f"in mode {mode}, after action {action}, the grammar {fault}"))
            return
        written = tokens[: request.room - len(request.logprobs)]
        rest = len(written) - 1
        request.sequence.tokens += written
        request.actions += [action] + [NO_ACTION] * rest
        request.logprobs += [logp] + [0.0] * rest
        request.entropies += [entropy] + [0.0] * rest
        request.modes += [mode] * len(written)
        if len(written) < len(tokens):
            self._finish(request, Finish.LENGTH)
        elif is_exit:
            self._finish(request, Finish.EXIT)
        elif (action in request.stop_tokens and written == [action]) or self._holds_a_stop_string(
            request, len(written)
        ):
            self._finish(request, Finish.STOP)
        elif len(request.logprobs) >= request.room:
            self._finish(request, Finish.LENGTH)

    def _ask(self, grammar: Grammar, mode: int, action: int) -> SampleOutcome:
        """The grammar's answer, the same every time: an automaton has no memory but its mode."""
        tokens, after = list(grammar.written(mode, action)), grammar.step(mode, action)
        fault = ""
        if not 0 <= after < self.space.num_modes:
            fault = f"went to mode {after} (the action space has 0 to {self.space.num_modes - 1})"
        elif not tokens or not 0 <= min(tokens) <= max(tokens) < self.space.vocab_size:
            fault = f"wrote {tokens} (the model reads tokens 0 to {self.space.vocab_size - 1})"
        outcome = SampleOutcome(tokens, after, grammar.is_exit(mode, action), fault)
        self._outcomes[mode, action] = outcome
        return outcome

    def _holds_a_stop_string(self, request: SampleRequest, count: int) -> bool:
        """Whether one of the last `count` tokens completes a stop string."""
        if request.stop_strings is None or len(request.logprobs) < request.sampling.min_tokens:
            return False
        tokens = request.sequence.tokens
        return any(
            request.stop_strings.completed_by(tokens[:end], request.said_from)
            for end in range(len(tokens) - count + 1, len(tokens) + 1)
        )

    def _wanted(self, request: SampleRequest, tokens: list[int]) -> int:
        """How many of the drawn tokens come before the completion's end."""
        if len(tokens) == 1:
            return 1
        count = len(tokens)
        if not request.stop_tokens.isdisjoint(tokens):
            count = next(i for i, t in enumerate(tokens, 1) if t in request.stop_tokens)
        if request.stop_strings is not None:
            said = request.sequence.tokens[request.said_from :]
            for number, token in enumerate(tokens[:count], 1):
                said.append(token)
                is_due = len(request.logprobs) + number >= request.sampling.min_tokens
                if is_due and request.stop_strings.completed_by(said, 0):
                    return number
        return count

    def _finish(self, request: SampleRequest, finish: Finish) -> None:
        if finish is not Finish.PAUSE:  # which says nothing of how long it would have been
            self.typical += (len(request.logprobs) - self.typical) * 0.05
        if self.runner.bursts:  # give back what was reserved for steps that are not taken
            self.tree.truncate(request.sequence, len(request.sequence.tokens))
        request.finish(finish)

    def _forget_all(self) -> None:
        for sequence in self.tree.sequences:
            self.tree.drop(sequence)
        self.tree.pages.wipe()


def telling_actions(grammar: Grammar, space: ActionSpace) -> dict[int, frozenset[int]]:
    """By mode, for modes in which other actions change nothing: those that do more than be written.

    Language in which 9 enters a tool: {0: {9, NO_ACTION}}, and all beyond the vocabulary. Modes that
    move on by themselves are left out, and so is every mode of a grammar whose rules cannot be read.
    """
    if not isinstance(grammar, Automaton):
        return {}
    beyond = {NO_ACTION, *range(space.vocab_size, space.num_actions)}
    telling: dict[int, set[int]] = {grammar.start: {*beyond}}
    for mode, action in (*grammar.transitions, *grammar.writes, *grammar.exits):
        telling.setdefault(mode, {*beyond}).add(action)
    return {
        mode: frozenset(actions)
        for mode, actions in telling.items()
        if grammar.default.get(mode, mode) == mode
    }

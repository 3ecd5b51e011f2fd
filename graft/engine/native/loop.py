"""The engine's loop: plan a step, run it, hand the draws to their requests.

It is an asyncio task that lives as long as there is work. `sleep(0)` after each hand-over lets the
callers of finished samples run, so that their next requests join the next step: continuous batching
without a thread. Callers that are other processes take longer to come back: the next steps start first, and
the event loop is theirs while a GPU computes these. The engine keeps no reference to it between runs, so it
serves any number of `asyncio.run` calls. Where several processes hold the engine, all of them run this loop
(`mirror`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from graft.actions.matcher import find_bits
from graft.actions.space import ActionSpace
from graft.engine.errors import EngineError
from graft.engine.native.drafts.attempts import BurstDrafter
from graft.engine.native.drafts.drafter import Drafter
from graft.engine.native.kv.sequences import Sequence as TokenSequence
from graft.engine.native.kv.sequences import SequenceTree
from graft.engine.native.mirror import CallMirror
from graft.engine.native.request import Draw, SampleRequest
from graft.engine.native.sampling.grammar_follower import GrammarFollower
from graft.engine.native.scheduler import MAX_STEPWISE, BurstPlan, PlannedWork, Scheduler
from graft.garbage import rare_collections
from graft.models.recurrence import CHUNK
from graft.protocols import Grammar
from graft.structure import StructureError
from graft.types import Completion, Finish, Sampling

SEGMENT_STEPS = (4, 32)
"""Fewest and most steps of a segment, after which the host reads the draws. A row that ends within a
segment idles until its end."""
MAX_SEGMENTS = 4
"""Segments of a burst, before everything is planned anew."""
HOPS = 5
"""Turns of the event loop from the end of a sample to the next one of an agent on the same loop."""
MAX_DRAWS = 128
"""Of a row in a burst."""
MATCHED_STEPS = 32
"""Steps of a burst in which the host finds what structures allow, before everything is planned anew."""
MIN_ALIVE = 0.75
"""Share of a burst's rows that must be alive for another segment."""


class Runner(Protocol):
    """Computes planned work: `CpuRunner`, or `CudaRunner` where kernels run."""

    has_bursts: bool
    """Whether it takes many decode steps at a time and computes prompts apart from them."""
    shares_loop: bool
    """Whether the event loop has other work, which then runs while a device computes."""

    num_steps: int
    """Steps behind the draws that were yielded last."""

    @property
    def mean_drawn(self) -> float: ...
    def run(self, works: list[PlannedWork], plan: BurstPlan) -> Iterator[list[Draw] | None]: ...
    def can_follow(self, grammar: Grammar) -> bool: ...
    def should_restart(self, num_waiting: int, num_running: int) -> bool: ...
    def on_idle(self) -> None: ...


class EngineLoop:
    """Owns the running task and the counters of its work."""

    def __init__(
        self,
        tree: SequenceTree,
        scheduler: Scheduler,
        runner: Runner,
        space: ActionSpace,
        drafter: Drafter | BurstDrafter | None = None,
    ) -> None:
        self.tree, self.scheduler, self.runner, self.space = tree, scheduler, runner, space
        self.drafter = drafter
        """None: every row draws one token in a step."""
        self.mean_length = 128.0  # of completions, a running mean
        self.steps = self.prefill_tokens = self.decode_tokens = 0
        self.mirror: CallMirror | None = None
        """Set where several processes hold the engine together."""
        self._follower = GrammarFollower(space)
        self._stale: set[TokenSequence] = set()
        self._task: asyncio.Task[None] | None = None
        self._num_contexts = 0

    def add(self, request: SampleRequest) -> None:
        """Queue the request."""
        self.scheduler.add(request)

    async def wait(self, request: SampleRequest) -> Completion:
        """The completion of a queued request."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
        return await request.future

    async def _run(self) -> None:
        try:
            self._sync()
        except Exception as error:  # another process of the group is lost
            return self.fail_all(error)
        with rare_collections():
            await self.run_queued()

    async def follow(self) -> None:
        """Take the same steps in the other processes of a group, until the first one releases this."""
        assert self.mirror is not None
        while self.mirror.sync():
            if not await self.run_queued():
                return

    async def run_queued(self) -> bool:
        """All steps of the queued requests; False if this process was released on the way."""
        try:
            while True:
                for request in self.scheduler.running:
                    if len(request.pending) > MAX_STEPWISE:
                        request.write_pending()
                works = self.scheduler.plan()
                if not works:  # callers of the last samples may go on
                    if not await self._let_callers_run():
                        return False
                    if not (works := self.scheduler.plan()):
                        break
                plan = self._plan_burst(works)
                self._count_planned(works)
                for draws in self._run_works(works, plan):
                    if draws is not None:
                        self._count_drawn(draws)
                        if not self._hand_over(draws):
                            break  # the rest of the burst read pages that were dropped
                    # callers that share the loop run during the next steps, when None is yielded
                    is_later = self.runner.has_bursts and self.runner.shares_loop
                    if (not draws or not is_later) and not await self._let_callers_run():
                        return False
            self.runner.on_idle()
        except asyncio.CancelledError:  # the event loop is closing
            for request in self.scheduler.requests:
                request.cancel()
            raise
        except Exception as error:
            self.fail_all(error)  # first: after a device error the next line may raise as well
            self._drop_all_pages()  # they may be half written
            if self.mirror is not None and not self.mirror.group.is_first:
                raise  # no caller of a sample is here to raise it
        return True

    def _run_works(self, works: list[PlannedWork], plan: BurstPlan) -> Iterator[list[Draw] | None]:
        """The draws of these works, with drafts for those that pay where the host takes every step."""
        if not isinstance(self.drafter, Drafter):
            yield from self.runner.run(works, plan)
            return
        began = perf_counter()
        self.drafter.propose(works)
        for draws in self.runner.run(works, plan):
            assert draws is not None
            self.drafter.learn(works, draws, perf_counter() - began)
            yield draws

    async def _let_callers_run(self) -> bool:
        """Callers of finished samples submit their next ones; False if this process was released."""
        for _ in range(HOPS if self.runner.shares_loop else 1):
            await asyncio.sleep(0)
        return self._sync()

    def _sync(self) -> bool:
        return self.mirror is None or self.mirror.sync()

    def next_number(self) -> int:
        """The number of a new context: the same in every process, since all of them make the same calls."""
        self._num_contexts += 1
        return self._num_contexts

    def record(self, name: str, *args: Any) -> None:
        """A call on a context, for the other processes of the group."""
        if self.mirror is not None:
            self.mirror.record(name, *args)

    def record_sample(
        self, number: int, mode: int | None, sampling: Sampling, grammar: Grammar | None
    ) -> None:
        if self.mirror is not None:
            grammar_number = self.mirror.grammar_number(grammar)
            self.mirror.record("begin", number, mode, sampling, grammar_number)

    def _plan_burst(self, works: list[PlannedWork]) -> BurstPlan:
        requests = [work.request for work in works if work.request is not None]
        segment = self._segment_steps(requests) if self.runner.has_bursts else 1
        steps = segment * MAX_SEGMENTS if segment > 1 else 1
        is_matched = any(request.matcher is not None for request in requests)
        if is_matched and self.runner.has_bursts and all(r.grammar is None for r in requests):
            steps = MATCHED_STEPS
        draws = steps
        if steps > 1 and not is_matched:
            draws = min(int(steps * self.runner.mean_drawn), MAX_DRAWS)
        draws = self.scheduler.reserve_ahead(works, draws)
        go_on = partial(self._should_go_on, requests)
        return BurstPlan(min(steps, draws), segment, go_on, self._plan_ahead, draws)

    def _segment_steps(self, requests: list[SampleRequest]) -> int:
        """A part of a completion, at most the largest budget; 1 if the host follows what is written."""
        grammars = {id(r.grammar): r.grammar for r in requests if r.grammar is not None}
        can_follow = all(self.runner.can_follow(grammar) for grammar in grammars.values())
        is_matched = any(request.matcher is not None for request in requests)
        if not requests or len(grammars) > 1 or not can_follow or is_matched:
            return 1
        low, high = SEGMENT_STEPS
        if self.tree.states is not None:  # a burst has slots up to the end of one chunk
            high = CHUNK // MAX_SEGMENTS
        share = 16 if self.runner.shares_loop else 8  # callers come back later: rows idle a segment
        steps = min(max(int(self.mean_length / share), low), high)
        return min(steps, max(request.budget_left for request in requests))

    def _should_go_on(self, requests: list[SampleRequest]) -> bool:
        """Whether no request, or too few, wait to join the burst, and most of its rows are alive."""
        num_alive = sum(not request.is_over for request in requests)
        num_waiting = len(self.scheduler.waiting)
        if num_waiting and self.runner.should_restart(num_waiting, num_alive):
            return False
        return num_alive >= MIN_ALIVE * len(requests)

    def _plan_ahead(self) -> list[PlannedWork]:
        """Prompts and results that the device computes after the last steps of a burst, while the host
        reads what these have drawn."""
        works = self.scheduler.plan_ahead()
        self._count_planned(works)
        return works

    def _count_planned(self, works: list[PlannedWork]) -> None:
        """A work of several tokens is prefill, also where it ends with a draw."""
        prefill = [work for work in works if work.request is None or work.count > 1]
        self.prefill_tokens += sum(work.count for work in prefill)
        self.decode_tokens -= sum(work.request is not None for work in prefill)

    def _count_drawn(self, draws: list[Draw]) -> None:
        self.steps += self.runner.num_steps
        self.decode_tokens += sum(len(draw.actions) for draw in draws)

    def _hand_over(self, draws: list[Draw]) -> bool:
        """Add the draws to their completions; False if a NaN made it drop all pages."""
        has_nan = False
        for draw in draws:
            request = draw.request
            if self.mirror is not None:
                self.mirror.count(draw.actions)
            if math.isnan(draw.logprobs[-1]):
                has_nan = True
                request.fail(_nothing_to_draw(request))
                continue
            if request.matcher is not None:
                finish = self._match(draw)
            elif request.grammar is None:
                finish = request.add_tokens(draw.actions, draw.logprobs, draw.entropies)
            else:
                finish = self._follower.add(draw, request.grammar)
            if finish is not None:
                self._finish(request, finish)
            # keys of tokens that were drawn after the end do not count
            request.sequence.cached = min(request.sequence.cached, len(request.sequence.tokens) - 1)
        find_rows([draw.request for draw in draws])
        if has_nan:
            self._drop_all_pages()
        return not has_nan

    def _match(self, draw: Draw) -> Finish | None:
        """Add the token drawn under a structure; one that cannot go on fails its request alone."""
        (action,), (logprob,), (entropy,) = draw.actions, draw.logprobs, draw.entropies
        try:
            stepwise = self.runner.has_bursts
            return draw.request.add_matched(action, logprob, entropy, stepwise=stepwise)
        except StructureError as error:
            draw.request.fail(EngineError(str(error)))
            return None

    def _finish(self, request: SampleRequest, finish: Finish) -> None:
        if finish is not Finish.PAUSE:  # a paused completion would have been longer
            self.mean_length += (len(request.logprobs) - self.mean_length) * 0.05
        if self.runner.has_bursts or self.drafter is not None:
            # release pages reserved for steps that are not taken
            self.tree.truncate(request.sequence, len(request.sequence.tokens))
        if isinstance(self.drafter, BurstDrafter):
            self.drafter.attempts.add(request)
        request.finish(finish)

    def pause(self) -> None:
        """End every completion as it is."""
        for request in self.scheduler.requests:
            self._finish(request, Finish.PAUSE)

    def fail_all(self, error: BaseException) -> None:
        for request in self.scheduler.requests:
            request.fail(error)

    def drop_stale_pages(self) -> None:
        """The weights changed: drop the keys and values of the old ones.

        A completion in progress continues from its old keys and values; they are dropped at its end.
        """
        in_progress = {r.sequence for r in self.scheduler.requests if r.logprobs}
        for sequence in self.tree.sequences:
            if sequence in in_progress:
                self._stale.add(sequence)
            else:
                self.tree.drop(sequence)

    def end_sample(self, sequence: TokenSequence) -> None:
        """A sample on `sequence` is over: drop its pages if they are of old weights."""
        if sequence in self._stale:
            self._stale.discard(sequence)
            self.tree.drop(sequence)

    def _drop_all_pages(self) -> None:
        for sequence in self.tree.sequences:
            self.tree.drop(sequence)
        self.tree.pages.wipe()
        if self.tree.states is not None:
            self.tree.states.wipe()


def find_rows(requests: Sequence[SampleRequest]) -> None:
    """Find what structures allow these requests next; one that allows nothing fails its request alone."""
    matched = [
        (r, r.matcher) for r in requests if r.matcher is not None and not (r.is_over or r.pending)
    ]
    bits = find_bits([matcher for _, matcher in matched])
    for (request, matcher), some in zip(matched, bits, strict=True):
        try:
            matcher.find_row(some)
        except StructureError as error:
            request.fail(EngineError(str(error)))


def _nothing_to_draw(request: SampleRequest) -> EngineError:
    return EngineError(
        f"nothing can be drawn after {len(request.sequence.tokens)} tokens: the logits are not finite "
        f"(weights version {request.version}), or mode {request.mode} with "
        f"min_tokens={request.sampling.min_tokens} allows no token"
    )

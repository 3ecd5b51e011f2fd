"""The loop that turns requests into completions: one forward, then everybody else's turn.

It lives as an asyncio task as long as there is work. `sleep(0)` between steps lets the callers of
finished samples run, so their next requests join the very next step: continuous batching without a
thread. Nothing of an event loop is kept, so an engine serves any number of `asyncio.run` calls.
"""

from __future__ import annotations

import asyncio
import math

from graft.actions.space import ActionSpace
from graft.engine.errors import EngineError
from graft.engine.native.runner import Draw, Runner
from graft.engine.native.scheduler import Request, Scheduler
from graft.engine.native.tree import Sequence, Tree
from graft.types import Completion, Finish


class Driver:
    """Owns the running task and the counters of what it did."""

    def __init__(
        self, tree: Tree, scheduler: Scheduler, runner: Runner, space: ActionSpace
    ) -> None:
        self.tree, self.scheduler, self.runner, self.space = tree, scheduler, runner, space
        self.steps = self.prefill_tokens = self.decode_tokens = 0
        self._stale: set[Sequence] = set()
        self._task: asyncio.Task[None] | None = None

    async def submit(self, request: Request) -> Completion:
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
                draws = self.runner.run(works)
                self.steps += 1
                drawing = sum(w.request is not None and w.count == 1 for w in works)
                self.decode_tokens += drawing
                self.prefill_tokens += sum(w.count for w in works) - drawing
                self._take(draws)
                await asyncio.sleep(0)
        except asyncio.CancelledError:  # the event loop is closing
            for request in self.scheduler.requests:
                request.is_over = True
                request.future.cancel()
            raise
        except Exception as error:
            # pages may be half written: keep nothing of this step
            self._forget_all()
            self.fail_all(error)

    def _take(self, draws: list[Draw]) -> None:
        broken = False
        for request, token, logprob, entropy in draws:
            if math.isnan(logprob):
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
            request.sequence.tokens.append(token)
            request.logprobs.append(logprob)
            request.entropies.append(entropy)
            request.modes.append(request.mode)
            if (  # nothing can end it here: no need to look closer
                request.grammar is None
                and request.stop_strings is None
                and token not in request.stop_tokens
                and len(request.logprobs) < request.room
            ):
                continue
            self._after(request, token)
        if broken:
            self._forget_all()

    def _after(self, request: Request, token: int) -> None:
        """End the completion, or get ready for its next token."""
        written = len(request.logprobs)
        if request.grammar is not None:
            request.mode = request.grammar.step(request.mode, token)
            if not 0 <= request.mode < self.space.num_modes:
                request.fail(
                    EngineError(
                        f"the grammar went to mode {request.mode} after action {token}, but the "
                        f"action space has modes 0 to {self.space.num_modes - 1}"
                    )
                )
                return
        if token in request.stop_tokens or (
            request.stop_strings is not None
            and written >= request.sampling.min_tokens
            and request.stop_strings.completed_by(request.sequence.tokens, request.start)
        ):
            request.finish(Finish.STOP)
        elif written >= request.room:
            request.finish(Finish.LENGTH)

    def _forget_all(self) -> None:
        for sequence in self.tree.sequences:
            self.tree.drop(sequence)
        self.tree.pages.wipe()

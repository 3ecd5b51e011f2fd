"""A sequence of tokens with its keys and values: the object that rollouts append to, fork and sample."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens

from graft.engine.checks import check_fork, check_free, check_tokens
from graft.engine.native.kv.sequences import Sequence
from graft.engine.native.loop import EngineLoop
from graft.engine.native.request import SampleRequest
from graft.engine.native.sampling.uniforms import derive
from graft.protocols import Grammar
from graft.types import Completion, Finish, Sampling

MakeRequest = Callable[["NativeContext", Sampling, Grammar | None], SampleRequest]


class NativeContext:
    """Tokens, and the KV pages that hold their keys and values.

        context = engine.open(prompt)
        twin = context.fork()                       # shares the prompt's pages
        completion = await context.sample(sampling)
        context.append(tool_answer)                 # computed with the next sample
        completion = await context.sample(sampling)
        context.close()

    `tokens` is the live list: do not modify it. The randomness of a sample is a function of (engine seed,
    `key`, position) alone. A grammar's mode is kept from sample to sample; set `mode` to start the next
    one in another.
    """

    def __init__(
        self,
        sequence: Sequence,
        key: int,
        loop: EngineLoop,
        make_request: MakeRequest,
        number: int,
        task: int = 0,
    ) -> None:
        """`number` names it in every process that holds the engine, `task` the prompt that it began with."""
        self.number, self.task = number, task
        self.tokens = sequence.tokens
        self.key = key % 2**64
        self.mode: int | None = None
        self.sequence = sequence
        self._loop, self._make_request = loop, make_request
        self._forks = 0
        self._request: SampleRequest | None = None
        self._is_open = True

    def append(self, tokens: Tokens[int]) -> None:
        """Add tokens that the model did not draw; they are computed with the next sample."""
        self._check_free("append to")
        ids = check_tokens(tokens, self._loop.space.vocab_size)
        self._loop.record("append", self.number, ids)
        self.tokens.extend(ids)

    def fork(self, key: int | None = None, at: int | None = None) -> NativeContext:
        """A context with the same tokens, or the first `at`, and draws of its own; full pages are shared.

        A fork at an earlier token has mode None (the grammar's start) until the caller sets it.
        """
        self._check_free("fork")
        length = len(self.tokens)
        at = length if at is None else at
        check_fork(at, length)
        self._forks += 1
        key = derive(self.key, self._forks) if key is None else key
        sequence = self._loop.tree.fork(self.sequence, at)
        number = self._loop.next_number()
        child = NativeContext(sequence, key, self._loop, self._make_request, number, self.task)
        self._loop.record("fork", self.number, key, at)
        child.mode = self.mode if at == length else None
        return child

    async def sample(self, sampling: Sampling, grammar: Grammar | None = None) -> Completion:
        """Draw until a stop, `max_tokens` or the window, and add the tokens to the context.

        If it fails or is cancelled the context is unchanged.
        """
        request = self.begin(sampling, grammar)
        if request.is_over:
            return await request.future
        is_whole = False
        try:
            completion = await self._loop.wait(request)
            is_whole = True
        finally:  # also when the caller was cancelled: the result is no longer needed
            self.end(is_whole)
        return completion

    def begin(self, sampling: Sampling, grammar: Grammar | None) -> SampleRequest:
        """Queue a sample."""
        self._check_free("sample from")
        request = self._make_request(self, sampling, grammar)
        if request.budget < 1:  # the window is full: nothing to compute
            request.finish(Finish.LENGTH)
            return request
        if (finish := request.force()) is not None:  # nothing is left to draw
            self._loop.record("append", self.number, self.tokens[request.start :])
            request.finish(finish)
            return request
        self._loop.record_sample(self.number, self.mode, sampling, grammar)
        self._request = request
        self._loop.add(request)
        return request

    def end(self, is_whole: bool) -> None:
        """The queued sample is over; unless it is whole, its tokens are removed."""
        request, self._request = self._request, None
        assert request is not None
        self._loop.record("end", self.number, is_whole)
        request.is_over = True
        if self._is_open:
            if not is_whole:
                self._loop.tree.truncate(self.sequence, request.start)
            self._loop.end_sample(self.sequence)
        if is_whole and request.grammar is not None:
            self.mode = request.mode

    @property
    def is_done(self) -> bool:
        """Closed, and without a sample in progress."""
        return not self._is_open and self._request is None

    def close(self) -> None:
        """Release the pages; a sample in progress ends as it is, finish "abort"."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.record("close", self.number)
        if self._request is not None and not self._request.is_over:
            self._request.finish(Finish.ABORT)
        self._loop.end_sample(self.sequence)
        self._loop.tree.close(self.sequence)

    def __enter__(self) -> NativeContext:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_free(self, action: str) -> None:
        check_free(action, is_open=self._is_open, is_sampling=self._request is not None)

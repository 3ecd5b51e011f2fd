"""The thread that owns vLLM: it steps vLLM while requests run, and does other work between two steps.

await context.sample(...)   ->  work: add a request     step step step  ->  its future is set
engine.load(weights, 3)     ->  work: end all requests with "pause", copy, reset the prefix cache
engine.sleep()              ->  work: give the memory back; the next load takes it again

Where several processes hold vLLM together, the first one's thread sends its calls of vLLM (add a request,
end one, step), and those of the others make the same calls.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from graft.engine.engine_group import EngineGroup
from graft.engine.errors import EngineError
from graft.engine.remote.stateless import PendingSample
from graft.engine.remote.top_entropy import entropy_of
from graft.engine.remote.vllm_library import (
    can_sleep,
    reload_weights,
    sleep,
    start_engine,
    stop_engine,
    wake,
)
from graft.engine.remote.weight_files import check_names, names_in
from graft.types import Completion, Finish

START_SECONDS = 1800.0
"""To start: a large model is read from the disk, compiled and measured."""


class VLLMSample:
    """A sample that vLLM computes, and the future that its event loop waits for."""

    def __init__(self, pending: PendingSample, loop: asyncio.AbstractEventLoop, top_k: int) -> None:
        self.pending, self.loop, self.top_k = pending, loop, top_k
        self.future: asyncio.Future[Completion] = loop.create_future()
        self.is_over = False

    def start(self, version: int) -> None:
        self.pending.version = version  # it may have waited for a load

    def take(self, output: Any) -> bool:
        """Add the drawn tokens; True once it is over."""
        [drawn] = output.outputs
        for token, known in zip(drawn.token_ids, drawn.logprobs, strict=True):
            top = [logprob.logprob for logprob in known.values() if logprob.rank <= self.top_k]
            logp: float = known[token].logprob
            finish = self.pending.add(token, logp, entropy_of(top, logp))
            if finish is not None:
                self.end(finish)
                return True
        if output.finished:  # only vLLM's window ends a sample before we do
            self.end(Finish.LENGTH)
        return output.finished

    def end(self, finish: Finish) -> None:
        self._resolve(lambda: self.future.set_result(self.pending.completion(finish)))

    def fail(self, error: Exception) -> None:
        self._resolve(lambda: self.future.set_exception(error))

    def _resolve(self, resolve: Callable[[], None]) -> None:
        self.is_over = True
        with suppress(RuntimeError):  # the event loop is closed: the result is not needed
            self.loop.call_soon_threadsafe(lambda: None if self.future.done() else resolve())


class VLLMScore:
    """Log-probs of given tokens: the last of a prompt, or one as the next token (`is_next`)."""

    def __init__(self, tokens: list[int], *, is_next: bool = False) -> None:
        self.tokens, self.is_next = tokens, is_next
        self.future: Future[list[float]] = Future()

    def start(self, version: int) -> None:
        pass

    def take(self, output: Any) -> bool:
        if output.finished:
            tables = output.outputs[0].logprobs if self.is_next else output.prompt_logprobs
            last = tables[-len(self.tokens) :]
            pairs = zip(self.tokens, last, strict=True)
            self.future.set_result([table[token].logprob for token, table in pairs])
        return output.finished

    def end(self, finish: Finish) -> None:
        self.fail(EngineError(f"engine 'vllm' ended a score ({finish})"))

    def fail(self, error: Exception) -> None:
        self.future.set_exception(error)


class VLLMThread:
    """vLLM with the weights of `folder`; `fault` is why it takes no requests.

    The methods with an underscore run on the thread, the others on the caller's.
    """

    def __init__(
        self,
        folder: Path,
        arguments: dict[str, Any],
        has_weights: bool,
        deadline: float,
        group: EngineGroup | None = None,
    ) -> None:
        self.folder, self.deadline, self.group = folder, deadline, group
        self._calls: list[tuple[str, tuple[Any, ...]]] = []  # made here, not yet sent to the others
        self._is_asleep = False
        self.version = 0
        self.fault = "" if has_weights else "has no weights yet: load() brings them"
        self.running: dict[str, VLLMSample | VLLMScore] = {}
        self._weight_names = names_in(folder)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_requests = 0
        self._thread = threading.Thread(target=self._run, name="graft-vllm", daemon=True)
        self._thread.start()
        try:
            self._llm: Any = self.call(lambda: start_engine(arguments), "to start", START_SECONDS)
        except BaseException:
            self._work.put(None)
            raise

    def call(self, work: Callable[[], Any], purpose: str, deadline: float = 0.0) -> Any:
        """Do the work between two steps; its result."""
        future: Future[Any] = Future()

        def do() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        if not self._thread.is_alive():
            raise EngineError("engine 'vllm' is closed")
        self._work.put(do)
        return self.wait(future, purpose, deadline)

    def wait(self, future: Future[Any], purpose: str, deadline: float = 0.0) -> Any:
        deadline = deadline or self.deadline
        try:
            return future.result(None if deadline == math.inf else deadline)
        except TimeoutError:
            raise EngineError(f"engine 'vllm' took more than {deadline:g} s {purpose}") from None

    def add(self, request: VLLMSample | VLLMScore, tokens: list[int], parameters: Any) -> str:
        """Start a request; its name, for `end`."""
        self._num_requests += 1
        name = f"graft-{self._num_requests}"
        self._work.put(lambda: self._add(name, request, tokens, parameters))
        return name

    def end(self, name: str, finish: Finish) -> None:
        """End a request as it is; nothing if it is over."""
        self._work.put(lambda: self._end(name, finish))

    def pause(self) -> None:
        self.call(lambda: self._end_all(Finish.PAUSE), "to pause")

    def load(self, weights: Mapping[str, Any], version: int) -> None:
        self.call(lambda: self._load(weights, version), "to load weights")

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back, where vLLM can; `load` takes it again."""
        self.call(self._sleep, "to give its memory back")

    def follow(self) -> None:
        """Make the calls that the first process of the group sends, until it releases this one."""
        self.call(self._follow, "to follow the first process", math.inf)

    def release(self) -> None:
        self.call(self._release, "to release the other processes")

    def close(self) -> None:
        self._work.put(
            lambda: self._fail_all(EngineError("the engine was closed while it sampled"))
        )
        self._work.put(lambda: stop_engine(self._llm))
        self._work.put(None)
        self._thread.join(self.deadline)

    def _run(self) -> None:
        while True:
            while not self.running or not self._work.empty():
                work = self._work.get()
                if work is None:
                    return
                work()
            try:
                outputs = self._do("step")
            except Exception as error:  # vLLM cannot be used after one
                self.fault = f"failed: {type(error).__name__}: {error}"
                self._fail_all(EngineError(f"engine 'vllm' {self.fault}"))
                continue
            for output in outputs:
                self._take(output)

    def _do(self, method: str, *args: Any) -> Any:
        """A call of vLLM, here and in the processes that follow; steps are computed together."""
        if self.group is not None:
            self._calls.append((method, args))
            if method == "step":
                self._send()
        return getattr(self._llm, method)(*args)

    def _send(self) -> None:
        assert self.group is not None
        self.group.send(self._calls)
        self._calls = []

    def _follow(self) -> None:
        assert self.group is not None
        while (calls := self.group.receive()) is not None:
            for method, args in calls:
                try:
                    getattr(self._llm, method)(*args)
                except Exception:
                    if method == "step":
                        raise
                    # a request that vLLM refuses: the first process reports it

    def _release(self) -> None:
        assert self.group is not None
        self._send()
        self.group.send(None)

    def _sleep(self) -> None:
        if can_sleep(self._llm) and not self._is_asleep:
            self._end_all(Finish.PAUSE)
            sleep(self._llm)
            self._is_asleep, self.fault = True, "sleeps while the learner works; load() wakes it"

    def _add(
        self, name: str, request: VLLMSample | VLLMScore, tokens: list[int], parameters: Any
    ) -> None:
        if self.fault:
            return request.fail(EngineError(f"engine 'vllm' {self.fault}"))
        try:
            self._do("add_request", name, {"prompt_token_ids": tokens}, parameters)
        except Exception as error:  # whatever vLLM raises for a request that it does not take
            return request.fail(EngineError(f"engine 'vllm' refused a sample: {error}"))
        request.start(self.version)
        self.running[name] = request

    def _take(self, output: Any) -> None:
        request = self.running.get(output.request_id)
        if request is not None and request.take(output):
            del self.running[output.request_id]
            if not output.finished:
                self._do("abort_request", [output.request_id])

    def _end(self, name: str, finish: Finish) -> None:
        request = self.running.pop(name, None)
        if request is not None:
            self._do("abort_request", [name])
            request.end(finish)

    def _end_all(self, finish: Finish) -> None:
        for name in list(self.running):
            self._end(name, finish)

    def _fail_all(self, error: EngineError) -> None:
        for request in self.running.values():
            request.fail(error)
        self.running.clear()

    def _load(self, weights: Mapping[str, Any], version: int) -> None:
        self._end_all(Finish.PAUSE)
        given: list[str] = []

        def each() -> Iterator[tuple[str, Any]]:
            for name, tensor in weights.items():
                given.append(name)
                yield name, tensor.detach()

        self.fault = "has weights that were only half replaced; give it all of them with load()"
        try:
            if self._is_asleep:
                wake(self._llm, "weights")
            reload_weights(self._llm, each())
            check_names(given, self._weight_names, self.folder)
            if self._is_asleep:
                wake(self._llm, "kv_cache")
            self._is_asleep = False
            if not self._llm.reset_prefix_cache():
                raise EngineError("engine 'vllm' did not reset its prefix cache")
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"engine 'vllm' could not load the weights: {error}") from error
        self.fault, self.version = "", version

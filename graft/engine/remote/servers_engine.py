"""`ServersEngine`: samples from a pool of vLLM's or SGLang's HTTP servers."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from threading import Thread
from typing import Any

from graft.engine.errors import EngineError
from graft.engine.remote.endpoint import EndpointError
from graft.engine.remote.server_context import ServerContext
from graft.engine.remote.server_pool import ServerPool
from graft.engine.remote.server_protocol import Server, ServerProtocol, ServerReply
from graft.engine.remote.stateless import PendingSample, StatelessEngine, seed_of
from graft.engine.remote.top_entropy import entropy_of, known_tokens
from graft.engine.remote.weight_files import WeightFolder
from graft.engine.remote.weight_tensors import buckets_of
from graft.engine.remote.weight_update import WeightUpdate
from graft.protocols import Tokenizer
from graft.types import Completion, Finish, Sampling

STOP_SECONDS = 10.0
"""Within which a server must return the tokens of a sample that was stopped."""


class ServerRequest:
    """A sample that a server computes; `end` may be called from any thread."""

    def __init__(self, name: str, server: Server) -> None:
        self.name, self.server = name, server
        self.finish: Finish | None = None
        self.loop = asyncio.get_running_loop()
        self.task: asyncio.Task[ServerReply] | None = None

    def end(self, finish: Finish) -> None:
        self.finish = self.finish or finish
        wait = 0.0 if finish is Finish.ABORT else STOP_SECONDS
        with suppress(RuntimeError):  # its event loop is closed: the result is not needed
            self.loop.call_soon_threadsafe(self.loop.call_later, wait, self._cancel)

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class ServersEngine(StatelessEngine):
    """An engine whose samples come from HTTP servers, which keep only the weights.

    urls          http://host:port of each. Contexts are spread over them; when a server dies a warning
                  is logged and its contexts move to the others
    model_folder  the Hugging Face folder that the run starts from
    exchange      the folder for weights, which the servers must see under the same path
    sync          "auto" or "file": weights by file; "memory": the tensors themselves, to SGLang
    deadline      seconds for a completion, or for a server to take new weights

    A sample that runs while new weights come ends with "pause" and the tokens that the server returns
    when it stops, before it loads them. A complete reply that may be of either version is discarded.
    """

    protocol_type: type[ServerProtocol] = ServerProtocol

    def __init__(
        self,
        urls: Sequence[str],
        model_folder: str | os.PathLike[str],
        *,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int] = (),
        seed: int = 0,
        deadline: float = 600.0,
        exchange: Path,
        sync: str = "auto",
        api_key_env: str = "",
    ) -> None:
        name = self.protocol_type.name
        super().__init__(name, model_folder, tokenizer, eos_ids, seed, deadline)
        if not urls or isinstance(urls, str):
            raise EngineError(f"engine.url={urls!r}: must list servers, such as [http://host:8000]")
        if sync == "memory" and not self.protocol_type.takes_tensors:
            raise EngineError(
                f"engine.sync={sync}: {name} servers take weights by file; use auto or file"
            )
        self.sync = sync
        self.protocol = self.protocol_type(self.folder, self.config, self.pieces, deadline)
        run = blake2b(str(exchange.absolute()).encode(), digest_size=4).hexdigest()
        self.pool = ServerPool(self.protocol, urls, run, api_key_env)
        self._process = f"{run}-{secrets.token_hex(3)}"  # in names of its files and requests
        self._weights = WeightFolder(exchange, self.folder, self._process)
        self._running: set[ServerRequest] = set()
        self._loading: Future[None] | None = None
        self._num_requests = 0

    @property
    def version(self) -> int:
        return self.pool.version

    @version.setter
    def version(self, version: int) -> None:
        self.pool.set_version(version)

    @property
    def entropy_top_k(self) -> int:
        return known_tokens(self.vocab_size, self.protocol.top_k)

    def _context(self, tokens: Sequence[int], key: int) -> ServerContext[Server]:
        return ServerContext(self, tokens, key, self.pool.pick() or self.pool.servers[0])

    async def complete(self, context: ServerContext[Server], sampling: Sampling) -> Completion:
        """A sample of a context; a server that fails is excluded, and another one takes the context."""
        self.check_open()
        try:
            async with asyncio.timeout(self.deadline):
                if self._loading is not None:
                    await asyncio.wrap_future(self._loading)
                if not self.pool.is_inspected:
                    await self.pool.inspect()
                while True:
                    server = context.server
                    pending = self.begin(context, sampling, self.version, server.window)
                    if pending.budget < 1 or len(context.tokens) > server.max_prompt:
                        return pending.completion(Finish.LENGTH)
                    if context.server.fault:
                        context.move(await self.pool.pick_or_revive())
                        continue
                    try:
                        return await self._request(context, pending)
                    except EndpointError as error:
                        if 400 <= error.code < 500 and error.code not in (408, 429):
                            raise  # the server works, and refuses the request
                        self.pool.exclude(context.server, error)
        except TimeoutError:
            raise EngineError(
                f"{self.where} at {context.server.url} did not complete a sample in "
                f"{self.deadline:g} s; raise rollout.deadline, or request fewer tokens"
            ) from None

    async def _request(self, context: ServerContext[Server], pending: PendingSample) -> Completion:
        """One request to the context's server."""
        server, protocol = context.server, self.protocol
        self._num_requests += 1
        request = ServerRequest(f"{self._process}-{self._num_requests}", server)
        seed = seed_of(self.seed, context.key, len(context.tokens))
        path, content = protocol.request(server, context.tokens, pending, seed, request.name)

        def read(answer: Any) -> ServerReply:
            reply = protocol.read(answer)
            if reply.finish == "abort" and request.finish is None and not reply.tokens:
                raise ValueError("a completion that the server aborted")
            return reply

        tag, num_loads = server.tag, self.pool.num_loads
        pending.version = self.pool.version_of(tag)
        retries = None if len(self.pool.servers) == 1 else 1
        request.task = asyncio.ensure_future(server.ask(path, content, read, retries=retries))
        self._running.add(request)
        context.stop = request.end
        try:
            reply: ServerReply = await request.task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if request.finish is None or (current is not None and current.cancelling()):
                raise
            return pending.completion(request.finish)
        finally:
            self._running.discard(request)
            request.task.cancel()
        if reply.finish == "abort":  # its tokens were drawn before any new weights
            return self._completion(reply, pending, request.finish)
        now = reply.tag if protocol.tags_replies else await protocol.read_tag(server)
        if now is not None and tag is not None and now != tag:
            self.pool.check_tag(server, now, tag)
            server.tag = now
            if not protocol.tags_replies:  # it may be of either version
                return pending.completion(Finish.PAUSE)
            pending.version = self.pool.version_of(now)
        elif num_loads != self.pool.num_loads:
            return pending.completion(Finish.PAUSE)
        return self._completion(reply, pending, request.finish)

    def _completion(
        self, reply: ServerReply, pending: PendingSample, ended: Finish | None
    ) -> Completion:
        """The tokens of the reply, up to where the native engine would have ended them."""
        has_logprobs = self.protocol.has_truncated_logprobs or not pending.sampling.is_truncating
        for token, logp, top in zip(reply.tokens, reply.logprobs, reply.top_logprobs, strict=True):
            entropy = entropy_of(top, logp) if has_logprobs else math.nan
            finish = pending.add(token, logp if has_logprobs else math.nan, entropy)
            if finish is not None:
                return pending.completion(finish)
        if reply.finish == "abort":
            return pending.completion(ended or Finish.PAUSE)
        return pending.completion(Finish.LENGTH if reply.finish == "length" else Finish.STOP)

    def _scores(
        self, cases: list[tuple[list[int], list[int]]], temperature: float
    ) -> list[list[float]]:
        if temperature <= 0:
            raise ValueError(f"cannot score at temperature {temperature}")

        async def each(server: Server, before: list[int], actions: list[int]) -> list[float]:
            tokens = before + actions
            if temperature == 1.0:
                return await self.protocol.score(server, tokens, len(actions))
            return [
                await self.protocol.score_next(server, tokens[:end], tokens[end], temperature)
                for end in range(len(before), len(tokens))
            ]

        async def main() -> list[list[float]]:
            if not self.pool.is_inspected:
                await self.pool.inspect()
            server = await self.pool.pick_or_revive()
            return await asyncio.gather(*(each(server, *case) for case in cases))

        return _run_in_thread(main())

    def _load(self, weights: Mapping[str, Any], version: int) -> None:
        """Give the weights to every server."""
        if not self.pool.is_inspected:
            self.health()
        protocol = self.protocol
        if self.sync == "memory":
            self._weights.check(weights)
            gifts = (partial(protocol.give_bucket, bucket=bucket) for bucket in buckets_of(weights))
            self._update(version, gifts, "engine.sync=file gives them by file")
            return
        folder = self._weights.write(weights)  # samples continue while it is written
        remedy = (
            f"The servers must see '{folder.parent}' under the same path; engine.exchange names "
            "another folder"
        )
        self._update(version, [partial(protocol.give_folder, folder=folder)], remedy)
        self._weights.keep_only(folder)

    def _update(
        self, version: int, gifts: Iterable[Callable[..., Awaitable[None]]], remedy: str
    ) -> None:
        """Pause the servers and the samples of this process, give, and resume.

        A split model is gathered here, bucket by bucket: on this thread, which has its device.
        """
        loading = self._loading = Future()
        update = WeightUpdate(self.pool, version)
        try:
            for request in list(self._running):
                request.end(Finish.PAUSE)
            try:
                _run_in_thread(update.take(self.protocol.pause))
                for gift in gifts:
                    _run_in_thread(update.take(partial(gift, tag=update.tag)))
            finally:
                _run_in_thread(update.resume())
        finally:
            self._loading = None
            loading.set_result(None)
        update.finish(remedy)

    def pause(self) -> None:
        """Stop all samples; each ends as soon as its server returns the tokens so far."""
        running = list(self._running)
        for request in running:
            request.end(Finish.PAUSE)

        async def stop(server: Server) -> None:
            names = [request.name for request in running if request.server is server]
            if names:
                # a server that cannot stop them: they end after STOP_SECONDS, without tokens
                with suppress(EngineError):
                    await self.protocol.stop(server, names)

        async def stop_all() -> None:
            await asyncio.gather(*(stop(server) for server in self.pool.servers))

        Thread(target=asyncio.run, args=(stop_all(),), name="graft-pause", daemon=True).start()

    def health(self) -> None:
        """EngineError with the address and the fault, unless every server can be used."""
        _run_in_thread(self.pool.inspect())

    def close(self) -> None:
        """Abort running samples and remove the weight files; the servers keep running."""
        if self.is_open:
            self.is_open = False
            for request in list(self._running):
                request.end(Finish.ABORT)
            self._weights.close()


def _run_in_thread(work: Coroutine[Any, Any, Any]) -> Any:
    """Run the coroutine on a thread of its own: the caller's may have a running event loop."""
    with ThreadPoolExecutor(1, "graft-servers") as pool:
        return pool.submit(asyncio.run, work).result()

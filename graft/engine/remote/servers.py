"""The engine that vLLM's and SGLang's servers have in common.

    contexts   a b c d   ->   server 1: a c    server 2: b d      forks stay with their prefix cache
    server 2 dies        ->   server 1: a c b d                   until the next weights find it alive

Who is asked, which weights said it, and what happens when a server dies is here; the words that each
kind of server wants to hear are in `vllm_server` and `sglang`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from graft.actions.space import ActionSpace
from graft.engine.errors import EngineError
from graft.engine.remote.stateless import (
    PendingSample,
    StatelessBackend,
    StatelessContext,
    check_score,
    check_space,
    model_config,
    seed_of,
    window_of,
)
from graft.engine.remote.top_entropy import TOP_K, entropy_of, known_tokens
from graft.engine.remote.weight_files import WeightFolder
from graft.engine.remote.wire import Endpoint, EndpointError
from graft.engine.stop_strings import TokenPieces
from graft.protocols import Tokenizer
from graft.types import Completion, Finish, Sampling

GRACE = 10.0
"""Seconds a server has to give back what it said when it is told to stop."""


class ServerReply(NamedTuple):
    """What a server said."""

    tokens: list[int]
    logprobs: list[float]
    tops: list[list[float]]
    """Of each token, the log-probs of the likeliest in its place."""
    finish: str
    """stop, length or abort."""
    tag: str | None = None
    """The weights it said so with, where it tells."""


class Server:
    """One of the servers, and what we know of it."""

    def __init__(self, url: str, deadline: float) -> None:
        key = os.environ.get("OPENAI_API_KEY", "").strip()
        base = url.rstrip("/").removesuffix("/v1")
        # one attempt may take all the time there is: a long completion is no fault
        self.endpoint = Endpoint(base, key=key, timeout=deadline, deadline=deadline)
        self.url = self.endpoint.url
        self.fault = ""
        """Why it is not asked, until new weights find it in order."""
        self.tag: str | None = None
        """The weights that it has, as it calls them."""
        self.model = ""
        self.window: float = math.inf
        self.contexts = 0

    async def ask(
        self,
        path: str,
        content: Mapping[str, Any] | None = None,
        read: Callable[[Any], Any] = lambda answer: answer,
        *,
        retries: int | None = 0,
    ) -> Any:
        return await self.endpoint.ask(path, content, read, retries=retries)

    async def ask_one_of(self, *paths: str) -> Any:
        """Of names of one thing in older and newer servers, the first that it knows; else None."""
        for path in paths:
            try:
                return await self.ask(path, retries=None)
            except EndpointError as error:
                if error.code != 404:
                    raise
        return None


class ContextServer(StatelessContext):
    """A context that stays on one server, and its forks with it: the prefix cache is there."""

    def __init__(
        self, engine: StatelessBackend, tokens: Sequence[int], key: int, server: Server
    ) -> None:
        super().__init__(engine, tokens, key)
        self.server = server
        server.contexts += 1

    def move(self, server: Server) -> None:
        self.server.contexts -= 1
        self.server = server
        server.contexts += 1

    def close(self) -> None:
        if self._is_open:
            self.server.contexts -= 1
        super().close()

    def _twin(self, tokens: list[int], key: int) -> ContextServer:
        return ContextServer(self.engine, tokens, key, self.server)


class ServerRequest:
    """A sample that a server works on; `end` may be called from any thread."""

    def __init__(self, name: str, server: Server) -> None:
        self.name, self.server = name, server
        self.finish: Finish | None = None
        self.loop = asyncio.get_running_loop()
        self.task: asyncio.Task[ServerReply] | None = None

    def end(self, finish: Finish) -> None:
        self.finish = self.finish or finish
        wait = 0.0 if finish is Finish.ABORT else GRACE
        with suppress(RuntimeError):  # its loop is closed: nobody waits
            self.loop.call_soon_threadsafe(self.loop.call_later, wait, self._give_up)

    def _give_up(self) -> None:
        if self.task is not None:
            self.task.cancel()


class ServersEngine:
    """An engine whose samples come from HTTP servers; what they keep of ours is the weights alone.

    urls          http://host:port of each. Contexts are spread over them; a server that dies is
                  told of and its contexts go on elsewhere
    model_folder  the Hugging Face folder that the run starts from
    exchange      the folder for weights, which the servers must see under the same path
    sync          "auto" or "file": these servers take weights by file
    deadline      seconds for a completion, or for a server to take new weights

    A sample that runs while new weights come ends with "pause". What it says then was said before:
    a server first stops what it does. A reply that was whole, and may be of either, is thrown away.

    Servers keep a tag with the weights, "RUN-v3", and tell it. The run is named by its exchange, so
    that several processes may ask the same servers while one of them loads: a reply of a later version
    of the run is just that. Any other tag is a stale engine.
    """

    name = ""
    tells_cut = True
    """Whether log-probs are of the distribution that top-k, top-p and min-p leave."""
    tags_replies = False
    """Whether a reply has the tag of the weights that said it; else the server is asked after it."""

    def __init__(
        self,
        urls: Sequence[str],
        model_folder: str | os.PathLike[str],
        *,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int] = (),
        seed: int = 0,
        space: ActionSpace | None = None,
        deadline: float = 600.0,
        exchange: Path,
        sync: str = "auto",
    ) -> None:
        check_space(space, self.name)
        if not urls or isinstance(urls, str):
            raise EngineError(f"engine.url={urls!r}: must list servers, such as [http://host:8000]")
        if sync not in ("auto", "file"):
            raise EngineError(
                f"engine.sync={sync}: {self.name} servers take weights by file; use auto or file"
            )
        self.folder = Path(model_folder)
        self.config = model_config(self.folder, self.name)
        self.vocab_size: int = self.config["vocab_size"]
        self.eos_ids, self.seed = frozenset(eos_ids), seed
        self.deadline = deadline
        self.servers = [Server(url, deadline) for url in urls]
        self.top_k = min(TOP_K, self.vocab_size)
        place = str(Path(exchange).absolute())
        self.run = blake2b(place.encode(), digest_size=4).hexdigest()
        self._own = f"{self.run}-{secrets.token_hex(3)}"  # files and requests of this process
        self._exchange = WeightFolder(Path(exchange), self.folder, self._own)
        self._pieces = TokenPieces(tokenizer)
        self._running: set[ServerRequest] = set()
        self._loading: Future[None] | None = None
        self._opened = self._asked = self._loads = self._version = 0
        self._is_known, self._is_open = False, True

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        """Another process of the run gave them these weights."""
        self._version = version
        for server in self.servers:
            server.tag = f"{self.run}-v{version}"

    @property
    def entropy_top_k(self) -> int:
        return known_tokens(self.vocab_size, self.top_k)

    @property
    def where(self) -> str:
        return f"engine '{self.name}'"

    def open(self, tokens: Sequence[int], key: int | None = None) -> ContextServer:
        if not self._is_open:
            raise EngineError("the engine is closed")
        self._opened += 1
        key = seed_of(0, self._opened) if key is None else key
        return ContextServer(self, tokens, key, self._choose() or self.servers[0])

    async def say(self, context: ContextServer, sampling: Sampling) -> Completion:
        if not self._is_open:
            raise EngineError("the engine is closed")
        try:
            async with asyncio.timeout(self.deadline):
                if self._loading is not None:
                    await asyncio.wrap_future(self._loading)
                if not self._is_known:
                    await self._look_at_all()
                return await self._say(context, sampling)
        except TimeoutError:
            raise EngineError(
                f"{self.where} at {context.server.url} did not complete a sample in "
                f"{self.deadline:g} s; raise rollout.deadline, or ask for fewer tokens"
            ) from None

    async def _say(self, context: ContextServer, sampling: Sampling) -> Completion:
        while True:
            saying = self._saying(context, sampling)
            if saying.room < 1:
                return saying.end(Finish.LENGTH)
            server = context.server
            if server.fault:
                other = self._choose() or await self._revive()
                context.move(other)
                continue
            try:
                return await self._ask(context, saying)
            except EndpointError as error:
                if 400 <= error.code < 500 and error.code not in (408, 429):
                    raise  # it lives, and does not like what it is asked
                server.fault = str(error)
                if all(other.fault for other in self.servers):
                    raise
                logging.getLogger("graft").warning(
                    "%s: server %s is left out until the next weights: %s. Its samples go to others",
                    self.where,
                    server.url,
                    error,
                )

    async def _ask(self, context: ContextServer, saying: PendingSample) -> Completion:
        server = context.server
        self._asked += 1
        asking = ServerRequest(f"{self._own}-{self._asked}", server)
        seed = seed_of(self.seed, context.key, len(context.tokens))
        path, content = self._request(server, context.tokens, saying, seed, asking.name)

        def read(answer: Any) -> ServerReply:
            reply = self._read(answer)
            if reply.finish == "abort" and asking.finish is None and not reply.tokens:
                raise ValueError("a completion that it gave up itself")
            return reply

        tag, loads = server.tag, self._loads
        saying.version = self._version_of(tag)
        retries = None if len(self.servers) == 1 else 1
        asking.task = asyncio.ensure_future(server.ask(path, content, read, retries=retries))
        self._running.add(asking)
        context.stop = asking.end
        try:
            reply: ServerReply = await asking.task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if asking.finish is None or (current is not None and current.cancelling()):
                raise
            return saying.end(asking.finish)
        finally:
            self._running.discard(asking)
            asking.task.cancel()
        if reply.finish == "abort":  # what it said was said before the weights changed, if they did
            return self._replay(reply, saying, asking.finish)
        now = reply.tag if self.tags_replies else await self._tag(server)
        if now is not None and tag is not None and now != tag:
            self._check_tag(server, now, tag)
            server.tag = now
            if not self.tags_replies:  # it may be of either
                return saying.end(Finish.PAUSE)
            saying.version = self._version_of(now)
        elif loads != self._loads:
            return saying.end(Finish.PAUSE)
        return self._replay(reply, saying, asking.finish)

    def _version_of(self, tag: str | None) -> int:
        """The version that a tag of this run names; the engine's where it names none."""
        found = re.fullmatch(rf"{self.run}-v(\d+)", tag or "")
        return int(found[1]) if found else self._version

    def _check_tag(self, server: Server, now: str, before: str) -> None:
        """EndpointError unless it went on to a later version of this run."""
        if now.startswith(f"{self.run}-v") and self._version_of(now) > self._version_of(before):
            return
        raise EndpointError(
            f"{self.where}: server {server.url} is a stale engine: it has the weights {now!r}, not "
            f"{before!r}. Was it started anew, or does another run use it too?"
        )

    def _replay(
        self, reply: ServerReply, saying: PendingSample, ended: Finish | None
    ) -> Completion:
        """What was said, up to where the native engine would have ended it."""
        is_told = self.tells_cut or not saying.sampling.is_truncating
        for token, logp, top in zip(reply.tokens, reply.logprobs, reply.tops, strict=True):
            entropy = entropy_of(top, logp) if is_told else math.nan
            finish = saying.add(token, logp if is_told else math.nan, entropy)
            if finish is not None:
                return saying.end(finish)
        if reply.finish == "abort":
            return saying.end(ended or Finish.PAUSE)
        return saying.end(Finish.LENGTH if reply.finish == "length" else Finish.STOP)

    def score(
        self,
        texts: Sequence[Sequence[int]],
        at: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        mode: int = 0,
        temperature: float = 1.0,
    ) -> list[list[list[list[float]]]]:
        """Log-probs [i][j][k] of action k of continuations[j] after text[: at[i]], for each text.

        At temperature 1 those of prompts; else every token is asked for one by one.
        """
        asked = check_score(texts, at, continuations, mode, self.vocab_size)
        if temperature <= 0:
            raise ValueError(f"cannot score at temperature {temperature}")

        async def each(server: Server, text: Sequence[int], actions: list[int]) -> list[float]:
            tokens = [*text, *actions]
            if temperature == 1.0:
                return await self._score(server, tokens, len(actions))
            ends = range(len(text), len(tokens))
            return [
                await self._score_next(server, tokens[:end], tokens[end], temperature)
                for end in ends
            ]

        async def main() -> list[list[float]]:
            if not self._is_known:
                await self._look_at_all()
            server = self._choose() or await self._revive()
            return await asyncio.gather(
                *(
                    each(server, text[:place], actions)
                    for text, places in zip(texts, at, strict=True)
                    for place in places
                    for actions in asked
                )
            )

        found = iter(_apart(main()))
        return [[[next(found) for _ in asked] for _ in places] for places in at]

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Write the weights, and have every server read them. What is running ends with "pause"."""
        if weights is None:
            raise EngineError(
                f"{self.where} has weights of its own and does not see those that were changed in "
                "place; give them to load(), or use engine.name=native"
            )
        if not self._is_known:
            self.health()
        folder = self._exchange.write(weights)  # samples go on while it is written
        loading = self._loading = Future()
        try:
            self._loads += 1
            for asking in list(self._running):
                asking.end(Finish.PAUSE)
            _apart(self._give_all(folder, f"{self.run}-v{version}"))
            self._version = version
        finally:
            self._loading = None
            loading.set_result(None)
        self._exchange.keep_only(folder)

    async def _give_all(self, folder: Path, tag: str) -> None:
        """One that was out of order and takes them is in order again."""

        unwilling = False  # somebody is there, and cannot or will not

        async def give(server: Server) -> None:
            nonlocal unwilling
            server.tag = tag  # whatever happens, what it had is no longer good enough
            try:
                await self._give(server, folder, tag)
                server.fault = ""
            except EngineError as error:
                server.fault = str(error)
                unwilling |= not isinstance(error, EndpointError) or error.code > 0

        await asyncio.gather(*(give(server) for server in self.servers))
        out = [server for server in self.servers if server.fault]
        text = "; ".join(f"server {server.url}: {server.fault}" for server in out)
        if len(out) == len(self.servers):
            remedy = "The same command goes on from the last checkpoint once a server is back"
            if unwilling:
                remedy = (
                    f"The servers must see '{folder.parent}' under this very path; engine.exchange "
                    "names another"
                )
            raise EngineError(f"{self.where}: no server took the new weights. {text}. {remedy}")
        if out:
            logging.getLogger("graft").warning("%s goes on without %s", self.where, text)

    def pause(self) -> None:
        """Tell the servers to stop; the samples end as soon as they give back what they have."""
        running = list(self._running)
        for asking in running:
            asking.end(Finish.PAUSE)

        async def stop(server: Server) -> None:
            names = [asking.name for asking in running if asking.server is server]
            if names:
                # where it does not know how, its samples end after GRACE, with nothing
                with suppress(EngineError):
                    await self._stop(server, names)

        async def stop_all() -> None:
            await asyncio.gather(*(stop(server) for server in self.servers))

        Thread(target=asyncio.run, args=(stop_all(),), name="graft-pause", daemon=True).start()

    def health(self) -> None:
        """EngineError with the address and what was seen, unless every server is in order."""
        _apart(self._look_at_all())

    def close(self) -> None:
        """The servers go on; the files for them do not."""
        if self._is_open:
            self._is_open = False
            for asking in list(self._running):
                asking.end(Finish.ABORT)
            self._exchange.close()

    async def _look_at_all(self) -> None:
        for server in self.servers:
            try:
                await self._look(server)
                await self._check_temperature(server)
            except EngineError as error:
                raise EngineError(f"{self.where}: server {server.url}: {error}") from None
            server.tag = server.tag or await self._tag(server)
        self._is_known = True

    async def _check_temperature(self, server: Server) -> None:
        """Log-probs at half the temperature are twice as far from each other, if it tells them."""
        gaps: list[float] = []
        for temperature in (1.0, 0.5):
            sampling = Sampling(temperature=temperature, max_tokens=1)
            saying = PendingSample(
                [], sampling, eos_ids=frozenset(), pieces=self._pieces, room=1, version=0
            )
            path, content = self._request(server, [0], saying, 1, f"{self._own}-probe")
            reply: ServerReply = await server.ask(path, content, self._read, retries=None)
            top = sorted(reply.tops[0], reverse=True)[: self.top_k]
            gaps.append(top[0] - top[-1])
        at_one, at_half = gaps
        if abs(at_half - 2 * at_one) > 0.25 * at_one + 1e-3:
            raise EngineError(
                f"it tells the log-probs of temperature 1 whatever the temperature (gaps {at_one:.4g} "
                f"and {at_half:.4g}), which cannot be trained with: {self._how_to_process()}"
            )

    def _choose(self) -> Server | None:
        """Of the servers in order, the one with the fewest contexts."""
        alive = [server for server in self.servers if not server.fault]
        return min(alive, key=lambda server: server.contexts, default=None)

    async def _revive(self) -> Server:
        """With none left: one that answers again, and has the weights that it had."""
        for server in self.servers:
            with suppress(EngineError):
                now = await self._tag(server)
                if now == server.tag or (now is None and not self._loads):
                    server.fault = ""
                    return server
        faults = "; ".join(f"server {server.url}: {server.fault}" for server in self.servers)
        raise EngineError(f"{self.where} has no server left: {faults}")

    def _saying(self, context: ContextServer, sampling: Sampling) -> PendingSample:
        window = min(context.server.window, window_of(self.config))
        return PendingSample(
            context.tokens,
            sampling,
            eos_ids=self.eos_ids,
            pieces=self._pieces,
            room=int(min(sampling.max_tokens, window - len(context.tokens))),
            version=self.version,
        )

    # What each kind of server has its own words for.

    async def _look(self, server: Server) -> None:
        """Fill in what the server is; EngineError if it is not what we need."""
        raise NotImplementedError

    async def _tag(self, server: Server) -> str | None:
        raise NotImplementedError

    def _request(
        self, server: Server, tokens: list[int], saying: PendingSample, seed: int, name: str
    ) -> tuple[str, dict[str, Any]]:
        """Path and content."""
        raise NotImplementedError

    def _read(self, answer: Any) -> ServerReply:
        """ValueError for what is no reply."""
        raise NotImplementedError

    async def _score(self, server: Server, tokens: list[int], count: int) -> list[float]:
        """Log-probs of the last `count` tokens at temperature 1."""
        raise NotImplementedError

    async def _score_next(
        self, server: Server, tokens: list[int], token: int, temperature: float
    ) -> float:
        """The log-prob of `token` after `tokens`."""
        raise NotImplementedError

    async def _give(self, server: Server, folder: Path, tag: str) -> None:
        """Have it stop what it does, read the weights and forget its cache."""
        raise NotImplementedError

    async def _stop(self, server: Server, names: list[str]) -> None:
        """Have it give back the samples of these names as they are."""
        raise NotImplementedError

    def _how_to_process(self) -> str:
        raise NotImplementedError


def _apart(work: Coroutine[Any, Any, Any]) -> Any:
    """Wait for it on a thread of its own: the caller's may have a running loop."""
    with ThreadPoolExecutor(1, "graft-servers") as pool:
        return pool.submit(asyncio.run, work).result()

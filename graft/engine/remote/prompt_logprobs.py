"""Log-probs of given tokens by a server: a teacher that runs elsewhere.

    vLLM        /completions with prompt_logprobs=K: of every token, and of the K likeliest at its place
    others      /completions with echo and logprobs (SGLang, llama.cpp): of every token only

Tokens are sent as numbers, and the server's tokenizer must be ours: one that encodes a text differently is
refused. Requests are repeated as `Endpoint` says; a server that stays down ends the run, which can be
resumed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from graft.engine.errors import EngineError
from graft.engine.remote.endpoint import EndpointError, parsing
from graft.engine.remote.openai_servers import OpenAIServer
from graft.protocols import Tokenizer

T = TypeVar("T")
CONCURRENT = 32
"""Requests that are under way at a time."""
PROBE = "The answer is 42: 3.5 x 12, naïve Ωμέγα 数学\n\tdef f(x): return x**2 + 0.1  # <b>ok</b>"
"""Encoded by both tokenizers."""


@dataclass(frozen=True, slots=True)
class ScoredText:
    """Parallel lists, one entry per token; the first token has nothing before it."""

    logprobs: list[float]
    ids: list[list[int]]
    """[tokens][K] the likeliest tokens."""
    tops: list[list[float]]
    """[tokens][K] their log-probs, likeliest first; -inf where the server gave fewer than K."""


class PromptScorer:
    """A server that scores tokens.

    url        its base, such as http://host:8000/v1
    model      the name that it serves; "" takes the only one
    deadline   seconds for one answer, attempts and pauses together
    """

    def __init__(
        self,
        url: str,
        tokenizer: Tokenizer,
        *,
        model: str = "",
        deadline: float = 600.0,
        api_key_env: str = "",
    ) -> None:
        self.server = OpenAIServer(url, deadline, api_key_env)
        self.tokenizer, self.model = tokenizer, model
        self.has_candidates: bool | None = None
        """Whether it returns likeliest tokens by their numbers; None: not known yet."""

    def check(self, top_k: int) -> None:
        """Refuse a server that does not answer, whose tokenizer differs, or that cannot give `top_k`."""
        _wait(self._check(top_k))

    def score(self, texts: Sequence[Sequence[int]], top_k: int = 0) -> list[ScoredText]:
        """The log-probs of these texts, and of the `top_k` likeliest tokens at each place."""
        return _wait(self._score(texts, top_k))

    async def _check(self, top_k: int) -> None:
        await self.server.inspect(self.model)
        probe = self._encodable(PROBE)
        mine = self.tokenizer.encode(probe)
        root = self.server.url.removesuffix("/v1")
        content = {"model": self.server.model, "prompt": probe, "add_special_tokens": False}
        try:
            theirs = await self.server.ask_at(f"{root}/tokenize", content, _tokens)
        except EndpointError as error:
            if error.code not in (404, 405, 400, 422, 501):
                raise
            theirs = mine  # it does not say; its echo is compared below
        if list(theirs) != list(mine):
            raise EngineError(
                f"{self.server.where} encodes {probe!r} as {list(theirs)[:12]}..., the policy's tokenizer as "
                f"{list(mine)[:12]}...: a teacher must have the policy's tokenizer. Take a teacher of the "
                "same family"
            )
        await self._score([mine], top_k)

    def _encodable(self, text: str) -> str:
        """The characters of the probe that the policy's tokenizer has."""

        def is_known(character: str) -> bool:
            try:
                return self.tokenizer.decode(self.tokenizer.encode(character)) == character
            except ValueError:
                return False

        return "".join(filter(is_known, text))

    async def _score(self, texts: Sequence[Sequence[int]], top_k: int) -> list[ScoredText]:
        if not self.server.model:
            await self.server.inspect(self.model)
        gate = asyncio.Semaphore(CONCURRENT)

        async def score_text(tokens: Sequence[int]) -> ScoredText:
            async with gate:
                return await self._ask(list(tokens), top_k)

        first = [await score_text(text) for text in texts[:1]]  # shows which API it has
        return first + await asyncio.gather(*(score_text(text) for text in texts[1:]))

    async def _ask(self, tokens: list[int], top_k: int) -> ScoredText:
        content: dict[str, Any] = {
            "model": self.server.model,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0.0,
        }
        if self.has_candidates is not False:
            asked = {**content, "prompt_logprobs": top_k}
            try:
                return await self._with_candidates(asked, tokens, top_k)
            except _NoCandidates:
                self.has_candidates = False
        if top_k:
            raise EngineError(
                f"{self.server.where} does not give its likeliest tokens by their numbers "
                "(prompt_logprobs, as vLLM does), so its distribution is not known; learn from the sampled "
                "tokens (algo.name=opd), or serve the teacher with vLLM"
            )
        asked = {**content, "echo": True, "logprobs": 1}
        return await self.server.ask("/completions", asked, lambda a: self._echoed(a, tokens))

    async def _with_candidates(
        self, content: dict[str, Any], tokens: list[int], top_k: int
    ) -> ScoredText:
        try:
            found = await self.server.ask(
                "/completions", content, lambda answer: _prompt_logprobs(answer, tokens, top_k)
            )
        except EndpointError as error:
            if error.code in (400, 422) and self.has_candidates is None and not top_k:
                raise _NoCandidates from None
            if error.code == 400 and "logprobs" in str(error):
                raise EndpointError(
                    f"{error}. distill.top_k={top_k} is more than this server returns: start vLLM with "
                    f"--max-logprobs {top_k}",
                    400,
                ) from None
            raise
        if found is None:
            raise _NoCandidates
        self.has_candidates = True
        return found

    def _echoed(self, answer: Any, tokens: list[int]) -> ScoredText:
        """Log-probs of an echoed prompt, whose tokens must be those that were sent."""
        with parsing(answer, "log-probs of the prompt"):
            found = answer["choices"][0]["logprobs"]
            texts, logprobs = found["tokens"], found["token_logprobs"]
            texts, logprobs = texts[: len(tokens)], logprobs[: len(tokens)]
            values = [math.nan, *map(float, logprobs[1:])]
        if len(values) != len(tokens):
            raise ValueError(f"log-probs of {len(values)} tokens, and {len(tokens)} were sent")
        mine = [self.tokenizer.decode([token]) for token in tokens]
        if any(_differs(theirs, own) for theirs, own in zip(texts, mine, strict=True)):
            raise EngineError(
                f"{self.server.where} reads the tokens {tokens[:8]} as {texts[:8]}, the policy's tokenizer "
                f"as {mine[:8]}: a teacher must have the policy's tokenizer"
            )
        return ScoredText(values, [[] for _ in tokens], [[] for _ in tokens])


class _NoCandidates(Exception):
    """The server does not know prompt_logprobs."""


def _differs(theirs: Any, mine: str) -> bool:
    """Servers write parts of characters in ways of their own, and some leave special tokens out."""
    text = str(theirs)
    is_whole = "\ufffd" not in mine and "\ufffd" not in text and not text.startswith("bytes:")
    return bool(is_whole and text and text.strip() != mine.strip())


def _tokens(answer: Any) -> list[int]:
    with parsing(answer, "tokens"):
        return [int(token) for token in answer["tokens"]]


def _prompt_logprobs(answer: Any, tokens: list[int], top_k: int) -> ScoredText | None:
    """vLLM's prompt_logprobs; None where the answer has none.

    [None, {"7": {"logprob": -0.4}, "9": {"logprob": -1.2}}]: of the second token, and its likeliest ones
    """
    with parsing(answer, "completion"):
        choice = answer["choices"][0]
        entries = choice.get("prompt_logprobs", answer.get("prompt_logprobs"))
    if entries is None:
        return None
    with parsing(answer, "log-probs of the prompt"):
        if len(entries) != len(tokens):
            raise ValueError
        logprobs, ids, tops = [math.nan], [[0] * top_k], [[-math.inf] * top_k]
        for token, entry in zip(tokens[1:], entries[1:], strict=True):
            known = {int(one): float(about["logprob"]) for one, about in entry.items()}
            logprobs.append(known[token])
            best = sorted(known.items(), key=lambda item: -item[1])[:top_k]
            missing = top_k - len(best)
            ids.append([one for one, _ in best] + [0] * missing)
            tops.append([value for _, value in best] + [-math.inf] * missing)
    return ScoredText(logprobs, ids, tops)


def _wait(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, also where an event loop is running in this thread."""
    with ThreadPoolExecutor(1, "teacher") as worker:
        return worker.submit(asyncio.run, work).result()

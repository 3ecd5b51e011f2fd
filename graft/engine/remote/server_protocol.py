"""One inference server, and what each kind of server (`vllm_server`, `sglang`) does in its own way."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from graft.engine.errors import EngineError
from graft.engine.remote.endpoint import Endpoint, EndpointError
from graft.engine.remote.stateless import PendingSample
from graft.engine.remote.top_entropy import TOP_K
from graft.engine.remote.weight_tensors import TensorBucket
from graft.engine.stop_strings import TokenPieces
from graft.types import Sampling


class ServerReply(NamedTuple):
    """A completion as a server returns it."""

    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[list[float]]
    """For each token, the log-probs of the likeliest tokens at its position."""
    finish: str
    """stop, length or abort."""
    tag: str | None = None
    """The weights that sampled it, from servers that return them."""


class Server(Endpoint):
    """The connection to one server, and its state as far as it is known."""

    def __init__(self, url: str, deadline: float, api_key_env: str = "") -> None:
        super().__init__(
            url.rstrip("/").removesuffix("/v1"),
            timeout=deadline,  # one attempt may take all of it: a long completion is no fault
            deadline=deadline,
            api_key_env=api_key_env,
        )
        self.fault = ""
        """Why it gets no requests; cleared when it takes new weights."""
        self.tag: str | None = None
        """The weights that it has, by its own report."""
        self.model = ""
        self.window: float = math.inf
        self.max_prompt: float = math.inf
        """Tokens that a request may have; some servers keep a few of the window for what they sample."""
        self.tp = 1
        """Processes that hold its model together."""
        self.is_on_gpu = False
        self.num_contexts = 0

    async def ask_first_known(self, *paths: str, content: Mapping[str, Any] | None = None) -> Any:
        """The answer of the first path that this version of the server has; None if it has none."""
        for path in paths:
            try:
                return await self.ask(path, content, retries=None if content is None else 0)
            except EndpointError as error:
                if error.code != 404:
                    raise
        return None


class ServerProtocol:
    """Requests and answers of one kind of server, for the model in `folder` with this config.json."""

    name = ""
    has_truncated_logprobs = True
    """Whether log-probs are of the distribution after top-k, top-p and min-p."""
    tags_replies = False
    """Whether a reply carries the tag of its weights; else the tag is requested after the reply."""
    takes_tensors = False
    """Whether it takes weights through memory, without a file."""
    logprobs_remedy = ""
    """How to start a server so that its log-probs are at the sampling temperature."""

    def __init__(
        self, folder: Path, config: dict[str, Any], pieces: TokenPieces, deadline: float
    ) -> None:
        self.folder, self.config, self.pieces, self.deadline = folder, config, pieces, deadline
        self.top_k = min(TOP_K, config["vocab_size"])
        self.where = f"engine '{self.name}'"

    async def inspect(self, server: Server) -> None:
        """Read the properties of the server; EngineError if it cannot be used."""
        raise NotImplementedError

    async def read_tag(self, server: Server) -> str | None:
        """The tag of the weights that the server has; None if it keeps none."""
        raise NotImplementedError

    def request(
        self, server: Server, tokens: list[int], pending: PendingSample, seed: int, name: str
    ) -> tuple[str, dict[str, Any]]:
        """Path and content of the request for a sample."""
        raise NotImplementedError

    def read(self, answer: Any) -> ServerReply:
        """The reply in an answer to `request`; ValueError if there is none."""
        raise NotImplementedError

    async def score(self, server: Server, tokens: list[int], count: int) -> list[float]:
        """Log-probs of the last `count` tokens at temperature 1."""
        raise NotImplementedError

    async def score_next(
        self, server: Server, tokens: list[int], token: int, temperature: float
    ) -> float:
        """The log-prob of `token` after `tokens`."""
        raise NotImplementedError

    async def pause(self, server: Server) -> None:
        """Make the server stop its samples and start no others."""
        raise NotImplementedError

    async def give_folder(self, server: Server, folder: Path, tag: str) -> None:
        """Make a paused server read the weights in `folder` and drop its cache."""
        raise NotImplementedError

    async def give_bucket(self, server: Server, bucket: TensorBucket, tag: str) -> None:
        """Make a paused server take these tensors and, with the last of them, drop its cache."""
        raise NotImplementedError

    async def resume(self, server: Server) -> None:
        """Let the server sample again."""
        raise NotImplementedError

    async def stop(self, server: Server, names: list[str]) -> None:
        """Make the server end the requests of these names and return their tokens so far."""
        raise NotImplementedError

    async def check_temperature(self, server: Server) -> None:
        """EngineError unless log-probs at half the temperature are twice as far apart."""
        gaps: list[float] = []
        for temperature in (1.0, 0.5):
            pending = PendingSample(
                [],
                Sampling(temperature=temperature, max_tokens=1),
                eos_ids=frozenset(),
                pieces=self.pieces,
                budget=1,
                version=0,
            )
            name = f"graft-probe-{secrets.token_hex(3)}"  # other processes probe it, too
            path, content = self.request(server, [0], pending, 1, name)
            reply: ServerReply = await server.ask(path, content, self.read)
            top = sorted(reply.top_logprobs[0], reverse=True)[: self.top_k]
            gaps.append(top[0] - top[-1])
        at_one, at_half = gaps
        if abs(at_half - 2 * at_one) > 0.25 * at_one + 1e-3:
            raise EngineError(
                f"its log-probs are those of temperature 1 at every temperature (gaps {at_one:.4g} and "
                f"{at_half:.4g}), which cannot be trained with: {self.logprobs_remedy}"
            )

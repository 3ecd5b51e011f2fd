r"""`OpenAIEngine`: samples from any server with OpenAI's API (vLLM, SGLang, llama.cpp, OpenAI itself).

Two APIs:

    completions   the whole context as raw text, in our own chat template; the server continues it, so a
                  tool result can stand in the middle of the policy's turn. Needs the model's
                  tokenizer here.
    chat          a list of messages, in the server's template. No tokenizer: contexts are bytes in
                  the template CONVERSATION, from which the messages are read back. A turn cannot be
                  continued: no inline tools, no prefill.

    "\x1e{"role": "user", "content": "2+3="}\x1eassistant\x1f"   ->   [{"role": "user", ...}]

For evaluation only: the server returns no log-probs under our masks (they are NaN here, so samples cannot
be trained on), applies no grammar and loads no weights. Stop strings stay in the text, as everywhere in
graft: to servers that remove them they are not sent, and the text is cut here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from graft.engine.errors import EngineError
from graft.engine.remote.endpoint import EndpointError, parsing
from graft.engine.remote.openai_servers import OpenAIServer, OpenAIServers
from graft.engine.remote.server_context import ServerContext
from graft.engine.remote.stateless import StatelessBackend, seed_of
from graft.protocols import Tokenizer
from graft.structure import Structure
from graft.types import Completion, Finish, Message, Sampling

CONVERSATION = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}\x1eassistant\x1f{{ message.content }}<eos>"
    "{% else %}\x1e{{ message | tojson }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}\x1eassistant\x1f{% endif %}"
)
"""The chat template of contexts that are messages; JSON has no bare control characters."""

OTHER_LIMIT = "max_completion_tokens"
"""The name of max_tokens on some servers, which they give in their refusal."""
_TOO_LONG = re.compile(
    r"context.?(length|window|size)|maximum context|too long|max_model_len", re.I
)


class OpenAIReply(NamedTuple):
    text: str
    finish: Finish
    tokens: int | None
    """Sampled, by the server's count; None where it returns none."""


class OpenAIEngine:
    """Contexts are kept here; the server gets one whole prompt per sample.

    url        the server's base, such as http://host:8000/v1, or several that serve the same model
    model      the name it serves; "" takes the only one
    tokenizer  of the model ("completions"), or FastTokenizer.bytes() ("chat")
    api        "completions" or "chat"
    deadline   seconds for a completion, attempts and pauses together; half of it for one attempt
    """

    def __init__(
        self,
        url: Any,
        model: str = "",
        *,
        tokenizer: Tokenizer,
        api: str = "completions",
        deadline: float = 600.0,
        api_key_env: str = "",
        **of_training: Any,
    ) -> None:
        urls: Any = [url] if isinstance(url, str) else url
        is_text = isinstance(urls, list | tuple) and all(isinstance(one, str) for one in urls)
        if not is_text or of_training:
            raise EngineError(
                "engine 'openai' cannot train: a server returns no log-probs under our masks and "
                "loads no weights from here. Train with engine.name=native; to evaluate: "
                "graft eval RUN --endpoint URL --model NAME"
            )
        if api not in ("completions", "chat"):
            raise EngineError(f"api={api!r}: must be completions or chat")
        self.servers = OpenAIServers(urls, deadline, api_key_env)
        self.where = self.servers.where
        self.model, self.api, self.tokenizer = model, api, tokenizer
        self.vocab_size, self.version = tokenizer.vocab_size, 0
        self.deadline = deadline
        self._opened = 0

    async def inspect(self) -> None:
        """Read once which models the servers have; a server that is down is left out for now."""
        await self.servers.inspect(self.model)
        self.model = next(server.model for server in self.servers.each if server.model)

    def open(self, tokens: Sequence[int], key: int | None = None) -> OpenAIContext:
        self._opened += 1
        key = self._opened if key is None else key
        return OpenAIContext(self, tokens, key, self.servers.pick())

    def check_structure(self, structure: Structure) -> None:
        """Refuse what is no JSON schema."""
        _response_format(self.where, structure)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise EngineError(
            f"{self.where} only samples: it cannot score continuations, loads no weights from here and "
            "cannot be paused; use engine.name=native"
        )

    score = load = pause = _refuse

    def close(self) -> None:
        """Nothing to close: every request has its own connection."""

    async def complete(self, context: OpenAIContext, sampling: Sampling) -> Completion:
        seed = seed_of(context.key, len(context.tokens))
        reply = await self.request(context, sampling, seed)
        tokens = self._tokens_of(reply, sampling, context.tokens[-1])
        if context.sampled is not None:
            context.sampled = None if reply.tokens is None else context.sampled + reply.tokens
        unknown = [math.nan] * len(tokens)  # the server returns none: not to be trained on
        return Completion(
            tokens=tokens,
            actions=list(tokens),
            logprobs=unknown,
            entropies=unknown,
            modes=[0] * len(tokens),
            finish=reply.finish,
            version=0,
        )

    async def request(self, context: OpenAIContext, sampling: Sampling, seed: int) -> OpenAIReply:
        """The reply of the context's server; where that fails, of the others in turn."""
        several = len(self.servers.each)
        for tried in range(1, several + 1):
            if context.server.is_down:
                context.move(self.servers.pick())
            try:
                return await self._request(context.server, context.tokens, sampling, seed)
            except EndpointError as error:
                self.servers.exclude(context.server, error, tried)
        raise AssertionError("the last server's error was raised")

    async def _request(
        self, server: OpenAIServer, tokens: Sequence[int], sampling: Sampling, seed: int
    ) -> OpenAIReply:
        """The server's reply; empty, finish "length", for a prompt beyond its window."""
        if server.keep_stops is None:
            await server.inspect(self.model, is_only=len(self.servers.each) == 1)
        content = self._content(server, tokens, sampling, seed)
        path = "/chat/completions" if self.api == "chat" else "/completions"
        several = len(self.servers.each)
        try:
            # with others to take over, a server is given up sooner
            reply = await server.ask(
                path,
                content,
                self._read,
                deadline=self.deadline / several,
                retries=None if several == 1 else 1,
            )
        except EndpointError as error:
            text = str(error)
            if error.code in (400, 422) and "max_tokens" in content and OTHER_LIMIT in text:
                server.limit = OTHER_LIMIT
                return await self._request(server, tokens, sampling, seed)
            if error.code in (400, 413, 422) and _TOO_LONG.search(text):
                return OpenAIReply("", Finish.LENGTH, 0)
            if error.code == 404:
                raise EndpointError(f"{text}. Does it have --api {self.api}?", 404) from None
            raise
        return _cut(reply, sampling.stop)

    def _content(
        self, server: OpenAIServer, tokens: Sequence[int], sampling: Sampling, seed: int
    ) -> dict[str, Any]:
        keep_stops = server.keep_stops or {}
        content: dict[str, Any] = {
            "model": server.model,
            server.limit: sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.temperature:
            content["seed"] = seed
        if sampling.stop and keep_stops:
            content |= {"stop": list(sampling.stop), **keep_stops}
        penalty = sampling.repetition_penalty
        if sampling.top_k or sampling.min_p or sampling.min_tokens or penalty != 1:
            if not keep_stops:
                raise EngineError(
                    f"{server.where} is neither vLLM nor SGLang: top_k, min_p, min_tokens and "
                    "repetition_penalty are not in OpenAI's API; leave them out"
                )
            content |= {"top_k": sampling.top_k or -1, "min_p": sampling.min_p}
            content |= {"min_tokens": sampling.min_tokens, "repetition_penalty": penalty}
        if sampling.structure is not None:
            content["response_format"] = _response_format(server.where, sampling.structure)
        text = self.tokenizer.decode(tokens)
        if self.api == "completions":
            if keep_stops and sampling.stop_tokens:
                content["stop_token_ids"] = list(sampling.stop_tokens)
            return content | {"prompt": text}
        return content | {"messages": messages_of(text, server.url)}

    def _read(self, answer: Any) -> OpenAIReply:
        """The reply in an answer; ValueError if there is none."""
        with parsing(answer, "completion"):
            choice = answer["choices"][0]
            text = choice["message"]["content"] if self.api == "chat" else choice["text"]
            finish = choice["finish_reason"]
            counted = (answer.get("usage") or {}).get("completion_tokens")
        if text is None and isinstance(choice.get("message"), dict):  # reasoning, and no answer
            text = ""
        if not isinstance(text, str):
            raise ValueError(f"no text in its completion: {str(choice)[:200]!r}")
        if finish == "abort":
            raise ValueError("a completion that the server aborted")
        tokens = counted if isinstance(counted, int) and counted >= 0 else None
        return OpenAIReply(text, Finish.LENGTH if finish == "length" else Finish.STOP, tokens)

    def _tokens_of(self, reply: OpenAIReply, sampling: Sampling, last: int) -> list[int]:
        """The tokens of the text, and the end-of-turn token, which servers leave out of it."""
        tokenizer: Any = self.tokenizer
        plain = reply.text.replace("\x1e", " ").replace("\x1f", " ")
        tokens: list[int] = tokenizer.encode_plain(plain, last)
        is_stopped = any(reply.text.endswith(stop) for stop in sampling.stop)
        ends = sampling.stop_tokens or (() if tokenizer.eos_id is None else (tokenizer.eos_id,))
        if reply.finish is Finish.STOP and not is_stopped and ends:
            tokens.append(ends[0])
        return tokens


class OpenAIContext(ServerContext[OpenAIServer]):
    """A context that adds up its server's counts of sampled tokens."""

    sampled: int | None = 0
    """Tokens of all its samples by the server's count; None once a count was missing."""

    def __init__(
        self, engine: StatelessBackend, tokens: Sequence[int], key: int, server: OpenAIServer
    ) -> None:
        super().__init__(engine, tokens, key, server)
        server.num_opened += 1

    def _copy(self, tokens: list[int], key: int) -> OpenAIContext:
        twin = OpenAIContext(self.engine, tokens, key, self.server)
        twin.sampled = self.sampled
        return twin


def messages_of(text: str, url: str = "") -> list[Message]:
    r"""The messages of a context in the template CONVERSATION.

    >>> messages_of('\x1e{"role": "user", "content": "2+3="}\x1eassistant\x1f')
    [{'role': 'user', 'content': '2+3='}]
    """
    *earlier, last = text.split("\x1e")
    if last != "assistant\x1f" or not earlier or earlier[0]:
        raise EngineError(
            f"endpoint {url} with --api chat takes whole messages and cannot continue in the middle of "
            f"an answer ({text[-60:]!r}): no tools that answer inline, no prefill, no wrapper that "
            "renders chats. Use --api completions with the model's tokenizer, or --no-tools"
        )
    return [_message(part) for part in earlier[1:]]


def _message(part: str) -> Message:
    role, separator, content = part.partition("\x1f")
    if separator and role == "assistant":
        return {"role": "assistant", "content": content.removesuffix("<eos>")}
    message = json.loads(part)
    # results of calls that were written as text: an API would look for a call with their id
    role = "user" if message["role"] == "tool" else message["role"]
    return {"role": role, "content": message.get("content") or ""}


def _cut(reply: OpenAIReply, stops: Sequence[str]) -> OpenAIReply:
    """The text up to and including the first complete stop string."""
    ends = [at + len(stop) for stop in stops if (at := reply.text.find(stop)) >= 0]
    return reply._replace(text=reply.text[: min(ends)], finish=Finish.STOP) if ends else reply


def _response_format(where: str, structure: Structure) -> dict[str, Any]:
    """A JSON schema as OpenAI's API takes it, which has no other kind."""
    if structure.kind != "json":
        raise EngineError(
            f"{where} takes answers under a JSON schema only, and this structure is of kind "
            f"{structure.kind!r}; use Structure.json, or a model that graft samples"
        )
    schema = {"name": "answer", "schema": json.loads(structure.source), "strict": True}
    return {"type": "json_schema", "json_schema": schema}

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
from graft.engine.remote.endpoint import Endpoint, EndpointError, parsing
from graft.engine.remote.stateless import StatelessContext, seed_of
from graft.protocols import Tokenizer
from graft.types import Completion, Finish, Message, Sampling

CONVERSATION = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}\x1eassistant\x1f{{ message.content }}<eos>"
    "{% else %}\x1e{{ message | tojson }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}\x1eassistant\x1f{% endif %}"
)
"""The chat template of contexts that are messages; JSON has no bare control characters."""

KEEP_STOPS: dict[str, dict[str, Any]] = {
    "vllm": {"include_stop_str_in_output": True},
    "sglang": {"no_stop_trim": True},
}
"""Server -> the parameter that keeps stop strings in the text. Other servers refuse or ignore it."""

OTHER_LIMIT = "max_completion_tokens"
"""The name of max_tokens on some servers, which they give in their refusal."""
LIST_SECONDS = 20.0
"""For the list of models, which some servers do not have."""
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

    url        the server's base, such as http://host:8000/v1
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
        **of_training: Any,
    ) -> None:
        if not isinstance(url, str) or of_training:
            raise EngineError(
                "engine 'openai' cannot train: a server returns no log-probs under our masks and "
                "loads no weights from here. Train with engine.name=native; to evaluate: "
                "graft eval RUN --endpoint URL --model NAME"
            )
        if api not in ("completions", "chat"):
            raise EngineError(f"api={api!r}: must be completions or chat")
        self.endpoint = Endpoint(url, timeout=deadline / 2, deadline=deadline)
        self.where = f"endpoint {self.endpoint.url}"
        self.model, self.api, self.tokenizer = model, api, tokenizer
        self.vocab_size, self.version = tokenizer.vocab_size, 0
        self._keep_stops: dict[str, Any] | None = None
        self._limit = "max_tokens"
        self._opened = 0

    async def inspect(self) -> None:
        """Read once which models it serves; a server without a list is used as it is."""
        try:
            served = await self.endpoint.ask("/models", None, _models, deadline=LIST_SECONDS)
        except EndpointError as error:
            if error.code in (401, 403):
                raise
            served = []
        names = [name for name, _ in served]
        if not self.model and len(names) != 1:
            known = (
                f"it serves {', '.join(names[:8])}" if names else "it does not list what it serves"
            )
            raise EngineError(f"{self.where} needs the name of a model (--model); {known}")
        if self.model and names and self.model not in names:
            raise EngineError(
                f"{self.where} does not serve {self.model!r}, but "
                f"{', '.join(names[:8])}; give one of them (--model)"
            )
        self.model = self.model or names[0]
        owner = next((owner for name, owner in served if name == self.model), "")
        self._keep_stops = KEEP_STOPS.get(owner, {})

    def open(self, tokens: Sequence[int], key: int | None = None) -> OpenAIContext:
        self._opened += 1
        return OpenAIContext(self, tokens, self._opened if key is None else key)

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
        reply = await self.request(context.tokens, sampling, seed)
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

    async def request(self, tokens: Sequence[int], sampling: Sampling, seed: int) -> OpenAIReply:
        """The server's reply; empty, finish "length", for a prompt beyond its window."""
        if self._keep_stops is None:
            await self.inspect()
        content = self._content(tokens, sampling, seed)
        path = "/chat/completions" if self.api == "chat" else "/completions"
        try:
            reply = await self.endpoint.ask(path, content, self._read)
        except EndpointError as error:
            text = str(error)
            if error.code in (400, 422) and "max_tokens" in content and OTHER_LIMIT in text:
                self._limit = OTHER_LIMIT
                return await self.request(tokens, sampling, seed)
            if error.code in (400, 413, 422) and _TOO_LONG.search(text):
                return OpenAIReply("", Finish.LENGTH, 0)
            if error.code == 404:
                raise EndpointError(f"{text}. Does it have --api {self.api}?", 404) from None
            raise
        return _cut(reply, sampling.stop)

    def _content(self, tokens: Sequence[int], sampling: Sampling, seed: int) -> dict[str, Any]:
        keep_stops = self._keep_stops or {}
        content: dict[str, Any] = {
            "model": self.model,
            self._limit: sampling.max_tokens,
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
                    f"{self.where} is neither vLLM nor SGLang: top_k, min_p, min_tokens and "
                    "repetition_penalty are not in OpenAI's API; leave them out"
                )
            content |= {"top_k": sampling.top_k or -1, "min_p": sampling.min_p}
            content |= {"min_tokens": sampling.min_tokens, "repetition_penalty": penalty}
        text = self.tokenizer.decode(tokens)
        if self.api == "completions":
            if keep_stops and sampling.stop_tokens:
                content["stop_token_ids"] = list(sampling.stop_tokens)
            return content | {"prompt": text}
        return content | {"messages": messages_of(text, self.endpoint.url)}

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


class OpenAIContext(StatelessContext):
    """A context that adds up the server's counts of sampled tokens."""

    engine: OpenAIEngine
    sampled: int | None = 0
    """Tokens of all its samples by the server's count; None once a count was missing."""

    def _copy(self, tokens: list[int], key: int) -> OpenAIContext:
        twin = OpenAIContext(self.engine, tokens, key)
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


def _models(answer: Any) -> list[tuple[str, str]]:
    with parsing(answer, "list of models"):
        return [(str(one["id"]), str(one.get("owned_by", ""))) for one in answer["data"]]

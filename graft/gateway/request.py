"""A call of a model provider and its answer, in no dialect.

Messages have OpenAI's chat form, whatever the dialect was:

    {"role": "system" | "user", "content": "text"}
    {"role": "assistant", "content": "text", "reasoning_content": "...", "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
    {"role": "tool", "content": "3", "tool_call_id": "call_1", "name": "add"}

A request without a chat has a single message, a text or the ids of its tokens:

    {"role": "plain", "content": "2+3="}        {"role": "plain", "content": "", "tokens": [18, 10, 19]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.structure import Structure
from graft.types import Message

PLAIN = "plain"
"""The role of a prompt that no chat template writes."""


class RefusedRequest(Exception):
    """A request that cannot be answered. Each dialect writes it in its own form.

    kind   invalid, context_length, authentication, permission, not_found, too_large, rate_limit, overloaded,
           internal
    """

    def __init__(self, message: str, kind: str = "invalid", param: str | None = None) -> None:
        super().__init__(message)
        self.kind, self.param = kind, param


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """What a client asks for. None: the client did not say."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """{"type": "function", "function": {"name", "description", "parameters"}}"""
    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    stream: bool = False
    with_usage: bool = True
    """Whether a stream ends with the numbers of tokens."""
    logprobs: int | None = None
    """None: no log-probs; 0: of the sampled tokens; more: also as lists, which have the sampled one alone."""
    tool_choice: str = "auto"
    """auto, none, required, or the name of a tool."""
    parallel_calls: bool = True
    """Whether an answer may have several calls."""
    allowed: tuple[str, ...] = ()
    """Tools that may be called, of those that are shown; empty: all."""
    strict_tools: tuple[str, ...] = ()
    """Tools whose calls must have arguments that are valid under their schemas."""
    dropped_tools: tuple[str, ...] = ()
    """Types of tools that a provider would run; they are not shown."""
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Tool -> the namespace and the name by which the client knows it, if it has one."""
    format: Structure | None = None
    """What the text of the answer must look like."""
    text_tools: tuple[str, ...] = ()
    """Tools that take a text, such as a patch, instead of arguments: OpenAI's custom tools."""
    with_token_ids: bool = False
    """Whether the answer has the ids of the tokens, as vLLM's return_token_ids."""
    agent: str = ""
    """The client's own name of the sub-agent that asks; "" where it has none."""

    @property
    def is_plain(self) -> bool:
        """Whether the prompt is a text of its own, without a chat."""
        return self.messages[0]["role"] == PLAIN

    @property
    def sampling_key(self) -> str:
        """What distinguishes two requests with the same messages."""
        drawn = self.temperature, self.top_p, self.top_k, self.max_tokens, self.seed
        called = self.tool_choice, self.parallel_calls
        more = filter(None, (self.allowed, self.with_token_ids, self.format, self.strict_tools))
        return repr((*drawn, self.stop, self.n, *called, self.logprobs is not None, *more))


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A tool call of an answer; `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class PolicyAnswer:
    """One sampled turn of the policy, read: thought, text and calls."""

    id: str
    """Unique; rewards for single answers name it."""
    content: str
    reasoning: str = ""
    calls: tuple[AnsweredCall, ...] = ()
    finish: str = "stop"
    """stop, length, tool_calls"""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt: those that were not computed for this answer."""
    tokens: tuple[int, ...] = ()
    token_texts: tuple[str, ...] = ()
    """Empty unless log-probs were asked for."""
    logprobs: tuple[float, ...] = ()
    prompt: tuple[int, ...] = ()
    """The tokens of the prompt; empty unless they were asked for."""
    stop_string: str | None = None
    """The stop string of the request that ended it."""
    version: int = 0
    """Of the weights that sampled it."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])

"""How chat templates write tool calls.

    json        <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>           Qwen, Hermes, chatml
                {"name": "add", "parameters": {"a": 1}}                                 Llama, all of the turn
                [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]                    Mistral, a list
    named       [TOOL_CALLS]add[ARGS]{"a": 1}                                           Mistral, DeepSeek
    parameters  <tool_call><function=add><parameter=a>1</parameter></function></tool_call>  Qwen3-Coder
    arg_keys    <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>  GLM
    python      <|tool_call_start|>[add(a=1)]<|tool_call_end|>                          LFM2, Llama 4
    gemma       <|tool_call>call:add{a:1}<tool_call|>                                   Gemma 4
    channels    <|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>       gpt-oss

The marks are those that the template writes (`graft.text.syntax_probe`); `graft.text.call_readers` reads
calls between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]
"""The name of a tool -> the JSON schema of its parameters."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The calls and thoughts of one chat template."""

    name: str = ""
    """Of `READERS`; "" where no calls are read."""
    open: str = ""
    close: str = ""
    before: str = ""
    """What the template writes between content and the first call."""
    outer: tuple[str, str] = ("", "")
    """Marks around all calls of a turn, where each has its own too."""
    middle: str = ""
    """named: the text between name and arguments."""
    is_list: bool = False
    """json: the calls of a turn are one list."""
    is_thinking: bool = False
    """The prompt ends inside a thought, which the policy's text goes on with."""
    thought: tuple[str, str] = ("<think>", "</think>")
    """The marks of a thought."""
    has_channels: bool = False
    """Thoughts and texts are in channels, as gpt-oss writes them, not in <think>."""
    unknown: str = ""
    """A call as the template writes it, in a syntax that is not known here."""

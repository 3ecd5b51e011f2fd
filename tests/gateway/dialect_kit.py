"""Answers that every dialect writes, and what a client reads in them."""

from __future__ import annotations

import json
from typing import Any

from graft.gateway.request import AnsweredCall, PolicyAnswer

CALLS = (
    AnsweredCall("call_1", "add", '{"a": 1, "b": "ü\\u2028"}'),
    AnsweredCall("call_2", "now", "{}"),
)
NUMBERS = {"prompt_tokens": 10, "cached_tokens": 6, "tokens": (1, 2, 3)}
TALKING = PolicyAnswer("7f", "It is 3.", **NUMBERS)
THINKING = PolicyAnswer("7f", "It is 3.", reasoning="one and two", **NUMBERS)
CALLING = PolicyAnswer("7f", "Adding.", "one and two", CALLS, "tool_calls", **NUMBERS)
SILENT = PolicyAnswer("7f", "", calls=CALLS[:1], finish="tool_calls", **NUMBERS)
EMPTY = PolicyAnswer("7f", "", **NUMBERS)
CUT = PolicyAnswer("7f", "It is" * 2000, finish="length", **NUMBERS)
STOPPED = PolicyAnswer("7f", "It", stop_string="END", **NUMBERS)
ANSWERS = {
    "talking": TALKING,
    "thinking": THINKING,
    "calling": CALLING,
    "silent": SILENT,
    "empty": EMPTY,
    "cut": CUT,
    "stopped": STOPPED,
}

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA},
}


def data_of(stream: bytes) -> list[dict[str, Any]]:
    """The JSON of the events of a stream."""
    lines = [line for line in stream.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]

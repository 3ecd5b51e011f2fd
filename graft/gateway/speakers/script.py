"""A policy that reads its answers from a file, to try an agent's tool path without a model.

    "I do not know."                                                        a text
    {"content": "Adding.", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}

The first line answers a conversation's first request, the second its second one, in every conversation. The
answers go through the chat template's syntax, the session and the record like those of a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graft.engine.errors import EngineError
from graft.protocols import Grammar
from graft.text.calls import read_arguments
from graft.text.chat import Chat
from graft.types import Completion, Finish, Sampling
from graft.user_code import describe_value

ASSISTANT = "<|im_start|>assistant\n"
"""How a turn of the policy begins in chatml."""
SHAPE = {
    "width": 16, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 16, "ff": 16, "max_positions": 32768,
}  # fmt: skip
"""The model whose place the script takes: as small as can be, and never asked."""


class ScriptError(ValueError):
    """A script that cannot be read; the text says which line and why."""


def read_script(file: Path) -> list[str]:
    """Read the turns of a script, as the policy would write them in chatml."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ScriptError(f"--script {file}: {error}") from error
    turns = [turn_of(line, f"{file}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not turns:
        raise ScriptError(f"--script {file} has no answers; write one on each line, as JSON")
    return turns


def turn_of(line: str, place: str) -> str:
    """The turn of one line of a script.

    >>> turn_of('{"content": "Yes. ", "tool_calls": [{"name": "now"}]}', "line 1")
    'Yes. <tool_call>\\n{"name": "now", "arguments": {}}\\n</tool_call>'
    """
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ScriptError(f"{place}: {line[:80]!r} is not JSON: {error}") from error
    if isinstance(answer, str):
        return answer
    if not isinstance(answer, Mapping):
        raise ScriptError(f"{place}: give a text or an object, not {describe_value(answer)}")
    known = ("role", "content", "reasoning_content", "tool_calls")
    if unknown := [name for name in answer if name not in known]:
        raise ScriptError(f"{place}: no field {unknown[0]!r}; an answer has {', '.join(known)}")
    thought, content = answer.get("reasoning_content") or "", answer.get("content") or ""
    calls = answer.get("tool_calls") or []
    if not (isinstance(thought, str) and isinstance(content, str) and isinstance(calls, list)):
        raise ScriptError(f"{place}: content and reasoning_content are texts, tool_calls a list")
    written = [_call_of(call, place) for call in calls]
    return (f"<think>\n{thought}\n</think>\n\n" if thought else "") + content + "\n".join(written)


def _call_of(call: Any, place: str) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ScriptError(f'{place}: a call is {{"name": ..., "arguments": {{...}}}}, not {call!r}')
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments, why = read_arguments(arguments)
        if why:
            raise ScriptError(f"{place}: the arguments of {name} {why}")
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class ScriptedEngine:
    """An engine whose samples are the turns of a script."""

    version = 0

    def __init__(self, chat: Chat, turns: Sequence[str]) -> None:
        self.chat, self.turns = chat, list(turns)
        self.vocab_size = chat.tokenizer.vocab_size

    def open(self, tokens: Sequence[int], key: int | None = None) -> ScriptedContext:
        return ScriptedContext(self, tokens)

    def turn_after(self, prompt: str) -> str:
        """The turn that goes on from a prompt; of one that the client has begun, the rest."""
        number = max(prompt.count(ASSISTANT), 1)
        if number > len(self.turns):
            raise EngineError(
                f"the script has {len(self.turns)} answers, and a conversation asks for answer {number}; "
                "end it with a text without calls, or write more lines"
            )
        return self.turns[number - 1].removeprefix(prompt.rpartition(ASSISTANT)[2])

    def score(self, *_: Any, **__: Any) -> Any:
        raise EngineError("a script has no probabilities")

    def load(self, weights: Any, version: int) -> None:
        """Nothing is learned."""
        self.version = version

    def pause(self) -> None:
        """Nothing takes time."""

    def close(self) -> None:
        """Nothing is held."""


class ScriptedContext:
    """A conversation with a script."""

    def __init__(self, engine: ScriptedEngine, tokens: Sequence[int]) -> None:
        self.engine, self.tokens = engine, list(tokens)
        self.mode: int | None = None

    def append(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)

    def fork(self, key: int | None = None, at: int | None = None) -> ScriptedContext:
        return ScriptedContext(self.engine, self.tokens[:at])

    def close(self) -> None:
        """Nothing is held."""

    async def sample(self, sampling: Sampling, grammar: Grammar | None = None) -> Completion:
        """The script's turn, within the limit of tokens and up to a stop string."""
        chat = self.engine.chat
        text = self.engine.turn_after(chat.tokenizer.decode(self.tokens))
        stops = [at + len(stop) for stop in sampling.stop if (at := text.find(stop)) >= 0]
        if stops:
            tokens = chat.tokenizer.encode(text[: min(stops)])
        elif chat.end_ids:
            tokens = [*chat.tokenizer.encode(text), *[*chat.end_ids][:1]]
        else:
            tokens = chat.tokenizer.encode(text + chat.end_text)
        is_cut = len(tokens) > sampling.max_tokens
        tokens = tokens[: sampling.max_tokens]
        self.tokens.extend(tokens)
        zeros, finish = [0.0] * len(tokens), Finish.LENGTH if is_cut else Finish.STOP
        return Completion(tokens, tokens, zeros, zeros, [0] * len(tokens), finish, 0)

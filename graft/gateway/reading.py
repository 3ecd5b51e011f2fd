"""What was sampled, as an answer that a client understands: thought, text and calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain

from graft.gateway.policy import ServedPolicy
from graft.gateway.request import AgentRequest, AnsweredCall, PolicyAnswer
from graft.text.turn import ReadTurn, read_turn
from graft.types import Completion, Finish, Message


def read_answer(
    policy: ServedPolicy,
    request: AgentRequest,
    text: str,
    parts: Sequence[Completion],
    id: str,
    used: tuple[int, int],
    prompt: Sequence[int] = (),
) -> tuple[PolicyAnswer, Message]:
    """The answer, and the message that a client will repeat as its history.

    used: the tokens of the prompt, and how many of them were there already; `prompt` are their ids.
    """
    chat = policy.chat
    stop = next((one for one in request.stop if text.endswith(one)), None)
    if stop is not None and parts[-1].finish is Finish.STOP:
        text = text.removesuffix(stop)
    else:
        stop = None
    is_offered = bool(request.tools) and request.tool_choice != "none"
    syntax = policy.syntax if is_offered else policy.no_calls
    if request.is_plain:
        turn = ReadTurn("", text, (), 0)
    else:
        turn = read_turn(text, syntax, request.tools)
    if request.allowed and any(call.name not in request.allowed for call in turn.calls):
        turn = read_turn(text, policy.no_calls)._replace(malformed=len(turn.calls) + turn.malformed)
    allowed = turn.calls if request.parallel_calls else turn.calls[:1]
    calls = tuple(
        AnsweredCall(f"call_{id}{number:02d}", call.name, json.dumps(call.arguments))
        for number, call in enumerate(allowed)
    )
    tokens = tuple(chain.from_iterable(part.tokens for part in parts))
    finish = "length" if parts[-1].finish is Finish.LENGTH else "stop"
    wants_texts = request.logprobs is not None
    answer = PolicyAnswer(
        id,
        turn.content,
        turn.reasoning,
        calls,
        "tool_calls" if calls and finish == "stop" else finish,
        *used,
        tokens=tokens,
        token_texts=tuple(chat.tokenizer.decode([one]) for one in tokens) if wants_texts else (),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        stop_string=stop,
        prompt=tuple(prompt) if request.with_token_ids else (),
        version=parts[-1].version,
        info={"malformed_calls": turn.malformed} if turn.malformed else {},
    )
    message: Message = {"role": "assistant", "content": turn.content}
    if calls:
        message["tool_calls"] = [
            {"id": one.id, "function": {"name": one.name, "arguments": one.arguments}}
            for one in calls
        ]
    return answer, message

"""A tiny policy behind a gateway, and checks that every gateway test makes of what it recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graft.engine.native.engine import NativeEngine
from graft.gateway.gateway import Gateway
from graft.gateway.request import AgentRequest
from graft.models.decoder import Decoder
from graft.models.shape import ModelShape
from graft.models.tree.forest import Forest
from graft.rollout.batching import to_batch, trajectories_of
from graft.text.chat import Chat
from graft.text.template import TEMPLATES
from graft.text.tokenizer import FastTokenizer
from graft.types import Author, Episode, Message, Sampling, Task

TASK = Task("t", "none", seed=1)
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}


def tiny_tokenizer() -> FastTokenizer:
    """Bytes, and the two marks of chatml as control tokens."""
    backend = FastTokenizer.bytes()._backend
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    special = {"eos_token": "<|im_end|>", "pad_token": "<pad>"}
    return FastTokenizer(backend, special, {"default": TEMPLATES["chatml"]})


def tiny_engine(tokenizer: FastTokenizer, **settings: Any) -> NativeEngine:
    shape = ModelShape(
        vocab_size=tokenizer.vocab_size, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, ff=16
    )
    return NativeEngine(
        Decoder(shape).initialise(3),
        tokenizer=tokenizer,
        eos_ids=(tokenizer.eos_id,),
        kv_tokens=65536,
        **settings,
    )


def tiny_gateway(template: str | None = None, history: str = "append", **settings: Any) -> Gateway:
    tokenizer = tiny_tokenizer()
    chat = Chat(tokenizer, template, history=history)
    how = {"sampling": Sampling(max_tokens=12), "max_context": 4096, **settings}
    return Gateway(tiny_engine(tokenizer), chat, **how)


def asks(*messages: Message | str, **settings: Any) -> AgentRequest:
    """A request; a text is a user's message."""
    listed = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    return AgentRequest(tuple(listed), **settings)


def said(answer: Any) -> Message:
    """An answer as a client repeats it."""
    message: Message = {"role": "assistant", "content": answer.content}
    if answer.calls:
        message["tool_calls"] = [
            {"id": c.id, "function": {"name": c.name, "arguments": c.arguments}}
            for c in answer.calls
        ]
    return message


def check_exact(episode: Episode, gateway: Gateway, sampled: Sequence[Sequence[int]]) -> None:
    """Every sampled token is trained once, and the learner's log-probs are the engine's.

    sampled: the tokens of every answer that should be trained, in any order.
    """
    rows = trajectories_of([episode])
    batch = to_batch(rows)
    spans = {
        id(s): s for row in rows for s in row.spans if s.author is Author.POLICY and any(s.mask)
    }
    assert int(batch.mask.sum()) == sum(map(len, sampled))
    assert sorted(s.tokens for s in spans.values()) == sorted(map(list, sampled))
    decoder = gateway.policy.engine.decoder  # type: ignore[attr-defined]
    with torch.no_grad():
        logp, _ = Forest(rows, batch.mask, torch.device("cpu")).logprobs(decoder)
    torch.testing.assert_close(logp[batch.mask], batch.logprobs[batch.mask], atol=1e-5, rtol=0)
    assert Episode.loads(episode.dumps()).dumps() == episode.dumps()

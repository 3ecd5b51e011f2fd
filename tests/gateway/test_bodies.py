"""Requests that are large or strange: refused before they cost memory or the time of other sessions."""

from __future__ import annotations

import asyncio
import json
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from graft.gateway.dialects import openai_chat
from graft.gateway.dialects.fields import MAX_DEPTH, MAX_NOTED
from graft.gateway.http import body as bodies
from graft.gateway.http.body import MAX_BODY, MAX_VALUES, check_structure, read_body
from graft.gateway.request import RefusedRequest
from tests.gateway.test_server import HELLO, bearer, served
from tests.gateway.tiny import TASK

pytest.importorskip("uvicorn")
MESSAGE, TOOL = b'{"role":"user","content":"a"}', b'{"type":"function","function":{"name":"f"}}'


def body_of(name: str, item: bytes, count: int) -> bytes:
    return b'{"model":"x","%b":[' % name.encode() + b",".join([item] * count) + b"]}"


LARGE = {
    "messages": body_of("messages", MESSAGE, 120_000),
    "tools": body_of("tools", TOOL, 80_000),
    "parts": body_of("messages", b'{"role":"user","content":[' + b"{}," * 400_000 + b"{}]}", 1),
    "numbers": body_of("stop", b"1", 4_000_000),
    "keys": b"{" + b",".join(b'"%d":1' % n for n in range(450_000)) + b"}",
    "depth": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    "open brackets": b"[" * 3_000_000,
    "a text without an end": b'{"a":"' + b'\\"' * 2_000_000,
    "a text that ends with an escape": b'{"a":"' + b'\\"' * 2_000_000 + b"\\",
}


@pytest.mark.parametrize("name", LARGE)
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    raw = LARGE[name]
    if not name.startswith("a text"):  # these are only wrong
        monkeypatch.setattr(bodies, "from_json", lambda raw: pytest.fail("it was parsed"))
    assert bodies.SMALL_BODY < len(raw) <= MAX_BODY
    began = time.process_time()
    with pytest.raises(RefusedRequest):
        asyncio.run(read_body(raw))
    assert time.process_time() - began < 3


def test_counting_ends_with_the_first_value_too_many(monkeypatch: pytest.MonkeyPatch):
    texts = re.compile(rb'"a"').finditer(b'["a"' + b',"a"' * 2 * MAX_VALUES + b"]")
    monkeypatch.setattr(bodies, "_TEXT", SimpleNamespace(finditer=lambda raw: texts))
    with pytest.raises(RefusedRequest) as refused:
        check_structure(b'["a"' + b',"a"' * 2 * MAX_VALUES + b"]")
    assert refused.value.kind == "too_large"
    assert len([*texts]) >= MAX_VALUES - 1  # not looked at


def test_texts_are_not_counted_as_structure():
    text = json.dumps('{[,\\"' * 60_000)
    check_structure(b'{"messages": [{"content": %b}]}' % text.encode())
    read = asyncio.run(read_body(b'{"a": %b}' % text.encode()))
    assert read == {"a": '{[,\\"' * 60_000}
    with pytest.raises(RefusedRequest, match=f"more than {MAX_DEPTH} levels"):
        check_structure(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))
    check_structure(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)


@pytest.mark.parametrize(("name", "count"), [("messages", 10_001), ("tools", 1_001)])
@served()
async def test_lists_of_a_request_are_bounded(address, gateway, client, name: str, count: int):
    key = bearer(gateway.open(TASK).key)
    body = {**HELLO, name: [json.loads(MESSAGE if name == "messages" else TOOL)] * count}
    reply = await client.post("/v1/chat/completions", json=body, headers=key)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == name


@served(max_calls=2_000)
async def test_other_sessions_go_on_while_a_large_request_is_read(address, gateway, client):
    """A text that fills the limit of a body, and one that is encoded: each beside small requests."""
    large, small = gateway.open(TASK), gateway.open(TASK)
    waits: list[float] = []

    async def ask_often() -> None:
        for number in range(1_000):
            began = time.monotonic()
            ask = {**HELLO, "seed": number, "max_tokens": 1}
            await client.post("/v1/chat/completions", json=ask, headers=bearer(small.key))
            waits.append(time.monotonic() - began)

    others = asyncio.ensure_future(ask_often())
    for size in (15_000_000, 1_500_000):
        body = {**HELLO, "messages": [{"role": "user", "content": "a b " * (size // 4)}]}
        raw = json.dumps(body).encode()
        reply = await client.post(
            "/v1/chat/completions", content=raw, headers=bearer(large.key), timeout=60
        )
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"
    others.cancel()
    await asyncio.gather(others, return_exceptions=True)
    assert large.end().metrics["agent/refused"] == 2
    assert not gateway.policy._prompts or max(map(len, gateway.policy._prompts.values())) < 999
    assert max(waits) < 4.0


@served()
async def test_a_body_beyond_the_limit_is_refused_by_its_length(address, gateway, client):
    key = bearer(gateway.open(TASK).key)

    async def pieces() -> Any:  # without a content-length
        for _ in range(MAX_BODY // 2**20 + 2):
            yield b" " * 2**20

    for content in (b" " * (MAX_BODY + 1), pieces()):
        reply = await client.post("/v1/messages", content=content, headers=key)
        assert reply.status_code == 413  # and no reset: the rest of the body was read
        assert reply.json()["error"]["type"] == "request_too_large"


def test_unknown_fields_do_not_fill_the_log(caplog: pytest.LogCaptureFixture):
    for start in range(0, 600, 200):
        openai_chat.read({**HELLO, **{f"odd{start + n}": 1 for n in range(200)}}, {})
    assert len(caplog.records) <= MAX_NOTED
    with pytest.raises(RefusedRequest, match="at most 256"):
        openai_chat.read({**HELLO, **{f"odd{n}": 1 for n in range(256)}}, {})

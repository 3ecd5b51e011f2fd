"""Large and strange requests beside small ones: refused, without memory and without holding others up."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import httpx

from graft.gateway.address import GatewayAddress
from graft.gateway.http.body import MAX_BODY
from tests.gateway.tiny import TASK, tiny_gateway
from trust.bank import Row

SMALL, FULL = 12, 200
MAX_WAIT = 10.0
"""Seconds that a small request may take meanwhile: on two busy cores, with a policy on the same one."""
MAX_GROWTH = 200.0
"""Megabytes that the process of the gateway may grow by; a body has at most 16."""
MESSAGE, TOOL = '{"role":"user","content":"a"}', '{"type":"function","function":{"name":"f"}}'


def listed(name: str, item: str, size: int) -> bytes:
    count = max(1, size // (len(item) + 1))
    return f'{{"model":"x","{name}":[{",".join([item] * count)}]}}'.encode()


def text(size: int) -> bytes:
    return json.dumps(
        {"model": "x", "messages": [{"role": "user", "content": "a " * (size // 2)}]}
    ).encode()


KINDS: dict[str, Callable[[int], bytes]] = {
    "messages": lambda size: listed("messages", MESSAGE, size),
    "tools": lambda size: listed("tools", TOOL, size),
    "stops": lambda size: listed("stop", '"a"', size),
    "numbers": lambda size: listed("stop", "1", size),
    "levels": lambda size: b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6),
    "brackets": lambda size: b"[" * size,
    "a text": text,
    "an open text": lambda size: b'{"a":"' + b'\\"' * (size // 2),
    "blanks": lambda size: b" " * size,
    "keys": lambda size: b"{" + b",".join(b'"%d":1' % n for n in range(size // 10)) + b"}",
    "zeros": lambda size: bytes(size),
    "too long": lambda size: b" " * (MAX_BODY + 1 + size),
}
PATHS = ["chat/completions", "messages", "responses", "messages/count_tokens"]


def run(count: int, seed: int) -> Iterator[Row]:
    yield asyncio.run(_beside(count, seed))


async def _beside(count: int, seed: int) -> Row:
    row = Row("bodies", "beside small requests", count)
    gateway, address = tiny_gateway(), GatewayAddress()
    gateway.policy.max_calls = 1_000_000
    waits = [0.0]
    async with (
        address.serving(gateway),
        httpx.AsyncClient(base_url=address.url, timeout=120) as client,
    ):
        large, small = gateway.open(TASK), gateway.open(TASK)

        async def ask_often() -> None:
            for number in itertools.count():
                began = time.monotonic()
                body = {"model": "x", "max_tokens": 1, "messages": [json.loads(MESSAGE)]}
                headers = {"authorization": f"Bearer {small.key}"}
                reply = await client.post(
                    "/v1/chat/completions", json=body | {"seed": number}, headers=headers
                )
                waits.append(time.monotonic() - began)
                if reply.status_code != 200:
                    row.failures.append(
                        f"a small request got {reply.status_code}: {reply.text[:200]}"
                    )

        others = asyncio.ensure_future(ask_often())
        await asyncio.sleep(1.0)
        before = most_memory()
        words = [
            sys.executable,
            "-m",
            "trust.bodies",
            address.url,
            large.key,
            str(count),
            str(seed),
        ]
        # another process: its memory, in which the bodies are made, is not the gateway's
        sender = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
        output, _ = await sender.communicate()
        others.cancel()
        await asyncio.gather(others, return_exceptions=True)
        for session in gateway.sessions:
            session.end()
            session.forest.close()
        gateway.policy.engine.close()
    if sender.returncode:
        row.failures.append(f"the sender ended with {sender.returncode}")
    row.failures += output.decode().splitlines()
    growth = most_memory() - before
    row.measured = {
        "longest wait, s": round(max(waits), 2),
        "memory at first, MB": round(before),
        "growth, MB": round(growth),
    }
    if max(waits) > MAX_WAIT:
        row.failures.append(f"a small request waited {max(waits):.1f} s")
    if growth > MAX_GROWTH:
        row.failures.append(f"the process grew by {growth:.0f} MB")
    return row


def most_memory() -> float:
    """The most megabytes that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Send the bodies, and print a line for each that is not refused."""
    url, key, count, seed = sys.argv[1:]
    draw, kinds = random.Random(int(seed)), [*KINDS.items()]
    with httpx.Client(base_url=url, timeout=120) as client:
        for number in range(int(count)):
            name, make = kinds[number % len(kinds)]
            raw = make(draw.choice([200_000, 3_000_000, MAX_BODY - 200]))
            path, headers = f"/v1/{draw.choice(PATHS)}", {"authorization": f"Bearer {key}"}
            try:
                reply = client.post(path, content=raw, headers=headers)
            except httpx.TransportError:  # refused while it was sent
                continue
            if reply.status_code not in (400, 413):
                print(f"{name} of {len(raw)} bytes got {reply.status_code}: {reply.text[:200]!r}")


if __name__ == "__main__":
    main()

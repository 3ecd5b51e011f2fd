"""Agents of the recipes in `test_agent_runs`: a function, and a program that knows only an API."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any


async def agent(task: Any, client: Any) -> float:
    said = await client.chat(task.prompt, max_tokens=6)
    return float(len(said["content"]) % 2)


def post(url: str, key: str, body: Any) -> Any:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"x-api-key": key})
    with urllib.request.urlopen(asked) as reply:
        return json.load(reply)


if __name__ == "__main__":
    body = {
        "model": "policy",
        "max_tokens": 6,
        "messages": [{"role": "user", "content": sys.argv[1]}],
    }
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    said = post(url, os.environ["ANTHROPIC_API_KEY"], body)
    Path(os.environ["GRAFT_REWARD_FILE"]).write_text(str(said["usage"]["output_tokens"] % 2))

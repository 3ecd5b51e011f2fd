"""Where MCP servers are: URLs, commands, and files that list both, read into one form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def read_config(
    config: Any, token: str | None, headers: Mapping[str, str] | None
) -> dict[str, dict[str, Any]]:
    """Server name -> its entry, from any of the forms that `McpTools` takes."""
    if isinstance(config, str | Path) and not str(config).startswith(("http://", "https://")):
        path = Path(config)
        if not path.is_file():
            raise ValueError(
                f"MCP configuration {str(config)!r}: neither a URL nor a file that exists; a "
                'command is a list: ["python", "-m", "your.server"]'
            )
        config = json.loads(path.read_text("utf-8"))
    if isinstance(config, str):
        config = {"url": config}
    elif isinstance(config, Sequence):
        command, *args = config
        config = {"command": command, "args": args}
    if not isinstance(config, Mapping):
        raise ValueError(
            f"MCP configuration {config!r}: must be a URL, a command, a dict or a file"
        )
    servers: Any = config.get("mcpServers", {"server": config})
    if not isinstance(servers, Mapping) or not servers:
        raise ValueError('"mcpServers" must name at least one server')
    return {name: read_entry(name, entry, token, headers) for name, entry in servers.items()}


def read_entry(
    name: str, entry: Any, token: str | None, headers: Mapping[str, str] | None
) -> dict[str, Any]:
    if isinstance(entry, str):
        entry = {"url": entry}
    if not isinstance(entry, Mapping) or ("url" in entry) == ("command" in entry):
        raise ValueError(
            f'MCP server {name!r}: needs either "url" or "command", got {sorted(entry)}'
        )
    if (entry.get("transport") or entry.get("type")) == "sse":
        raise ValueError(
            f"MCP server {name!r}: the old SSE transport is not known; use its /mcp URL"
        )
    if "command" in entry:
        return dict(entry)
    sent = {**(entry.get("headers") or {}), **(headers or {})}
    if bearer := token or entry.get("token") or entry.get("auth"):
        sent["Authorization"] = f"Bearer {bearer}"
    return {"url": entry["url"], "headers": sent}


def where(entry: Mapping[str, Any]) -> str:
    """A server as errors name it."""
    return entry.get("url") or " ".join([entry["command"], *entry.get("args", [])])

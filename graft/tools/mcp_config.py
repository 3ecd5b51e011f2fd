"""Read the configuration of MCP servers: URLs, commands, and files that list both."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graft.registry import nearest

URL = ("url", "headers", "token", "auth")
COMMAND = ("command", "args", "env", "cwd")


def read_config(
    config: Any, token: str | None, headers: Mapping[str, str] | None
) -> dict[str, dict[str, Any]]:
    """Server name -> its entry, from any form that `McpTools` accepts."""
    if isinstance(config, str | Path) and not str(config).startswith(("http://", "https://")):
        config = read_file(Path(config))
    if isinstance(config, str):
        config = {"url": config}
    elif isinstance(config, Sequence) and config:
        command, *args = config
        config = {"command": command, "args": args}
    if not isinstance(config, Mapping):
        raise ValueError(
            f"MCP configuration {config!r}: must be a URL, a command, a dict or a file"
        )
    servers: Any = config.get("mcpServers", {"server": config})
    if not isinstance(servers, Mapping) or not servers:
        raise ValueError('"mcpServers" must name at least one server')
    read = {name: read_entry(name, entry, token, headers) for name, entry in servers.items()}
    if (token or headers) and not any("url" in entry for entry in read.values()):
        raise ValueError("token and headers are for servers with a url; use env for a command")
    return read


def read_file(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(
            f"MCP configuration {str(path)!r}: neither a URL nor a file that exists; a "
            'command is a list: ["python", "-m", "your.server"]'
        )
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"MCP configuration {str(path)!r} is not valid JSON: {error}") from error
    if not isinstance(found, Mapping):
        raise ValueError(
            f'MCP configuration {str(path)!r}: must be {{"mcpServers": {{name: ...}}}}, '
            f"not {type(found).__name__}"
        )
    return found


def read_entry(
    name: str, entry: Any, token: str | None, headers: Mapping[str, str] | None
) -> dict[str, Any]:
    if isinstance(entry, str):
        entry = {"url": entry}
    if not isinstance(entry, Mapping) or ("url" in entry) == ("command" in entry):
        got = sorted(map(str, entry)) if isinstance(entry, Mapping) else repr(entry)
        raise ValueError(
            f'MCP server {name!r}: needs either "url" or "command", got {got}; several servers '
            'belong under "mcpServers"'
        )
    if (entry.get("transport") or entry.get("type")) == "sse":
        raise ValueError(
            f"MCP server {name!r}: the old SSE transport is not supported; use its /mcp URL"
        )
    known = COMMAND if "command" in entry else URL
    for key in entry:  # other programs may add keys to the file: only likely typos are errors
        if key not in known and (meant := nearest(key, list(known))):
            raise ValueError(f"MCP server {name!r}: unknown key {key!r}; did you mean {meant!r}?")
    if "command" in entry:
        return read_command(name, entry)
    return read_url(name, entry, token, headers)


def read_command(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    command, args = entry["command"], entry.get("args") or []
    is_list = isinstance(args, Sequence) and not isinstance(args, str)
    if not isinstance(command, str) or not is_list or not all(isinstance(a, str) for a in args):
        raise ValueError(
            f'MCP server {name!r}: "command" must be the name of a program and "args" a list of '
            f"texts, got {command!r} and {args!r}"
        )
    return {**entry, "args": list(args)}


def read_url(
    name: str, entry: Mapping[str, Any], token: str | None, headers: Mapping[str, str] | None
) -> dict[str, Any]:
    if not str(entry["url"]).startswith(("http://", "https://")):
        raise ValueError(f"MCP server {name!r}: url {entry['url']!r} must begin with http")
    sent = {**(entry.get("headers") or {}), **(headers or {})}
    if bearer := token or entry.get("token") or entry.get("auth"):
        sent["Authorization"] = f"Bearer {bearer}"
    return {"url": entry["url"], "headers": sent}


def where(entry: Mapping[str, Any]) -> str:
    """A server's address for messages."""
    return entry.get("url") or " ".join([entry["command"], *entry.get("args", [])])

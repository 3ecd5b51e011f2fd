"""MCP servers as tools: every tool that a server lists becomes a tool with its schema.

    McpTools("http://localhost:8000/mcp", token="...")          streamable HTTP
    McpTools(["python", "-m", "graft_search.mcp_time"])          a command that uses stdio
    McpTools({"mcpServers": {"time": {"command": ...}, "wiki": {"url": ...}}})
    McpTools("servers.json")                                    the same in a file

With several servers the tools are named server_tool. They may be called on any thread; graft
reconnects to a server that died.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from graft.http import is_loopback
from graft.spelling import suggestion
from graft.tools.errors import ERROR
from graft.tools.schema import arguments_in, tidy
from graft.trust import check_address, check_program
from graft.trust.masking import is_secret_name, remember_all
from graft_search.mcp_link import Link

DEADLINE = 30.0  # seconds for one call
KEYS = {"url": ("url", "headers", "token", "auth"), "command": ("command", "args", "env", "cwd")}


class McpTool:
    """One tool of one server. Takes its arguments as JSON, or a bare text if it requires one string."""

    blocking = True

    def __init__(
        self, link: Link, listed: Mapping[str, Any], prefix: str, concurrency: int | None
    ) -> None:
        self.link, self.remote_name = link, listed["name"]
        self.name = re.sub(r"[^A-Za-z0-9_-]", "_", prefix + self.remote_name)[:64]
        self.description = listed["description"]
        self.parameters = tidy(listed["parameters"])
        self.concurrency = concurrency

    def __call__(self, content: str) -> str:
        arguments, why = arguments_in(content, self.parameters)
        return f"{ERROR}{why}" if why else self.call(arguments)

    def call(self, arguments: Mapping[str, Any]) -> str:
        return self.link.call(self.remote_name, dict(arguments))

    def __deepcopy__(self, memo: dict[int, Any]) -> McpTool:
        return self  # a connection is shared, not copied


class McpTools(list[McpTool]):
    """The tools of all configured servers, in order; `close` ends connections and child processes.

    A server's error, and a call of more than `deadline` seconds, is answered with "Error: ..."; a server
    that cannot be reached after `retries` further attempts, `delay` seconds apart, raises a ToolError. A
    call whose connection broke is repeated: use servers for which that does no harm, or retries=0.
    """

    def __init__(
        self,
        config: Any,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        deadline: float = DEADLINE,
        retries: int = 2,
        delay: float = 0.5,
        concurrency: int | None = None,
    ) -> None:
        super().__init__()
        if deadline <= 0 or retries < 0 or delay < 0:
            raise ValueError(
                f"deadline={deadline} must be above 0, retries={retries} and delay={delay} 0 or more"
            )
        described = read_config(config, token, headers)
        self.links = [
            Link(name, entry, deadline, retries, delay) for name, entry in described.items()
        ]
        try:
            for link in self.links:
                prefix = "" if len(self.links) == 1 else f"{link.name}_"
                self += [McpTool(link, listed, prefix, concurrency) for listed in link.tools()]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for link in self.links:
            link.close()

    def __enter__(self) -> McpTools:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_config(
    config: Any, token: str | None, headers: Mapping[str, str] | None
) -> dict[str, dict[str, Any]]:
    """Server name -> its entry, from any form that `McpTools` accepts."""
    if isinstance(config, str | Path) and not str(config).startswith(("http://", "https://")):
        config = _read_file(Path(config))
    elif isinstance(config, str):
        config = {"url": config}
    elif isinstance(config, Sequence) and config:
        config = {"command": config[0], "args": config[1:]}
    if not isinstance(config, Mapping):
        raise ValueError(
            f"MCP configuration {config!r}: must be a URL, a command, a dict or a file"
        )
    servers: Any = config.get("mcpServers", {"server": config})
    if not isinstance(servers, Mapping) or not servers:
        raise ValueError('"mcpServers" must name at least one server')
    read = {name: _read_entry(name, entry, token, headers) for name, entry in servers.items()}
    if (token or headers) and not any("url" in entry for entry in read.values()):
        raise ValueError("token and headers are for servers with a url; use env for a command")
    return read


def _read_file(path: Path) -> Any:
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


def _read_entry(
    name: str, entry: Any, token: str | None, headers: Mapping[str, str] | None
) -> dict[str, Any]:
    what = f"MCP server {name!r}"
    if isinstance(entry, str):
        entry = {"url": entry}
    if not isinstance(entry, Mapping) or ("url" in entry) == ("command" in entry):
        got = sorted(map(str, entry)) if isinstance(entry, Mapping) else repr(entry)
        raise ValueError(
            f'{what}: needs either "url" or "command", got {got}; several servers belong under '
            '"mcpServers"'
        )
    if (entry.get("transport") or entry.get("type")) == "sse":
        raise ValueError(f"{what}: the old SSE transport is not supported; use its /mcp URL")
    known = KEYS["command" if "command" in entry else "url"]
    for key in entry:  # other programs may add keys to the file: only likely typos are errors
        if key not in known and (meant := suggestion(key, list(known))):
            raise ValueError(f"{what}: unknown key {key!r};{meant}")
    if "command" in entry:
        command, args = entry["command"], entry.get("args") or []
        is_list = isinstance(args, Sequence) and not isinstance(args, str)
        if not is_list or not all(isinstance(text, str) for text in (command, *args)):
            raise ValueError(
                f'{what}: "command" must be the name of a program and "args" a list of texts, got '
                f"{command!r} and {args!r}"
            )
        remember_all({"env": entry.get("env") or {}})
        check_program(f"the MCP server {' '.join([command, *args])!r}, a program")
        return {**entry, "args": list(args)}
    if not str(entry["url"]).startswith(("http://", "https://")):
        raise ValueError(f"{what}: url {entry['url']!r} must begin with http")
    check_address(entry["url"])
    sent = {**(entry.get("headers") or {}), **(headers or {})}
    if bearer := token or entry.get("token") or entry.get("auth"):
        sent["Authorization"] = f"Bearer {bearer}"
    parts = urlsplit(entry["url"])
    secret = next((header for header in sent if is_secret_name(header)), None)
    if secret and parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ValueError(
            f"{what}: {secret} would be sent to http://{parts.hostname} in clear; use https, or forward a "
            f"port of this machine: ssh -L 8000:localhost:8000 {parts.hostname}"
        )
    remember_all({"headers": sent})
    return {"url": entry["url"], "headers": sent}

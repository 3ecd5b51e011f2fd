"""MCP servers as tools: every tool that a server lists becomes a tool with its schema.

    McpTools("http://localhost:8000/mcp", token="...")          streamable HTTP
    McpTools(["python", "-m", "graft.tools.mcp_time"])          a command that uses stdio
    McpTools({"mcpServers": {"time": {"command": ...}, "wiki": {"url": ...}}})
    McpTools("servers.json")                                    the same in a file

With several servers the tools are named server_tool. They may be called on any thread; graft
reconnects to a server that died.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graft.tools.errors import ERROR
from graft.tools.mcp_config import read_config
from graft.tools.mcp_link import Link
from graft.tools.schema import arguments_in, tidy

DEADLINE = 30.0  # seconds for one call


class McpTool:
    """One tool of one server. Takes its arguments as JSON, or a bare text if it requires one string."""

    blocking = True

    def __init__(
        self,
        link: Link,
        remote_name: str,
        name: str,
        description: str,
        parameters: Mapping[str, Any],
        concurrency: int | None,
    ) -> None:
        self.link, self.remote_name = link, remote_name
        self.name = name
        self.description = description
        self.parameters = tidy(parameters)
        self.concurrency = concurrency

    def __call__(self, content: str) -> str:
        arguments, why = arguments_in(content, self.parameters)
        return f"{ERROR}{why}" if why else self.call(arguments)

    def call(self, arguments: Mapping[str, Any]) -> str:
        return self.link.call(self.remote_name, dict(arguments))

    def __deepcopy__(self, memo: dict[int, Any]) -> McpTool:
        return self  # a connection is shared, not copied


class McpTools(Sequence[McpTool]):
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
        if deadline <= 0 or retries < 0 or delay < 0:
            raise ValueError(
                f"deadline={deadline} must be above 0, retries={retries} and delay={delay} 0 or more"
            )
        described = read_config(config, token, headers)
        self.links = [
            Link(name, entry, deadline, retries, delay) for name, entry in described.items()
        ]
        self._tools: list[McpTool] = []
        try:
            for link in self.links:
                for tool in link.tools():
                    alone = len(self.links) == 1
                    name = tool["name"] if alone else f"{link.name}_{tool['name']}"
                    self._tools.append(
                        McpTool(
                            link,
                            tool["name"],
                            re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64],
                            tool["description"],
                            tool["parameters"],
                            concurrency,
                        )
                    )
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._tools)

    def __getitem__(self, index: Any) -> Any:
        return self._tools[index]

    def __iter__(self) -> Iterator[McpTool]:
        return iter(self._tools)

    def close(self) -> None:
        for link in self.links:
            link.close()

    def __enter__(self) -> McpTools:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

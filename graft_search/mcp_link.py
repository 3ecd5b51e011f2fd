"""A connection to one MCP server that reconnects; the only file that imports mcp.

Connections use the background event loop. Each is held open by its own task, because the library
requires that the task that opened a connection closes it:

    _hold    opens the connection, passes the client on, waits for `_stop`, closes
    _call    in any other task: uses the client; a broken connection is closed and opened again
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import json
import os
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import IO, Any

from graft.http import HttpFault, refuse_other_origin
from graft.serving.guard import Guard, Rules, local_token, new_token, stored_token
from graft.serving.listening import address_of, listening, serve_app
from graft.tools import event_loop
from graft.tools.errors import ERROR, ToolError
from graft_search.mcp_bounds import BOUNDED_LINES, MAX_MESSAGE, bounded

KEPT_STDERR = 4096
"""Bytes: the last ones that a command wrote; the others are dropped."""
MAX_CLOSE = 10.0  # seconds for a server to end before it is cancelled
METHODS = ("GET", "POST", "DELETE")  # of streamable HTTP
MAX_PAGES = 100  # of a list of tools
MAX_TOOLS = 1000
CONNECTION_CLOSED = -32000  # the library's code for a connection that is gone

Work = Callable[[Any], Awaitable[Any]]
"""A function of a connected client."""


class Broken(Exception):
    """The connection failed; a new one may work."""


class Refused(Exception):
    """The server answered with an error."""


class Link:
    """One server and the connection to it, opened on first use and again after it broke."""

    def __init__(
        self, name: str, entry: Mapping[str, Any], deadline: float, retries: int, delay: float
    ) -> None:
        self.name, self.entry = name, entry
        self.deadline, self.retries, self.delay = deadline, retries, delay
        library()  # fails now if it is not installed, not in a rollout
        self._process = os.getpid()
        self._forget()
        atexit.register(_close_late, weakref.ref(self))

    def _forget(self) -> None:
        self._client: Any = None
        self._holder: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._opening = asyncio.Lock()
        self._faults: list[str] = []

    def tools(self) -> list[dict[str, Any]]:
        return self._run(self._list)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        return self._run(lambda client: self._call(client, name, arguments))

    def close(self) -> None:
        if self._holder is not None and self._process == os.getpid():
            event_loop.run(self._drop(), 3 * MAX_CLOSE)

    def _run(self, work: Work) -> Any:
        if self._process != os.getpid():  # forked: the connection belongs to the parent
            self._process = os.getpid()
            self._forget()
        return event_loop.run(self._with_retries(work))

    async def _with_retries(self, work: Work) -> Any:
        """Do `work`, reconnecting if the connection fails."""
        why = ""
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(self.delay)
            holder = None
            try:
                client, holder = await self._connected()
                return await work(client)
            except Broken as error:
                why = str(error)
                async with self._opening:
                    if holder is self._holder:  # else another task has reconnected already
                        await self._drop()
        where = self.entry.get("url") or " ".join([self.entry["command"], *self.entry["args"]])
        raise ToolError(f"MCP server {self.name!r} ({where}) cannot be reached: {why}")

    async def _list(self, client: Any) -> list[dict[str, Any]]:
        found: list[Any] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            try:
                page = await self._guarded(client.list_tools(cursor=cursor))
            except (TimeoutError, Refused) as error:
                raise Broken(f"it does not list its tools: {error!r}") from error
            found += page.tools
            if len(found) > MAX_TOOLS:
                raise Broken(f"it lists more than {MAX_TOOLS} tools")
            cursor = page.next_cursor
            if cursor is None:
                break
        return [
            {"name": t.name, "description": t.description or "", "parameters": t.input_schema}
            for t in found
        ]

    async def _call(self, client: Any, name: str, arguments: dict[str, Any]) -> str:
        try:
            result = await self._guarded(client.call_tool(name, arguments))
        except TimeoutError:
            return f"{ERROR}{name} took longer than {self.deadline:g} s"
        except Refused as error:
            return f"{ERROR}{error}"
        text = "\n".join(block_text(block) for block in result.content)
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        return f"{ERROR}{text.removeprefix(ERROR)}" if result.is_error else text

    async def _guarded(self, work: Any) -> Any:
        """Await `work`, with the library's exceptions as Broken (retry), Refused (answer) or TimeoutError."""
        mcp = library()
        try:
            async with asyncio.timeout(self.deadline):
                return await work
        except mcp.MCPError as error:
            if fault := self._fault():  # a repeated request would end in the same way
                raise Refused(fault) from error
            if error.code == CONNECTION_CLOSED or self._holder is None or self._holder.done():
                raise Broken(str(error)) from error
            raise Refused(str(error)) from error
        except TimeoutError:
            raise
        except Exception as error:  # of the transport: closed streams, HTTP faults, groups of them
            if fault := self._fault():
                raise Refused(fault) from error
            raise Broken(innermost(error)) from error

    def _fault(self) -> str:
        """What was refused of the server since the last call."""
        found, self._faults[:] = "; ".join(dict.fromkeys(self._faults)), []
        return found

    async def _connected(self) -> tuple[Any, asyncio.Task[None]]:
        async with self._opening:
            if self._holder is not None and self._holder.done():
                await self._drop()
            if self._holder is None:
                ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                self._stop = asyncio.Event()
                self._holder = asyncio.create_task(self._hold(ready))
                try:
                    self._client = await asyncio.wait_for(ready, self.deadline)
                except (TimeoutError, Broken) as error:
                    await self._drop()
                    late = f"no answer within {self.deadline:g} s"
                    raise Broken(str(error) or late) from error
            return self._client, self._holder

    async def _hold(self, ready: asyncio.Future[Any]) -> None:
        """Open the connection, keep it until `_stop` is set, close it: all in this one task."""
        mcp = library()
        with last_output() as (stderr, output):
            try:
                async with mcp.Client(transport(self.entry, stderr, self._faults)) as client:
                    ready.set_result(client)
                    await self._stop.wait()
            except Exception as error:  # any failure to start or to answer
                if not ready.done():
                    why = self._fault() or innermost(error)
                    last = output()[-400:].strip()
                    why += f"; its stderr: {last}" if last else ""
                    ready.set_exception(Broken(why))

    async def _drop(self) -> None:
        """Close the connection; child processes end with it."""
        holder, self._holder = self._holder, None
        client, self._client = self._client, None
        if holder is None:
            return
        self._stop.set()
        if client is not None:  # a connection that is still opening does not wait for `_stop`
            await asyncio.wait({holder}, timeout=MAX_CLOSE)
        if not holder.done():
            holder.cancel()
            await asyncio.wait({holder}, timeout=MAX_CLOSE)


def _close_late(link: weakref.ref[Link]) -> None:
    if (held := link()) is not None:
        held.close()


@contextmanager
def last_output() -> Iterator[tuple[IO[str], Callable[[], str]]]:
    """A file for a program to write to, and a function that gives the end of what it wrote."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    kept = bytearray()

    def take() -> str:
        with suppress(BlockingIOError):
            kept.extend(os.read(reading, 1 << 16))  # all that fits a pipe
            del kept[:-KEPT_STDERR]
        return kept.decode(errors="replace")

    loop = asyncio.get_running_loop()
    loop.add_reader(reading, take)
    try:
        with open(writing, "w") as file:  # noqa: PTH123
            yield file, take
    finally:
        loop.remove_reader(reading)
        os.close(reading)


@asynccontextmanager
async def transport(entry: Mapping[str, Any], stderr: Any, faults: list[str]) -> AsyncIterator[Any]:
    """The streams to and from a server; the stderr of a command goes to the file `stderr`.

    What is refused of an HTTP server is added to `faults`: the library reports only a lost connection.
    """
    if "command" in entry:
        from mcp import StdioServerParameters, stdio_client

        options = {key: entry[key] for key in ("args", "env", "cwd") if entry.get(key) is not None}
        command = StdioServerParameters(
            command=entry["command"],
            encoding=BOUNDED_LINES,
            encoding_error_handler="replace",
            **options,
        )
        async with stdio_client(command, errlog=stderr) as streams:
            yield streams
    else:
        import httpx2  # comes with mcp
        from mcp.client.streamable_http import streamable_http_client

        limits = httpx2.Timeout(30.0, read=None)  # each call has its own deadline

        def refuse(why: str) -> None:
            faults.append(why)
            raise ConnectionError(why)

        async def check(reply: Any) -> None:
            if reply.has_redirect_location:
                try:
                    refuse_other_origin(str(reply.url), reply.headers["location"])
                except HttpFault as fault:
                    refuse(f"the server {fault}")
            if reply.headers.get("content-encoding", "identity") != "identity":
                refuse("the server sent a compressed answer, whose size is unknown")
            kind = reply.headers.get("content-type", "")
            reply.stream = bounded(reply.stream, kind.startswith("text/event-stream"), refuse)

        headers = {**entry["headers"], "Accept-Encoding": "identity"}
        if (token := local_token(entry["url"])) and "Authorization" not in headers:
            headers["Authorization"] = f"Bearer {token}"
        async with (
            httpx2.AsyncClient(
                headers=headers,
                timeout=limits,
                follow_redirects=True,
                event_hooks={"response": [check]},
            ) as client,
            streamable_http_client(entry["url"], http_client=client) as streams,
        ):
            yield streams


def block_text(block: Any) -> str:
    """A piece of a result as text; images and other data as "[kind: ...]"."""
    if hasattr(block, "text"):
        return block.text
    if hasattr(block, "data"):
        return f"[{block.type}: {getattr(block, 'mime_type', '')}, {len(block.data)} characters]"
    resource = getattr(block, "resource", block)
    return getattr(resource, "text", "") or f"[{block.type}: {getattr(resource, 'uri', '')}]"


def innermost(error: BaseException) -> str:
    """The first exception inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def library() -> Any:
    try:
        import mcp
    except ImportError as error:
        raise ImportError('MCP tools need the mcp package: pip install "graft-rl[mcp]"') from error
    return mcp


def serve(functions: Sequence[Callable[..., Any]], name: str, port: int | None = None) -> None:
    """Run typed functions as an MCP server: on stdio, or at http://127.0.0.1:port/mcp with a token.

    `McpTools` of the same user finds the token by itself; other clients get it from the printed line.
    """
    library()
    from mcp.server.mcpserver import MCPServer

    server = MCPServer(name, log_level="WARNING")
    for function in functions:
        server.add_tool(function, description=inspect.getdoc(function))
    if port is None:
        server.run("stdio")
        return
    token = new_token()
    with listening("127.0.0.1", port) as listener, stored_token(token, port):
        rules = Rules(token, listener.getsockname(), "send Authorization: Bearer TOKEN", METHODS)
        guarded = Guard(server.streamable_http_app(), rules, MAX_MESSAGE)

        def ready() -> None:  # stdout belongs to the protocol
            said = f"{address_of(listener)}/mcp, Authorization: Bearer {token}, end with Ctrl-C"
            print(said, file=sys.stderr, flush=True)

        serve_app(guarded, listener, ready, seconds=None)  # answers are streams

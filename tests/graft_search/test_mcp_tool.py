"""MCP servers as tools: real ones, over stdio and over HTTP on localhost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graft.envs.base import BaseEnv
from graft.envs.tool_env import ToolEnv
from graft.protocols import Tool
from graft.tools import event_loop, make_tools
from graft.tools.errors import ToolError
from graft.trust.masking import mask
from graft.types import Turn
from graft_search import mcp_bounds, mcp_link, mcp_time
from graft_search.mcp import McpTools, read_config
from tests.held import open_files
from tests.web_server import Reply, answering

pytest.importorskip("mcp")

TIME = [sys.executable, "-m", "graft_search.mcp_time"]
ODD_SERVER = """
import os, time
from graft_search.mcp_link import serve

def pid() -> int:
    "The server's process."
    return os.getpid()

def wait(seconds: float) -> str:
    "Wait."
    time.sleep(seconds)
    return "done"

def die() -> str:
    "End the server."
    os._exit(1)

def repeat(text: str) -> str:
    "Repeat the text."
    return text

serve([pid, wait, die, repeat], "odd")
"""
ODD = [sys.executable, "-c", ODD_SERVER]


@pytest.fixture(scope="module")
def clock() -> Iterator[McpTools]:
    with McpTools(TIME) as tools:
        yield tools


@pytest.fixture(scope="module")
def odd() -> Iterator[dict[str, Any]]:
    with McpTools(ODD, deadline=10, delay=0.01) as tools:
        yield {tool.name: tool for tool in tools}


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_tool_a_server_lists_becomes_one_with_its_schema(clock: McpTools):
    assert [tool.name for tool in clock] == ["now", "convert", "between"]
    assert all(isinstance(tool, Tool) for tool in clock)
    between = clock[2]
    assert between.description.startswith("How much time passes")
    assert between.parameters["required"] == ["start", "end"]
    assert between.parameters["properties"]["unit"]["enum"][0] == "seconds"
    assert "title" not in json.dumps(between.parameters)


def test_calls_take_json_and_faults_are_answered(clock: McpTools):
    _, convert, between = clock
    arguments = {"start": "2025-01-31", "end": "2025-02-01", "unit": "hours"}
    assert between(json.dumps(arguments)) == between.call(arguments) == "24.0"
    assert convert.call({"time": "2025-01-31T12:00", "timezone": "Asia/Tokyo"}) == (
        "2025-01-31T21:00:00+09:00"
    )
    assert "unknown timezone 'x'" in convert.call({"time": "2025-01-31", "timezone": "x"})
    for wrong in ("{", "[1]", "{}", '{"start": 3, "end": 4}', "\x00"):
        assert between(wrong).startswith("Error: ")


def test_a_single_string_may_be_written_bare(odd: dict[str, Any]):
    assert odd["repeat"]("hi {there}") == "hi {there}"
    assert odd["repeat"]('{"text": "hi"}') == "hi"


def test_threads_share_one_connection(odd: dict[str, Any]):
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: answers.append(odd["repeat"](str(n)))) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [str(n) for n in range(8)]


def test_a_server_that_was_killed_is_started_again(odd: dict[str, Any]):
    first = int(odd["pid"](""))
    os.kill(first, signal.SIGKILL)
    second = int(odd["pid"](""))
    assert second != first and is_alive(second)


def test_a_call_past_its_deadline_is_answered(odd: dict[str, Any]):
    link = odd["wait"].link
    link.deadline = 0.1
    assert odd["wait"]('{"seconds": 0.4}') == "Error: wait took longer than 0.1 s"
    link.deadline = 10
    assert odd["repeat"]("on we go") == "on we go"


def test_a_dead_server_is_a_broken_tool_the_next_call_works_and_close_ends_the_process():
    with McpTools(ODD, retries=0) as tools:
        named = {tool.name: tool for tool in tools}
        with pytest.raises(ToolError, match="cannot be reached: Connection closed"):
            named["die"]("")
        process = int(named["pid"](""))
        assert is_alive(process)
    assert not is_alive(process)
    tools.close()  # twice does no harm


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (["graft-no-such-command"], "No such file|Permission denied"),
        ([sys.executable, "-c", "raise SystemExit('bad luck')"], "its stderr: bad luck"),
        ("http://127.0.0.1:9/mcp", "ConnectError"),
    ],
)
def test_an_unreachable_server_is_an_error_that_leaves_nothing_open(config: Any, why: str):
    event_loop.run(asyncio.sleep(0))  # the loop itself stays
    before = open_files()
    with pytest.raises(ToolError, match=why) as caught:
        McpTools(config, retries=1, delay=0.01)
    assert open_files() == before, caught.value


def test_of_the_stderr_of_a_command_only_the_end_is_kept():
    code = (
        "import sys\nfor n in range(3000): print('x' * 1000, file=sys.stderr)\n"
        "print('the end', file=sys.stderr)\nraise SystemExit(1)"
    )
    sizes: list[int] = []
    read = os.read

    def noted(descriptor: int, size: int) -> bytes:
        sizes.append(len(part := read(descriptor, size)))
        return part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mcp_link.os, "read", noted)
        with pytest.raises(ToolError, match=r"its stderr: x+\nthe end") as caught:
            McpTools([sys.executable, "-c", code], retries=0)
    assert sum(sizes) > 3_000_000 and len(str(caught.value)) < 1000


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """The URL of an HTTP server that wants a bearer token and a header."""
    import uvicorn
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("adder")

    def add(a: int, b: int) -> int:
        """a plus b."""
        return a + b

    server.add_tool(add)
    app = server.streamable_http_app()

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", []))
        allowed = (headers.get(b"authorization"), headers.get(b"x-room")) == (b"Bearer key", b"7")
        if scope["type"] != "http" or allowed:
            return await app(scope, receive, send)
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    web = uvicorn.Server(uvicorn.Config(guarded, port=port, log_level="error", ws="none"))
    thread = threading.Thread(target=web.run, daemon=True)
    thread.start()
    while not web.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}/mcp"
    web.should_exit = True
    thread.join(10)


def test_http_servers_get_the_token_and_the_headers(served: str):
    with McpTools(served, token="key", headers={"X-Room": "7"}) as tools:
        assert tools[0].call({"a": 2, "b": 3}) == "5"
    with pytest.raises(ToolError, match="cannot be reached"):
        McpTools(served, token="wrong", retries=0)


def test_tools_of_several_servers_carry_the_servers_name(served: str, tmp_path: Path):
    entry = {"url": served, "token": "key", "headers": {"X-Room": "7"}}
    config = {"mcpServers": {"one": entry, "my sums": entry}}
    file = tmp_path / "servers.json"
    file.write_text(json.dumps(config))
    with McpTools(file) as tools:
        assert [tool.name for tool in tools] == ["one_add", "my_sums_add"]
        assert tools[1].call({"a": 2, "b": 2}) == "4"


class Ask(BaseEnv):
    def pose(self) -> str:
        return "How many hours has a day?"

    def respond(self, action: str) -> Turn:
        return Turn("", float("24" in action), terminated=True)


def test_an_env_with_mcp_tools(clock: McpTools):
    env = ToolEnv(Ask(), clock, format="mcp", instructions=None)
    assert '"name": "between"' in str(env.reset(0)[0])
    arguments = json.dumps({"start": "2025-01-31", "end": "2025-02-01", "unit": "hours"})
    call = f"<tool_name>between</tool_name><arguments>{arguments}</arguments>"
    turn = env.step(f"Let me look. <tool_call>{call}</tool_call>")
    assert (turn.observation, turn.info["tool"]) == ("24.0", "between")
    twin = env.fork()
    assert twin.tools["between"] is env.tools["between"]
    assert env.step("24").reward == 1.0


def test_a_recipe_names_servers_under_mcp(served: str):
    entry = {"url": served, "headers": {"X-Room": "7"}, "token": "key"}
    calculator, add = make_tools(["calculator", {"mcp": entry}])
    assert (calculator.name, add.name, add.call({"a": 1, "b": 1})) == ("calculator", "add", "2")
    add.link.close()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("no/such/file.json", "neither a URL nor a file"),
        (3, "must be a URL, a command"),
        ({"mcpServers": {}}, "at least one server"),
        ({"mcpServers": {"a": {}}}, 'either "url" or "command"'),
        ({"url": "http://x", "command": "y"}, "either"),
        ({"url": "http://x", "transport": "sse"}, "SSE"),
        ({"url": "localhost:8000/mcp"}, "must begin with http"),
        ([], "must be a URL, a command"),
        ([1, 2], '"args" a list of texts'),
        ({"command": "python", "args": "-m x"}, '"args" a list of texts'),
        ({"command": "python", "arg": ["-m", "x"]}, "unknown key 'arg'; did you mean 'args'"),
        ({"mcpServers": {"a": 3}}, '\'a\': needs either "url" or "command", got 3'),
        ({"servers": {"a": {"url": "http://x"}}}, 'several servers belong under "mcpServers"'),
    ],
)
def test_a_contradictory_configuration_is_refused(config: Any, why: str):
    with pytest.raises(ValueError, match=why):
        read_config(config, None, None)


@pytest.mark.parametrize(("text", "why"), [("{", "bad.json' is not valid JSON"), ("[1]", "list")])
def test_a_file_that_is_no_configuration_is_named(text: str, why: str, tmp_path: Path):
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=why):
        McpTools(file)


def test_options_that_could_not_do_anything_are_refused():
    with pytest.raises(ValueError, match="token and headers are for servers with a url"):
        McpTools(["run", "me"], token="key")
    wrong: Any
    for wrong in ({"deadline": 0}, {"retries": -1}, {"delay": -1}):
        with pytest.raises(ValueError, match="must be above 0"):
            McpTools("http://x/mcp", **wrong)


def test_keys_of_other_programs_are_ignored():
    entry = {"command": "run", "args": ["me"], "alwaysAllow": [], "type": "stdio"}
    assert read_config({"mcpServers": {"a": entry}}, None, None)["a"]["command"] == "run"


def test_a_command_that_never_answered_is_cancelled_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("graft_search.mcp_link.MAX_CLOSE", 3600.0)  # to wait for it would be seen
    with pytest.raises(ToolError, match=r"no answer within 0\.2 s"):
        McpTools(["sleep", "100"], deadline=0.2, retries=0)


def test_all_forms_of_configuration_come_to_one():
    with_token = {"url": "https://x/mcp", "headers": {"Authorization": "Bearer t"}}
    assert read_config("https://x/mcp", "t", None) == {"server": with_token}
    assert read_config({"mcpServers": {"a": "https://x/mcp"}}, "t", None) == {"a": with_token}
    assert read_config(("run", "me"), None, None) == {"server": {"command": "run", "args": ["me"]}}


@pytest.mark.parametrize("arguments", [["--help"], ["1", "2"], ["-1"]])
def test_the_time_server_prints_its_usage(arguments: list[str]):
    with pytest.raises(SystemExit, match=r"usage: python -m graft_search\.mcp_time \[PORT\]"):
        mcp_time.main(arguments)


@pytest.mark.parametrize("answer", ["json", "event", "compressed"])
def test_a_long_answer_over_http_is_refused(answer: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mcp_bounds, "MAX_MESSAGE", 10_000)
    body, kind = b'{"jsonrpc": "2.0", "id": 0, "result": "' + b"x" * 20_000, "application/json"
    headers = {"Content-Encoding": "gzip"} if answer == "compressed" else {}
    if answer == "event":
        body, kind = b"event: message\ndata: " + body, "text/event-stream"
    why = "compressed answer" if headers else "more than .* MiB in one message"
    with (
        answering(lambda _: Reply(200, body, {"Content-Type": kind, **headers})) as (url, _),
        pytest.raises(ToolError, match=why),
    ):
        McpTools(f"{url}/mcp", retries=0)


def test_a_long_line_of_a_command_is_the_error_of_its_call(
    odd: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mcp_bounds, "MAX_MESSAGE", 10_000)
    assert len(odd["repeat"]("x" * 4000)) == 4000
    answer = odd["repeat"]("x" * 20_000)
    assert answer.startswith("Error: the server sent more than")
    assert odd["repeat"]("still there") == "still there"


@pytest.mark.parametrize("code", [302, 307, 308])
def test_a_redirect_to_another_server_gets_no_headers(code: int):
    with (
        answering(lambda _: Reply(200, b"{}")) as (other, seen),
        answering(lambda _: Reply(code, b"", {"Location": f"{other}/mcp"})) as (url, _),
        pytest.raises(ToolError, match="points to another server"),
    ):
        McpTools(f"{url}/mcp", token="canary", headers={"X-Canary": "canary"}, retries=0)
    assert seen == []


def test_a_token_is_not_sent_in_clear_and_is_masked_from_then_on():
    cases: list[dict[str, Any]] = [{"token": "canary-1"}, {"headers": {"X-Api-Key": "canary-1"}}]
    for given in cases:
        with pytest.raises(ValueError, match=r"would be sent to http://host\.example in clear"):
            McpTools("http://host.example/mcp", **given)
    read_config({"url": "https://host.example/mcp", "headers": {"X-Room": "canary-2"}}, None, None)
    read_config({"command": "server", "env": {"VALUE": "canary-3"}}, None, None)
    assert mask("canary-2, canary-3") == "***, ***"

"""Canary secrets in every place that takes one, then a search over all that graft wrote, printed and sent.

Places of clients talk to servers on this machine: one that the canary is for, which repeats it in errors and
redirects, and another, which must see nothing of it. Places of runs are in one recipe: `graft train` (twice),
`eval`, `export`, `report`, `runs`, `doctor`, `config`, `view` and a crash, each as a process of its own.
"""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from graft.envs.calculator import CalculatorTask
from graft.types import Turn
from trust.bank import Row

SECONDS = 300
"""For one command."""


class CanaryTask(CalculatorTask):
    """The calculator's task as a client of a service: it has keys, and repeats them in answers and errors."""

    def __init__(
        self, *, keys: dict[str, Any] | None = None, crash: bool = False, **rest: Any
    ) -> None:
        super().__init__(**rest)
        self.keys, self.crash = keys or {}, crash

    def step(self, action: str) -> Turn:
        if self.crash:
            raise SystemExit(f"no such account: {json.dumps(self.keys)}")
        if random.random() < 0.3:
            raise RuntimeError(f"the service refused {json.dumps(self.keys)}")
        turn = super().step(action)
        return turn._replace(info={**turn.info, "service": json.dumps(self.keys)})


RECIPE: dict[str, Any] = {
    "run": {"name": "canary", "save_every": 1, "eval_tasks": 2, "log_episodes": 1, "seed": 3},
    "model": {
        "shape": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "ff": 16}
        | {"max_positions": 96}
    },
    "task": {"env": "trust.secrets:CanaryTask", "args": {}, "eval_args": {"split": "test"}},
    "rollout": {"tasks": 2, "samples": 4, "max_tokens": 6, "max_turns": 3, "max_context": 64},
    "train": {"steps": 2, "lr": 0.01},
}

Keys = dict[str, Any]
IN_RECIPE: dict[str, Callable[[str], Keys]] = {
    "a token by reference": lambda _: {"token": "${oc.env:PLACE_0}"},
    "a header by reference": lambda _: {"headers": {"X-Room": "Bearer ${oc.env:PLACE_1}"}},
    "a plain name by reference": lambda _: {"note": "${oc.env:PLACE_2}"},
    "a token in clear": lambda canary: {"inner": {"token": canary}},
    "a key in clear": lambda canary: {"api_key": canary},
    "a header in clear": lambda canary: {"one": {"headers": {"X-Canary": canary}}},
    "a command's variable in clear": lambda canary: {"two": {"env": {"VALUE": canary}}},
    "a password in an address": lambda canary: {"url": f"https://me:{canary}@host/mcp"},
    "a token in an address": lambda canary: {"link": f"https://host/mcp?token={canary}"},
    "a password in a list": lambda canary: {"list": [{"password": canary}]},
    "a key by its form alone": lambda canary: {"plain": f"sk-proj-{canary}"},
}
"""Places of the recipe; the number of a reference is that of its place."""

VARIABLES = ["OPENAI_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "TAVILY_API_KEY"]


@contextmanager
def recorder(
    answer: Callable[[str], tuple[int, dict[str, str], bytes]],
) -> Iterator[tuple[str, list[str]]]:
    """A server that keeps all it receives, and answers what `answer` makes of it."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            seen.append(
                f"{self.command} {self.path}\n{self.headers}\n{body.decode(errors='replace')}"
            )
            status, headers, content = answer(seen[-1])
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_DELETE = do_GET

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def _mcp(url: str, canary: str) -> str:
    from graft_search.mcp import McpTools

    McpTools(f"{url}/mcp", token=canary, headers={"X-Canary": canary}, retries=0, deadline=10)
    return ""


def _mcp_command(url: str, canary: str) -> str:
    from graft_search.mcp import McpTools

    program = "import os, sys; sys.exit('cannot log in with ' + os.environ['VALUE'])"
    entry = {"command": sys.executable, "args": ["-c", program], "env": {"VALUE": canary}}
    McpTools(entry, retries=0, deadline=10)
    return ""


def _judge(url: str, canary: str) -> str:
    from graft.rewards.judge.judge import Judge

    os.environ["CANARY_NAMED"] = canary
    judge = Judge(f"{url}/v1", "m", api_key_env="CANARY_NAMED", retries=0, strict=True)
    return str(judge.is_correct("Who?", ["A"], "B"))


def _search(url: str, canary: str) -> str:
    from graft_search import make_source

    os.environ["CANARY_NAMED"] = canary
    source = make_source("bing", url=url, api_key_env="CANARY_NAMED", retries=0)
    return str(source.retrieve(["q"], 1))


def _search_in_query(url: str, canary: str) -> str:
    from graft_search import make_source

    os.environ["CANARY_NAMED"] = canary
    source = make_source("serpapi", url=url, api_key_env="CANARY_NAMED", retries=0)
    return str(source.retrieve(["q"], 1)) + source.fingerprint


def _endpoint(url: str, canary: str) -> str:
    import asyncio

    from graft.engine.remote.endpoint import Endpoint

    os.environ["CANARY_NAMED"] = canary
    endpoint = Endpoint(f"{url}/v1", timeout=10, deadline=10, api_key_env="CANARY_NAMED")
    return str(asyncio.run(endpoint.ask("/models", retries=0)))


def _password(url: str, canary: str) -> str:
    import asyncio

    from graft.engine.remote.endpoint import Endpoint

    endpoint = Endpoint(url.replace("//", f"//me:{canary}@"), timeout=10, deadline=10)
    return str(asyncio.run(endpoint.ask("/models", retries=0)))


def _not_named(url: str, canary: str) -> str:
    """OpenAI's key and an endpoint, a judge and a search service for which it was not named."""
    import asyncio

    from graft.engine.remote.endpoint import Endpoint
    from graft.rewards.judge.judge import Judge
    from graft_search import make_source

    os.environ["OPENAI_API_KEY"] = os.environ["BING_API_KEY"] = canary
    said = ""
    for work in (
        lambda: asyncio.run(Endpoint(url, timeout=10, deadline=10).ask("/models", retries=0)),
        lambda: Judge(f"{url}/v1", "m", retries=0, strict=True).is_correct("Who?", ["A"], "B"),
        lambda: make_source("bing", url=url, retries=0).retrieve(["q"], 1),
    ):
        try:
            said += str(work())
        except Exception as error:
            said += str(error)
    return said


CLIENTS: dict[str, Callable[[str, str], str]] = {
    "MCP over HTTP: token and header": _mcp,
    "MCP command: variable": _mcp_command,
    "judge: key": _judge,
    "search service: key in a header": _search,
    "search service: key in the address": _search_in_query,
    "endpoint: key": _endpoint,
    "endpoint: password in the address": _password,
    "key that was named for no server": _not_named,
}
SMALL = len(CLIENTS)
FULL = len(CLIENTS) + len(IN_RECIPE) + len(VARIABLES)


def run(count: int, seed: int) -> Iterator[Row]:
    rng = random.Random(seed)
    clients = list(CLIENTS)[:count]
    yield _clients(clients, rng)
    recipes = list(IN_RECIPE)[: max(0, count - len(CLIENTS))]
    variables = VARIABLES[: max(0, count - len(CLIENTS) - len(IN_RECIPE))]
    if recipes:
        yield _runs(recipes, variables, rng)


def _canary(rng: random.Random) -> str:
    return f"canary{rng.getrandbits(80):020x}"


def _forms(canary: str) -> list[str]:
    coded = base64.b64encode(canary.encode()).decode().rstrip("=")
    return list({canary, urllib.parse.quote(canary), coded[:-1]})


def _clients(names: list[str], rng: random.Random) -> Row:
    row = Row("secrets", "clients and redirects", len(names))
    answers = 0
    for name in names:
        canary = _canary(rng)
        before = dict(os.environ)
        try:
            for how in ("repeats", "redirects"):
                with recorder(lambda _: (200, {}, b"{}")) as (other, leaked):

                    def answer(text: str, how: str = how, other: str = other) -> Any:
                        if how == "redirects":
                            return 307, {"Location": f"{other}/elsewhere"}, b""
                        return 401, {}, f"this is wrong: {text}".encode()

                    with recorder(answer) as (url, seen):
                        try:
                            said = CLIENTS[name](url, canary)
                        except Exception as error:
                            said = f"{error} {error!r}"
                answers += len(seen)
                if leaked:
                    row.failures.append(f"{name}: another server got a request: {leaked[0][:80]!r}")
                for form in _forms(canary):
                    if form in said:
                        row.failures.append(f"{name}: in the message of a client: {said[:200]!r}")
                    if name.endswith("no server") and any(form in text for text in seen):
                        row.failures.append(f"{name}: sent to a server that it was not named for")
        finally:
            os.environ.clear()
            os.environ.update(before)
    row.measured["requests recorded"] = answers
    return row


def _runs(names: list[str], variables: list[str], rng: random.Random) -> Row:
    canaries = {name: _canary(rng) for name in [*names, *variables]}
    with tempfile.TemporaryDirectory() as temporary:
        given, work = Path(temporary, "given"), Path(temporary, "work")
        given.mkdir()
        (work / "home").mkdir(parents=True)
        keys: Keys = {}
        for name in names:
            keys |= IN_RECIPE[name](canaries[name])
        recipe = json.loads(json.dumps(RECIPE))
        recipe["task"]["args"] = {"keys": keys}
        recipe["run"] |= {"dir": str(work / "runs"), "trackers": ["tensorboard"]}
        (given / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
            ),
            "HOME": str(work / "home"),
            "XDG_CONFIG_HOME": str(work / "home" / ".config"),
            "TMPDIR": str(work),
            "OMP_NUM_THREADS": "1",
            **{f"PLACE_{place}": canaries[name] for place, name in enumerate(names)},
            **{name: canaries[name] for name in variables},
        }
        return _searched(canaries, _outputs(given / "recipe.yaml", work, env), work)


def _outputs(recipe: Path, work: Path, env: dict[str, str]) -> dict[str, str]:
    """What each command printed."""
    run, again = work / "runs" / "canary", ["task.args.keys=null", "task.args.crash=false"]
    commands: dict[str, list[str]] = {
        "train": ["train", str(recipe)],
        "train again": ["train", str(recipe), "train.steps=3"],
        "crash": ["train", str(recipe), "run.name=crash", "task.args.crash=true"],
        "wrong key": ["train", str(recipe), "task.args.keys.tokn={password: 3}", "train.lr=x"],
        "config": ["config", str(recipe)],
        "eval": ["eval", str(run), "--tasks", "2"],
        "eval without keys": ["eval", str(run), "--tasks", "2", *again],
        "export": ["export", str(run), "--out", str(work / "exported")],
        "report": ["report", str(run)],
        "runs": ["runs", str(work / "runs")],
        "doctor": ["doctor", str(recipe)],
    }
    found: dict[str, str] = {}
    for name, arguments in commands.items():
        found[name] = _command(arguments, work, env)
    found["view"] = _pages(run, work, env)
    return found


def _command(arguments: list[str], work: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "graft", *arguments],
        cwd=work,
        env=env,
        capture_output=True,
        timeout=SECONDS,
    )
    return (done.stdout + done.stderr).decode(errors="replace")


def _pages(run: Path, work: Path, env: dict[str, str]) -> str:
    """Every answer of `graft view` about the run."""
    command = [sys.executable, "-m", "graft", "view", str(run), "--no-browser", "--json"]
    with subprocess.Popen(command, cwd=work, env=env, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url, _, token = json.loads(server.stdout.readline())["url"].partition("/?token=")
            texts: list[str] = []
            for path in ("/", "/api/runs", "/api/summary?run=0", "/api/settings", "/api/pulse"):
                texts.append(_get(url, path, token))
            for step in (1, 2):
                tasks = _get(url, f"/api/tasks?run=0&step={step}", token)
                episodes = [
                    _get(url, f"/api/episode?run=0&step={step}&line={n}", token) for n in (0, 1)
                ]
                texts += [tasks, *episodes]
            return "\n".join(texts)
        finally:
            server.terminate()


def _get(url: str, path: str, token: str) -> str:
    request = urllib.request.Request(f"{url}{path}", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.read().decode(errors="replace")


def _searched(canaries: dict[str, str], outputs: dict[str, str], work: Path) -> Row:
    row = Row("secrets", "runs and commands", len(canaries))
    files = [path for path in work.rglob("*") if path.is_file()]
    size = 0
    for path in files:
        content = path.read_bytes()
        size += len(content)
        for place, canary in canaries.items():
            if any(form.encode() in content for form in _forms(canary)):
                row.failures.append(f"{place}: in the file {path.relative_to(work)}")
    for command, text in outputs.items():
        for place, canary in canaries.items():
            if any(form in text for form in _forms(canary)):
                row.failures.append(f"{place}: in the output of {command}")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (work / "runs").glob("*")}
    row.failures += [
        f"the folder of run {name} has mode {mode:o}" for name, mode in modes.items() if mode & 0o77
    ]
    if not modes or "reward" not in outputs["train"]:
        row.failures.append(f"graft train did not run: {outputs['train'][-300:]!r}")
    row.measured = {
        "commands": len(outputs),
        "files searched": len(files),
        "MB": round(size / 1e6, 1),
        "KB printed": round(sum(map(len, outputs.values())) / 1e3),
    }
    return row

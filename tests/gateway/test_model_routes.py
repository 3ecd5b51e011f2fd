"""Which model answers: by the name that the client gives, the policy, a frozen model or another server."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from graft.config import ConfigError, check
from graft.gateway.address import GatewayAddress
from graft.gateway.request import RefusedRequest
from graft.gateway.speakers.endpoint import ModelEndpoint
from graft.gateway.speakers.routes import FrozenModel, ModelRoutes
from graft.train.monitor.check import PASS, WARN
from graft.train.rollouts.agents import make_routes, refuse_agents
from graft.types import Author, Task
from tests.gateway import test_agent_runs as runs
from tests.gateway.test_agent_doctor import checks_of
from tests.gateway.test_attempts import attempts
from tests.gateway.tiny import TASK, tiny_engine, tiny_gateway, tiny_tokenizer
from tests.training import train_recipe

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
ASK = {"model": "gpt-4.1", "messages": [{"role": "user", "content": "2+2?"}]}


class Provider(BaseHTTPRequestHandler):
    """Another provider: it answers with what it was sent."""

    asked: list[tuple[str, dict[str, Any], dict[str, str]]]
    status = 200

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, body, {k.lower(): v for k, v in self.headers.items()}))
        message = {"role": "assistant", "content": "four", "tool_calls": None}
        whole = json.dumps({"choices": [{"message": message}], "data": [{"embedding": [1.0]}]})
        text = f"data: {whole}\n\n" if body.get("stream") else whole
        self.send_response(self.status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def provider(status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """A running provider: its address, and what it was asked."""
    handler = type("Handler", (Provider,), {"asked": [], "status": status})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", handler.asked
    finally:
        server.shutdown()
        server.server_close()


def test_a_name_comes_before_patterns_and_all_others_are_the_policys():
    judge, exact = FrozenModel("reference"), FrozenModel("runs/a")
    routes = ModelRoutes({"*judge*": judge, "the-judge": exact, "policy": None})
    names = ("my-judge", "the-judge", "policy", "gpt", "")
    assert [routes.route(name) for name in names] == [judge, exact, None, None, None]
    assert routes.unnamed == ["gpt"] and [*routes.names] == [
        "my-judge",
        "the-judge",
        "policy",
        "gpt",
    ]
    for number in range(100):
        routes.route(f"{number}" * 1000)
    assert len(routes.names) == 16 and max(map(len, routes.names)) == 80


def test_two_names_without_a_rule_are_a_warning_and_one_is_a_line(caplog):
    caplog.set_level(logging.INFO, "graft")
    routes = ModelRoutes({"judge": FrozenModel("reference")})
    for names in (["gpt", "judge"], ["gpt"], ["mini"], ["mini"]):
        for name in names:
            routes.route(name)
        routes.note_names()
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "'gpt', 'mini'" in caplog.text and "'judge'" not in caplog.text


async def two_models(task: Task, client: Any) -> float:
    said = await client.chat(task.prompt)
    judged = await client.chat([{"role": "user", "content": said["content"]}], model="judge")
    again = await client.chat([{"role": "user", "content": said["content"]}], model="judge")
    assert judged == again
    return 1.0


def test_what_a_frozen_model_says_is_neither_recorded_nor_trained():
    engine = tiny_engine(tiny_tokenizer())
    routes = ModelRoutes({"judge": FrozenModel("reference")})
    agents = {"routes": routes, "frozen": {"reference": engine}}
    (episode,), _ = attempts(two_models, agents=agents)
    for leaf in episode.leaves:
        assert len(leaf.tips) == 1 and leaf.status == "done"
        assert (leaf.metrics["agent/calls"], leaf.metrics["agent/frozen_calls"]) == (1.0, 2.0)
    assert sum(span.author is Author.POLICY for span in episode.spans) == 2
    engine.close()


def test_doctor_names_the_models():
    engine = tiny_engine(tiny_tokenizer())
    found = checks_of(two_models)["agent models"]
    assert found.verdict == WARN and found.data == {
        "models": {"policy": "policy", "judge": "policy"}
    }
    agents = {
        "routes": ModelRoutes({"j*": FrozenModel("reference")}),
        "frozen": {"reference": engine},
    }
    found = checks_of(two_models, agents=agents)["agent models"]
    assert found.verdict == PASS and found.data == {
        "models": {"policy": "policy", "judge": "frozen"}
    }
    engine.close()


async def test_a_call_is_passed_on_with_the_key_that_is_meant_for_it(monkeypatch):
    monkeypatch.setenv("THEIR_KEY", "their-secret-1")
    with provider() as (url, asked):
        endpoint = ModelEndpoint(url, "big", "THEIR_KEY")
        gateway = tiny_gateway(
            routes=ModelRoutes({"gpt*": endpoint}, ModelEndpoint(url, api_key_env=""))
        )
        address, session = GatewayAddress(), gateway.open(TASK)
        headers = {"x-api-key": session.key, "anthropic-version": "2023-06-01"}
        async with address.serving(gateway), httpx.AsyncClient(headers=headers) as client:
            base = f"{address.url}/v1"
            done = await client.post(f"{base}/chat/completions", json=ASK)
            assert done.json()["choices"][0]["message"]["content"] == "four"
            streamed = await client.post(f"{base}/messages", json={**ASK, "stream": True})
            assert streamed.headers["content-type"].startswith("text/event-stream")
            assert streamed.text.startswith("data: {")
            done = await client.post(f"{base}/embeddings", json={"input": "x", "model": "e"})
            assert done.json()["data"] == [{"embedding": [1.0]}]
        address.close()
        paths = ["/v1/chat/completions", "/v1/messages", "/v1/embeddings"]
        assert [path for path, _, _ in asked] == paths
        assert [body["model"] for _, body, _ in asked] == ["big", "big", "e"]
        keys = [(sent.get("authorization"), sent.get("x-api-key")) for _, _, sent in asked]
        assert keys == [("Bearer their-secret-1", "their-secret-1")] * 2 + [(None, None)]
        assert session.key not in str(asked)
        assert asked[1][2]["anthropic-version"] == "2023-06-01"
    assert session.counts["passed_calls"] == 2 and session.counts["embeddings"] == 1
    assert session.end().status == "env_error"  # the policy was asked nothing
    gateway.policy.engine.close()


async def test_what_the_endpoint_refuses_is_a_refusal_and_ends_nothing():
    with provider(404) as (url, _):
        with pytest.raises(RefusedRequest) as refused:
            await ModelEndpoint(url).send("/v1/messages", ASK, {})
        assert refused.value.kind == "not_found" and "answered 404" in str(refused.value)


async def test_without_a_server_for_them_embeddings_are_refused_with_the_key():
    gateway = tiny_gateway()
    address, session = GatewayAddress(), gateway.open(TASK)
    async with address.serving(gateway), httpx.AsyncClient() as client:
        bearer = {"authorization": f"Bearer {session.key}"}
        done = await client.post(f"{address.url}/v1/embeddings", json={}, headers=bearer)
    address.close()
    gateway.policy.engine.close()
    assert done.status_code == 404 and "agent.embeddings=" in done.json()["error"]["message"]


def recipe(**agent: Any) -> Any:
    task = {"env": "arithmetic", "agent": "m:f"}
    return check({"model": {"path": "m"}, "task": task, "agent": agent})


def test_the_recipe_says_who_answers(monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    url = "http://127.0.0.1:9/v1"
    models = {"policy": "policy", "*judge*": "frozen", "old": {"frozen": "runs/a"}}
    config = recipe(models={**models, "gpt": {"endpoint": url, "model": "big"}})
    assert config.agent.frozen == {"*judge*": "reference", "old": "runs/a"}
    routes = make_routes(config)
    assert routes.route("a judge") == FrozenModel("reference") and routes.route("policy") is None
    endpoint = routes.route("gpt")
    assert isinstance(endpoint, ModelEndpoint) and endpoint.url == url.removesuffix("/v1")
    with pytest.raises(ConfigError, match="MY_KEY"):
        make_routes(recipe(embeddings={"endpoint": url, "api_key_env": "MY_KEY"}))


@pytest.mark.parametrize(
    "models",
    [
        {"a": "thawed"},
        {"a": {}},
        {"a": {"endpoint": "ftp://host"}},
        {"a": {"endpoint": "http://me:pw@host"}},
        {"a": {"endpoint": "http://host", "frozen": "runs/a"}},
        {"a": {"frozen": "runs/a", "api_key_env": "KEY"}},
        {"a": {"endpoint": "http://host", "key": "KEY"}},
    ],
)
def test_a_rule_that_says_two_things_or_none_is_refused(models: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"agent\.models"):
        recipe(models=models)


async def judged(task: Task, client: Any) -> float:
    said = await client.chat(task.prompt)
    verdict = await client.chat([{"role": "user", "content": said["content"]}], model="my-judge")
    return float(len(verdict["content"]) % 2)


@pytest.mark.slow
def test_a_run_asks_the_weights_that_it_started_from(tmp_path):
    config = runs.recipe(tmp_path, f"{__name__}:judged")
    train_recipe({**config, "agent": {"models": {"*judge": "frozen"}}})
    lines = (tmp_path / "agents" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "num_trained_tokens" in row]
    assert len(steps) == 2 and (tmp_path / "agents" / "reference").is_dir()
    assert all((row["agent/calls"], row["agent/frozen_calls"]) == (1.0, 1.0) for row in steps)
    with pytest.raises(ConfigError, match=r"engine\.name=native"):
        refuse_agents(
            check({**config, "agent": {"models": {"j": "frozen"}}, "engine": {"name": "vllm"}})
        )

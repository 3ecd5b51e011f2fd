"""`graft serve agent`: what it makes of its options and of the recipe."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from graft.commands.serve import recipe_overrides, refuse_options
from graft.config import Config, ConfigError, check, load_config
from graft.train.rollouts.agents import refuse_agents

RECIPE = """
model: {{path: m}}
task: {{env: arithmetic, agent: {agent}}}
agent: {{host: "{host}"}}
run: {run}
"""


def served(
    folder: Path,
    overrides: list[str],
    agent: str = "external",
    host: str = "127.0.0.1",
    run: str = "{}",
    **options: str | int,
) -> Config:
    """The settings of the run that is served."""
    file = folder / "recipe.yaml"
    file.write_text(RECIPE.format(agent=agent, host=host, run=run))
    given = {"host": None, "port": None, **options}
    return load_config(str(file), recipe_overrides(str(file), overrides=overrides, **given))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFT_AGENT_TOKEN", "tok")
    monkeypatch.delenv("RANK", raising=False)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def test_the_address_is_the_recipes_unless_an_option_names_another(tmp_path: Path, capsys):
    own, other = free_port(), free_port()
    here = f"127.0.0.1:{own}"
    assert served(tmp_path, [], host=here).agent.host == here
    said = capsys.readouterr().out
    assert said == f"agents claim attempts with POST http://{here}/graft/sessions?token=tok\n"
    assert served(tmp_path, [], host=here, port=other).agent.host == f"127.0.0.1:{other}"
    assert served(tmp_path, [f"agent.host=127.0.0.1:{other}"], host=here).agent.host == (
        f"127.0.0.1:{other}"
    )
    some = served(tmp_path, [], host=here, port=0).agent.host
    assert some != here and int(some.partition(":")[2])
    assert os.environ["GRAFT_AGENT_TOKEN"] == "tok"


def test_held_out_tasks_are_attempted_only_where_somebody_says_so(tmp_path: Path):
    def tasks(overrides: list[str], agent: str, run: str) -> int:
        return served(tmp_path, overrides, agent=agent, run=run).run.eval_tasks

    assert tasks([], "external", "{}") == 0
    assert tasks([], "external", "{eval_tasks: 3}") == 3
    assert (
        tasks([], "python a.py", "{eval_tasks: 3}") == 0
    )  # meant for an agent that the run starts
    assert tasks(["run.eval_tasks=5"], "python a.py", "{}") == 5


def test_of_several_processes_the_first_one_listens(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with socket.create_server(("127.0.0.1", 0)) as taken:  # by the first one
        here = f"127.0.0.1:{taken.getsockname()[1]}"
        assert served(tmp_path, [], host=here).agent.host == here
    assert capsys.readouterr().out == ""


def test_options_of_the_other_kind_are_refused(tmp_path: Path):
    file = tmp_path / "recipe.yaml"
    file.write_text("task: {env: arithmetic}")
    assert refuse_options(str(file), ["train.steps=1"], {"--out": None})
    assert not refuse_options("a/model", [], {"--out": Path("x")})
    with pytest.raises(ConfigError, match="a/model is no recipe, and overrides"):
        refuse_options("a/model", ["train.steps=1"], {})
    with pytest.raises(ConfigError, match="--temperature is for a model"):
        refuse_options(str(file), [], {"--out": None, "--temperature": 0.0})
    with pytest.raises(ConfigError, match="are elsewhere"):
        refuse_options(str(file), ["task.agent=python a.py"], {})


def refuse(name: str, world: int, monkeypatch: pytest.MonkeyPatch, **sections: object) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    task = {"env": "arithmetic", "agent": name}
    refuse_agents(check({"model": {"path": "m"}, "task": task, **sections}))


def test_several_processes_have_an_address_each(monkeypatch: pytest.MonkeyPatch):
    port = {"host": "127.0.0.1:8399"}
    refuse("external", 1, monkeypatch, agent=port)
    refuse("external", 2, monkeypatch, agent=port, engine={"tp": 2})  # they sample together
    refuse("m:f", 2, monkeypatch)
    with pytest.raises(ConfigError, match=r"one each; use one process.*engine.tp=2"):
        refuse("external", 2, monkeypatch, agent=port)
    with pytest.raises(ConfigError, match=r"names a port.*leave the port out"):
        refuse("m:f", 2, monkeypatch, agent=port)
    with pytest.raises(ConfigError, match="names a port"):
        refuse("m:f", 1, monkeypatch, agent=port, cluster={"address": "local", "workers": 1})

"""The agents of a recipe: `task.agent` behind a gateway, and what does not go with them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from graft.config import Config, ConfigError
from graft.envs import find
from graft.gateway.address import GatewayAddress, split_address
from graft.gateway.attempts import AgentAttempts
from graft.gateway.external import ExternalAgents
from graft.gateway.programs import CommandAgent, make_program
from graft.gateway.speakers.endpoint import ModelEndpoint
from graft.gateway.speakers.main_choice import MainPattern
from graft.gateway.speakers.routes import FrozenModel, ModelRoutes, Route
from graft.protocols import Engine
from graft.recipe.agent_keys import AgentSection
from graft.rollout.branches.branch import Branch
from graft.train.rollouts.rollout_engine import engine_tp, is_external
from graft.user_code import UserObject

EXTERNAL = "external"
"""The task.agent of attempts that agents elsewhere claim."""
TOKEN = "GRAFT_AGENT_TOKEN"
"""Environment variable with the token that claims attempts; `graft serve agent` makes one and prints it."""
SHELL_WORDS = {"|", "||", "&&", ";", "&", ">", ">>", "<", "2>", "2>&1"}
OPTIONS = {
    "seconds": "seconds",
    "concurrency": "concurrency",
    "client_sampling": "honour_client",
    "roles": "trained_roles",
    "on_crash": "on_crash",
    "provider_tools": "provider_tools",
    "formats": "formats",
}
"""Key of the recipe -> argument of AgentAttempts."""
UNCLAIMED_SECONDS = 7 * 86_400.0
"""That an attempt waits for an agent which claims it."""


def make_agents(config: Config, frozen: Mapping[str, Engine] | None = None) -> AgentAttempts | None:
    """The agents that attempt the tasks of a recipe; None: the policy acts in the environment.

    frozen: engines of the frozen models of agent.models, by path.
    """
    if not config.task.agent:
        _refuse_without_agent(config.agent)
        return None
    refuse_agents(config)
    section, is_external = config.agent, config.task.agent == EXTERNAL
    token = os.environ.get(TOKEN, "").strip() if is_external else ""
    if is_external and not token:
        raise ConfigError(
            f"task.agent=external: agents claim attempts with a token, and ${TOKEN} is empty; set it, or use "
            "`graft serve agent RECIPE`, which makes one"
        )
    address = GatewayAddress(*split_address(section.host), token)
    if is_external:
        program = ExternalAgents(section.seconds, is_graded=bool(config.task.reward))
        address.app.source = program
    else:
        program = make_program(config.task.agent, section.variables)
        is_here = not config.cluster.address and not _has_machine(config)
        if isinstance(program, CommandAgent) and is_here:
            program.check()
    options = {option: getattr(section, key) for key, option in OPTIONS.items()}
    for (
        key,
        option,
    ) in OPTIONS.items():  # of `@graft.rollout(...)`, unless the recipe says otherwise
        if getattr(section, key) == getattr(AgentSection(), key):
            options |= {option: getattr(program, "options", options).get(option, options[option])}
    decorated = getattr(program, "options", {})
    if section.main or "main" not in decorated:
        options["main"] = MainPattern(**section.main)
    else:
        options["main"] = decorated["main"]
    if section.models or section.embeddings or "routes" not in decorated:
        options |= {"routes": make_routes(config), "frozen": frozen}
    else:
        engines = {name: engine.sampler for name, engine in decorated["frozen"].items()}
        options |= {"routes": decorated["routes"], "frozen": engines}
    if is_external:
        options["seconds"] = UNCLAIMED_SECONDS
    return AgentAttempts(program, address, **options)


def _has_machine(config: Config) -> bool:
    """Whether an environment of the recipe has machines, on which commands of agents run."""
    return any(hasattr(find(item.env).builder(), "run_agent") for item in config.task.envs)


def make_routes(config: Config) -> ModelRoutes:
    """The models that answer agents, by name, and the endpoint that embeds."""
    section = config.agent

    def endpoint(key: str, rule: Mapping[Any, str]) -> ModelEndpoint:
        model, variable = rule.get("model", ""), rule.get("api_key_env", "")
        try:
            return ModelEndpoint(rule["endpoint"], model, variable, config.rollout.deadline)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error

    entries: dict[str, Route] = dict.fromkeys(section.models)
    entries |= {name: FrozenModel(path) for name, path in section.frozen.items()}
    for name, rule in section.models.items():
        if isinstance(rule, dict) and "endpoint" in rule:
            entries[name] = endpoint(f"agent.models, {name}", rule)
    embedded = section.embeddings
    return ModelRoutes(entries, endpoint("agent.embeddings", embedded) if embedded else None)


def external_note(config: Config, agents: AgentAttempts | None, is_first: bool) -> str:
    """How agents elsewhere claim the attempts of a run; of several processes the first one listens."""
    if agents is None or config.task.agent != EXTERNAL or not is_first:
        return ""
    url = f"{agents.address.url}/graft/sessions"
    return f"agents claim attempts with POST {url}, and ${TOKEN} as the bearer's token"


def _refuse_without_agent(section: AgentSection) -> None:
    """Refuse settings of agents where there is none."""
    default = AgentSection()
    for name in AgentSection.model_fields:
        if (value := getattr(section, name)) != getattr(default, name):
            raise ConfigError(
                f"agent.{name}={value} is for the agent that task.agent names, and task.agent is empty; name "
                "it there, or leave this out (`graft serve agent RECIPE` serves agents elsewhere)"
            )


def refuse_agents(config: Config) -> None:
    """Refuse settings that do nothing where agents attempt the tasks."""
    task = config.task
    words = task.agent.split() if isinstance(task.agent, str) else task.agent
    if shell := sorted(SHELL_WORDS & {*words}):
        raise ConfigError(
            f"task.agent={task.agent!r} has {shell[0]!r}, which no shell reads: the program would get it as "
            "a word. Leave it out, or name the shell: sh -c '...'"
        )
    for item in [*task.envs, *config.held_out_envs]:
        if item.wrappers:
            raise ConfigError(
                f"task.wrappers={item.wrappers} wrap the turns of an environment, and task.agent takes its "
                "own: the environment only poses the task. Leave the wrappers out, and give the agent the "
                "tools"
            )
        if item.prefill:
            raise ConfigError(
                "task.prefill begins the answers of an environment's attempts, and task.agent writes its "
                "own requests; leave it out"
            )
    if config.actions.file:
        raise ConfigError(
            f"actions.file={config.actions.file}: an agent reads the policy's calls from its text, so "
            "actions beyond the vocabulary cannot reach it; leave actions.file or task.agent out"
        )
    _refuse_processes(config, int(os.environ.get("WORLD_SIZE", 1)))
    if config.agent.frozen and (is_external(config) or config.cluster.address):
        raise ConfigError(
            f"agent.models names frozen models ({', '.join(config.agent.frozen)}), which need an engine of "
            "this process each; use engine.name=native without cluster.address, or an endpoint"
        )
    if config.rollout.frozen:
        raise ConfigError("rollout.frozen is for seats of a game, which task.agent does not play")


def _refuse_processes(config: Config, world: int) -> None:
    """Refuse several processes at one address."""
    if world == 1 and not config.cluster.address:
        return
    if config.task.agent == EXTERNAL and (config.cluster.address or engine_tp(config) != world):
        remedy = "use one process, or an agent that the run starts"
        if not config.cluster.address:
            remedy += f"; with engine.tp={world} all of them sample together, at one address"
        raise ConfigError(
            "task.agent=external: the agents claim attempts at one address, and several processes would "
            f"have one each; {remedy}"
        )
    if config.task.agent != EXTERNAL and split_address(config.agent.host)[1]:
        raise ConfigError(
            f"agent.host={config.agent.host} names a port, and each of several processes needs its own; "
            "leave the port out, and each takes a free one"
        )


def refuse_forks(config: Config, branch: Branch) -> None:
    """Refuse a branch that forks contexts of the engine where agents attempt the tasks."""
    if config.task.agent and not getattr(branch, "runs_programs", False):
        raise ConfigError(
            f"{UserObject(branch, 'branch')} forks attempts inside the engine, and those of task.agent are "
            "made by programs; set rollout.branch=independent"
        )

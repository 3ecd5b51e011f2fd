"""Keys about the agents of others: the gateway that they take for their model provider."""

from __future__ import annotations

from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from graft.recipe.section import Section

RuleKey = Literal["endpoint", "model", "api_key_env", "frozen"]
ModelRule = Literal["policy", "frozen"] | dict[RuleKey, str]


class AgentSection(Section):
    """The settings of the gateway that the agents of task.agent take for their model provider."""

    seconds: float = Field(default=1800.0, gt=0)
    """Seconds that one attempt of task.agent may take; then its processes are killed."""
    concurrency: int = Field(default=0, ge=0)
    """Attempts of task.agent that run at a time; 0: 64 processes of a command, or 512 calls of a function."""
    main: dict[Literal["model", "system", "tools"], str] = {}
    """What the agent's own conversation has, which task.reward reads: shell patterns of its model's name, of
    a part of its system prompt, of a tool's name, such as {tools: bash}. Empty: the one with the task's
    prompt, else the one with tools, else the longest."""
    roles: list[Literal["main", "sub-agent", "summary", "user"]] = Field(
        default=["main", "sub-agent", "summary"], min_length=1
    )
    """Whose answers are trained: the agent's own, those of its sub-agents, those that it continues from as
    a summary; and, only if named, those of a simulated user."""
    models: dict[str, ModelRule] = {}
    """Which model answers a request, by the name or shell pattern of the model that it asks for: policy;
    frozen, a copy with the weights that RL starts from, or {frozen: CHECKPOINT}; {endpoint: URL, model: NAME,
    api_key_env: VARIABLE}, a server that gets it as it is. Only the policy is trained. A name without a rule
    is the policy's."""
    embeddings: dict[Literal["endpoint", "model", "api_key_env"], str] = {}
    """The server that embeds texts for agents: {endpoint: URL, model: NAME, api_key_env: VARIABLE}; empty:
    requests for embeddings are refused."""
    on_crash: Literal["zero", "drop"] = "zero"
    """An attempt whose program crashes after it had an answer: zero trains it with reward 0, as the answer
    may be why; drop does not train it, and then the policy never learns from its worst answers."""
    provider_tools: Literal["drop", "refuse"] = "drop"
    """Tools that a provider would run, such as web_search, which programs offer by default: drop shows the
    policy the others and says so once; refuse answers such requests with an error."""
    formats: Literal["enforce", "strict", "prompt"] = "enforce"
    """Formats that programs ask for, such as response_format with a JSON schema: enforce allows the policy
    only tokens that go on with one, in training too; strict does the same for the arguments of tools that are
    marked as strict; prompt writes the format into the prompt and leaves the policy's distribution alone."""
    client_sampling: bool = False
    """Sample with the temperature, top_p and top_k that the agent asks for; answers drawn otherwise than
    rollout says are then not trained. false: always as rollout says."""
    variables: list[str] = []
    """Environment variables of the run that a command of task.agent gets besides PATH, HOME, LANG and the
    like: names, also with a star, such as [CLAUDE_CODE_*]. Without it, it gets no token and no key."""
    host: str = "127.0.0.1"
    """Address that the gateway listens on, with a port (127.0.0.1:8399) or a free one; one that is not a
    loopback address can be reached by other machines."""

    @property
    def frozen(self) -> dict[str, str]:
        """The frozen models of `models`: the name or pattern, and the reference or the path."""
        paths: dict[str, str] = {}
        for name, rule in self.models.items():
            if rule == "frozen":
                paths[name] = "reference"
            elif isinstance(rule, dict) and "frozen" in rule:
                paths[name] = rule["frozen"]
        return paths

    @field_validator("models", mode="before")
    @classmethod
    def _rules(cls, rules: Any) -> Any:
        for name, rule in rules.items() if isinstance(rules, dict) else ():
            if rule not in ("policy", "frozen") and (
                not isinstance(rule, dict) or not rule or not set(rule) <= {*get_args(RuleKey)}
            ):
                raise ValueError(
                    f"{name}: {rule!r} must be policy, frozen, {{frozen: CHECKPOINT}}, or {{endpoint: URL, "
                    "model: NAME, api_key_env: VARIABLE}"
                )
        return rules

    @field_validator("host", mode="before")
    @classmethod
    def _host(cls, host: Any) -> Any:
        if isinstance(host, int) or (isinstance(host, str) and host.isdecimal()):
            raise ValueError(
                f"a port alone; write the address before it, as in agent.host=127.0.0.1:{host}"
            )
        return host

    @field_validator("models")
    @classmethod
    def _models(cls, rules: dict[str, ModelRule]) -> dict[str, ModelRule]:
        for name, rule in rules.items():
            if isinstance(rule, dict) and ("frozen" in rule) == ("endpoint" in rule):
                raise ValueError(
                    f"{name}: give {{endpoint: URL}} or {{frozen: CHECKPOINT}}, not {rule}"
                )
            if isinstance(rule, dict) and "frozen" in rule and len(rule) > 1:
                raise ValueError(
                    f"{name}: a frozen model is here, and has no {', '.join({*rule} - {'frozen'})}"
                )
            if isinstance(rule, dict) and "endpoint" in rule:
                _check_endpoint(name, rule["endpoint"])
        return rules

    @field_validator("embeddings")
    @classmethod
    def _embeddings(cls, rule: dict[str, str]) -> dict[str, str]:
        if rule:
            _check_endpoint("embeddings", rule.get("endpoint", ""))
        return rule


def _check_endpoint(name: str, url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"{name}: {url!r} is not the address of a server, such as http://host:8000/v1"
        )
    if parts.username or parts.query:
        raise ValueError(
            f"{name}: the address has a password or a query; give the key as api_key_env"
        )
